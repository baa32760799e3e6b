"""One emulated pair, put together from the parts that a deployment has: engine loop, drafter, devices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.dispatch import EngineEvent, SequenceDelta, SequenceEnd, SequenceSubmit
from outrider.core.errors import InvalidRequest
from outrider.core.link import Hello
from outrider.core.policy import GateSettings
from outrider.core.ports import DraftTransport
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice, VerificationRule
from outrider.draft.config import DraftConfig, DraftIdentity
from outrider.draft.drafter import Drafter
from outrider.engine.emulated.clock import DeviceClock
from outrider.engine.emulated.device import DeviceProfile, h100_llama_1b, h100_tp4_llama_70b
from outrider.engine.emulated.engine import EmulatedConfig, EmulatedEngine
from outrider.engine.emulated.text import HEADER_LEN, TextSettings, header_tokens
from outrider.engine.scripted_text import ScriptedTokenizer
from outrider.engine.sequence_kv import KVCache
from outrider.target.admission import SequenceFactory
from outrider.target.builder import build_loop
from outrider.target.config import TargetConfig
from outrider.target.loop import EngineLoop
from outrider.target.running import RunningSequence

__all__ = [
    "MAX_K",
    "TOKENIZER",
    "VOCAB_SIZE",
    "EmulatedDraft",
    "EmulatedTarget",
    "Load",
    "PairProfile",
    "PairSettings",
    "emulated_request",
    "greeting",
]

VOCAB_SIZE = 128
"""Of both engines."""
TOKENIZER = ScriptedTokenizer(VOCAB_SIZE)
"""Text for the ids, where a stack needs some."""
MAX_K = 16
"""Most draft tokens of a round, whatever the settings."""
_BLOCK_SIZE = 16
_DRAFT_ROOM = 4
"""KV of the draft over that of the target, for the branches of outcome tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProfile:
    """The hardware and models of one target group and its draft, and the network between them."""

    target: DeviceProfile = field(default_factory=h100_tp4_llama_70b)
    draft: DeviceProfile = field(default_factory=h100_llama_1b)
    hop_s: float = 0.25e-3
    """One message between target and draft, one way. In real time the network takes what it takes."""

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.target.name}, draft {self.draft.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """One pair under one load."""

    profile: PairProfile = field(default_factory=PairProfile)
    text: TextSettings = field(default_factory=TextSettings)
    batch: int = 1
    """Streams that run together."""
    prompt_len: int = 32
    max_tokens: int = 1024
    """Most output tokens of a stream; sizes KV."""
    max_draft_wait_s: float = TargetConfig().max_draft_wait_s
    """Longest planned wait for a block."""

    @property
    def max_model_len(self) -> int:
        """Positions of the longest text."""
        return self.prompt_len + self.max_tokens

    @property
    def num_blocks(self) -> int:
        """KV blocks that hold every stream and its drafted rows."""
        return self.batch * (-(-(self.max_model_len + MAX_K) // _BLOCK_SIZE) + 1)

    def engine_config(self, device: DeviceProfile, *, drafts: bool) -> EmulatedConfig:
        """The engine of either side."""
        return EmulatedConfig(
            role="draft" if drafts else "target",
            device=device,
            text=self.text,
            vocab_size=VOCAB_SIZE,
            num_blocks=self.num_blocks * (_DRAFT_ROOM if drafts else 1),
            block_size=_BLOCK_SIZE,
            max_model_len=self.max_model_len + (MAX_K if drafts else 0),
        )

    @property
    def target_config(self) -> TargetConfig:
        """Settings of the engine loop: the whole load runs at once."""
        rows = self.batch * max(1 + MAX_K, self.prompt_len)
        return TargetConfig(
            max_num_seqs=self.batch,
            max_num_batched_tokens=rows,
            max_draft_tokens_limit=MAX_K,
            max_draft_wait_s=self.max_draft_wait_s,
        )

    @property
    def draft_config(self) -> DraftConfig:
        """Settings of the drafter: the whole load is one round."""
        return DraftConfig(
            max_num_seqs=max(256, self.batch),
            max_num_draft_tokens=MAX_K,
            max_round_seqs=max(64, self.batch),
            max_queued_rows=max(256, self.batch),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long the streams run."""

    steps: int
    """Engine steps that are measured."""
    warmup_steps: int
    """Engine steps before them."""
    first_seed: int = 1
    """The streams run the texts with this number and those that follow."""


class EmulatedTarget:
    """An engine loop on an emulated target, and the texts that it delivers."""

    def __init__(
        self, settings: PairSettings, gate: GateSettings, transport: DraftTransport | None, clock: DeviceClock
    ) -> None:
        self.engine = EmulatedEngine(settings.engine_config(settings.profile.target, drafts=False), clock)
        self.texts: dict[int, list[int]] = {}
        """Delivered output by stream key."""
        self.ends: dict[int, SequenceEnd] = {}
        self.loop: EngineLoop = build_loop(
            engine=self.engine,
            config=settings.target_config,
            gate_settings=gate,
            num_valid_ids=VOCAB_SIZE,
            transport=transport,
            clock=clock,
            emit=self._emit,
        )
        self._sequences = SequenceFactory(
            config=settings.target_config,
            limits=self.engine.limits,
            num_valid_ids=VOCAB_SIZE,
            detokenizers=TOKENIZER.detokenizer,
            clock=clock,
            fits_alone=self.loop.scheduler.fits_alone,
        )

    def submit(self, stream_key: int, request: SequenceRequest) -> None:
        """Queue a request. Raises `InvalidRequest` when the engine cannot run it."""
        made = self._sequences.make(SequenceSubmit(stream_key=stream_key, request=request), session_id=1)
        if not isinstance(made, RunningSequence):
            raise InvalidRequest("request", made.message)
        self.texts[stream_key] = []
        self.loop.scheduler.submit(made)

    def _emit(self, session_id: int, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, SequenceDelta):
                self.texts[event.stream_key] += event.token_ids
            elif isinstance(event, SequenceEnd):
                self.ends[event.stream_key] = event


class EmulatedDraft:
    """A drafter on an emulated device."""

    def __init__(self, settings: PairSettings, clock: DeviceClock) -> None:
        self.engine = EmulatedEngine(settings.engine_config(settings.profile.draft, drafts=True), clock)
        self.config = settings.draft_config
        limits = self.engine.limits
        self.drafter = Drafter(
            engine=self.engine,
            kv=KVCache(num_blocks=limits.num_blocks, block_size=limits.block_size),
            identity=DraftIdentity(
                incarnation=1,
                model=settings.profile.draft.name,
                vocab_size=VOCAB_SIZE,
                tokenizer_fingerprint=TOKENIZER.fingerprint(),
            ),
            config=self.config,
            clock=clock,
        )


def greeting(settings: PairSettings, engine_id: str = "emulated") -> Hello:
    """What the target says to the draft first."""
    return Hello(
        engine_id=engine_id,
        engine_epoch=1,
        link_id=1,
        target_model=settings.profile.target.name,
        vocab_size=VOCAB_SIZE,
        tokenizer_fingerprint=TOKENIZER.fingerprint(),
        max_num_draft_tokens=MAX_K,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.batch,
    )


def emulated_request(
    settings: PairSettings, seed: int, *, rule: VerificationRule = VerificationRule.COUPLED
) -> SequenceRequest:
    """A greedy request for text number `seed`: what drives emulated logits as they are meant."""
    filler = (0,) * (settings.prompt_len - HEADER_LEN)
    return SequenceRequest(
        request_id=f"text-{seed}",
        prompt_token_ids=(*header_tokens(seed, VOCAB_SIZE), *filler),
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=settings.max_tokens),
        noise_key=seed,
        speculation=SpeculationChoice(rule=rule),
    )
