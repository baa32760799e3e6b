"""One engine loop on scripted models, stepped by the test itself: no thread, no network, no Ray."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.loopback import LoopbackTransport, ManualClock

from outrider.core.dispatch import EngineEvent, SequenceDelta, SequenceEnd, SequenceSubmit
from outrider.core.link import Hello, capabilities
from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice
from outrider.core.verdict import TokenLogprobs
from outrider.draft.config import DraftConfig, DraftIdentity
from outrider.draft.drafter import Drafter
from outrider.engine.base import ModelEngine
from outrider.engine.features import HasFeatures
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.engine.sequence_kv import KVCache
from outrider.target.admission import SequenceFactory
from outrider.target.builder import build_loop
from outrider.target.config import TargetConfig
from outrider.target.loop import EngineLoop
from outrider.target.running import RunningSequence

__all__ = ["CharDetokenizer", "LocalEngine", "Result", "request"]

FINGERPRINT = b"scripted"


class CharDetokenizer:
    """Token t is the character chr(97 + t % 26)."""

    def feed(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def flush(self) -> str:
        return ""


def char_detokenizers(*, context: Sequence[int], skip_special_tokens: bool) -> CharDetokenizer:
    return CharDetokenizer()


def request(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 24,
    noise_key: int = 7,
    sampling: SamplingParams | None = None,
    speculation: SpeculationChoice | None = None,
    resume: Sequence[int] = (),
    top_logprobs: int | None = None,
    timeout_s: float | None = None,
    **stop: object,
) -> SequenceRequest:
    return SequenceRequest(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        resume_token_ids=tuple(resume),
        sampling=sampling or SamplingParams(),
        stop=StopConditions(max_tokens=max_tokens, **stop),  # type: ignore[arg-type]
        noise_key=noise_key,
        speculation=speculation or SpeculationChoice(),
        top_logprobs=top_logprobs,
        timeout_s=timeout_s,
    )


@dataclass
class Result:
    """Everything that one stream delivered."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: SequenceEnd | None = None


class LocalEngine:
    """Target and draft on scripted models, or on engines given; `draft` None: no draft is configured.

    A draft that is given is made anew whenever the draft process starts.
    """

    def __init__(
        self,
        *,
        target: ScriptedConfig | ModelEngine | None = None,
        draft: ScriptedConfig | Callable[[], ModelEngine] | None = None,
        config: TargetConfig | None = None,
        gate: GateSettings | None = None,
        draft_config: DraftConfig | None = None,
    ) -> None:
        self.clock = ManualClock()
        config_or_engine = target or ScriptedConfig()
        self.engine: ModelEngine = (
            ScriptedEngine(config_or_engine) if isinstance(config_or_engine, ScriptedConfig) else config_or_engine
        )
        self.config = config or TargetConfig()
        self._vocab = self.engine.limits.vocab_size
        self._incarnations = 0
        self._draft = draft
        self._draft_config = draft_config or DraftConfig()
        self.transport: LoopbackTransport | None = None
        if draft is not None:
            hello = Hello(
                engine_id="e",
                engine_epoch=1,
                link_id=1,
                target_model="scripted",
                vocab_size=self._vocab,
                tokenizer_fingerprint=FINGERPRINT,
                max_num_draft_tokens=self.config.max_draft_tokens_limit,
                max_model_len=self.engine.limits.max_model_len,
                max_num_seqs=self.config.max_num_seqs,
                capabilities=capabilities(stores_features=isinstance(self.engine, HasFeatures)),
            )
            self.transport = LoopbackTransport(self._make_drafter, hello, self.clock)
        self.results: dict[int, Result] = {}
        self.loop: EngineLoop = build_loop(
            engine=self.engine,
            config=self.config,
            gate_settings=gate or GateSettings(),
            num_valid_ids=self._vocab,
            transport=self.transport,
            clock=self.clock,
            emit=self._emit,
        )
        self._sequences = SequenceFactory(
            config=self.config,
            limits=self.engine.limits,
            num_valid_ids=self._vocab,
            detokenizers=char_detokenizers,
            clock=self.clock,
            fits_alone=self.loop.scheduler.fits_alone,
        )
        self._next_key = 0

    def submit(self, one: SequenceRequest) -> int:
        """Queue a request; return its stream key."""
        self._next_key += 1
        self.results[self._next_key] = Result()
        made = self._sequences.make(SequenceSubmit(stream_key=self._next_key, request=one), session_id=1)
        if isinstance(made, RunningSequence):
            self.loop.scheduler.submit(made)
        else:
            self.results[self._next_key].end = SequenceEnd(stream_key=self._next_key, failure=made)
        return self._next_key

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            if self.loop.scheduler.has_work:
                self.loop.step()

    def run(self, *requests: SequenceRequest) -> list[Result]:
        """Run requests together to their ends; return their results in order."""
        keys = [self.submit(one) for one in requests]
        while self.loop.scheduler.has_work:
            self.loop.step()
        return [self.results[key] for key in keys]

    def running(self, key: int) -> RunningSequence:
        return next(one for one in self.loop.scheduler.all() if one.stream.stream_key == key)

    def _emit(self, session_id: int, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, SequenceDelta):
                result = self.results[event.stream_key]
                result.token_ids += event.token_ids
                result.logprobs += event.logprobs
            elif isinstance(event, SequenceEnd):
                self.results[event.stream_key].end = event

    def _make_drafter(self) -> Drafter:
        assert self._draft is not None
        self._incarnations += 1
        engine = ScriptedEngine(self._draft) if isinstance(self._draft, ScriptedConfig) else self._draft()
        identity = DraftIdentity(
            incarnation=self._incarnations,
            model="scripted-draft",
            vocab_size=engine.limits.vocab_size,
            tokenizer_fingerprint=FINGERPRINT,
        )
        kv = KVCache(num_blocks=engine.limits.num_blocks, block_size=engine.limits.block_size)
        return Drafter(engine=engine, kv=kv, identity=identity, config=self._draft_config, clock=self.clock)
