"""A drafter with a scripted engine, and a target that says whatever a test wants."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from outrider.core.link import (
    DraftEvent,
    DraftProposal,
    Hello,
    OpenAck,
    OpenSequence,
    Resync,
    TargetEvent,
    VerdictRow,
    Verdicts,
)
from outrider.core.policy import RoundPlan
from outrider.core.prefix_hash import PrefixHash
from outrider.core.proposal import Proposal
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationMode, SpeculationReason, VerificationRule
from outrider.decoding.propose import ProposeRow, propose
from outrider.draft.config import DraftConfig, DraftIdentity
from outrider.draft.drafter import Drafter, nothing_new
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.engine.sequence_kv import KVCache

GREEDY = SamplingParams(temperature=0.0)
MAX_STEPS = 2000

E = TypeVar("E")


class ManualClock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class TimedEngine(ScriptedEngine):
    """Every forward takes 2 ms of the manual clock; keeps the rows of each batch, slice by slice."""

    def __init__(self, config: ScriptedConfig, clock: ManualClock) -> None:
        super().__init__(config)
        self._clock = clock
        self.batches: list[list[int]] = []

    def forward(self, batch: ForwardBatch):  # type: ignore[no-untyped-def]
        self._clock.time += 0.002
        self.batches.append([len(one.token_ids) for one in batch.slices])
        return super().forward(batch)


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "engine_id": "engine-0",
        "engine_epoch": 1,
        "link_id": 77,
        "target_model": "target",
        "vocab_size": 64,
        "tokenizer_fingerprint": b"same",
        "max_num_draft_tokens": 8,
        "max_model_len": 512,
        "max_num_seqs": 32,
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


def plan(num_draft_tokens: int) -> RoundPlan:
    mode = SpeculationMode.SEQUENTIAL if num_draft_tokens else SpeculationMode.OFF
    return RoundPlan(mode=mode, num_draft_tokens=num_draft_tokens, reason=SpeculationReason.ON)


class Peer:
    """A target on one link: the committed text of its sequences, and the verdicts that make it."""

    def __init__(self, bench: "Bench", link_id: int) -> None:
        self.bench = bench
        self.link_id = link_id
        self.texts: dict[int, list[int]] = {}
        self.openings: dict[int, OpenSequence] = {}
        self.received: list[DraftEvent] = []

    def say(self, *events: TargetEvent) -> None:
        self.bench.drafter.handle(self.link_id, events)

    def take(self, kind: type[E]) -> list[E]:
        """Remove and return the received events of one kind."""
        taken: list[E] = [one for one in self.received if isinstance(one, kind)]
        self.received = [one for one in self.received if not isinstance(one, kind)]
        return taken

    def opening(self, handle: int, text: Sequence[int], **changes: object) -> OpenSequence:
        fields: dict[str, object] = {
            "handle": handle,
            "token_ids": tuple(text),
            "prompt_len": len(text),
            "sampling": GREEDY,
            "noise_key": 1234567,
            "rule": VerificationRule.COUPLED,
        }
        self.openings[handle] = OpenSequence(**(fields | changes))  # type: ignore[arg-type]
        self.texts[handle] = list(text)
        return self.openings[handle]

    def open(self, handle: int, text: Sequence[int], **changes: object) -> None:
        """Open a sequence and let the draft acknowledge it."""
        self.say(self.opening(handle, text, **changes))
        self.bench.settle()
        acks = self.take(OpenAck)
        assert acks == [OpenAck(handle=handle, have_len=len(text))]

    def row(
        self,
        handle: int,
        next_token_id: int,
        *,
        k: int = 0,
        judged: Proposal | None = None,
        num_accepted: int = 0,
        accepted: Sequence[int] = (),
    ) -> VerdictRow:
        """Commit on the target's side and make the row that tells the draft."""
        text = self.texts[handle]
        base_len = len(text)
        if judged is not None:
            offset = base_len - judged.base_len
            text.extend(judged.token_ids[offset : offset + num_accepted])
        else:
            text.extend(accepted)
        text.append(next_token_id)
        return VerdictRow(
            handle=handle,
            base_len=base_len,
            block_id=judged.block_id if judged is not None else 0,
            num_accepted=num_accepted if judged is not None else len(accepted),
            next_token_id=next_token_id,
            accepted_token_ids=tuple(accepted) if judged is None else (),
            prefix_hash=PrefixHash(text).value,
            plan=plan(k),
        )

    def judge(self, *rows: VerdictRow) -> None:
        self.say(Verdicts(step=1, rows=rows))

    def resync(self, handle: int, first_position: int) -> None:
        self.say(
            Resync(handle=handle, first_position=first_position, token_ids=tuple(self.texts[handle][first_position:]))
        )

    def blocks(self) -> dict[int, Proposal]:
        """Run until the draft rests; the blocks that came, by handle."""
        self.bench.settle()
        proposals = self.take(DraftProposal)
        blocks = {one.handle: one.proposal for one in proposals}
        assert len(blocks) == len(proposals), "two blocks for one sequence"
        return blocks

    def oracle(self, handle: int, count: int) -> list[int]:
        """What the draft's model itself says behind the committed text, from scratch."""
        return self.bench.continuation(self.openings[handle], self.texts[handle], count)


class Bench:
    """A drafter on a manual clock, with any number of peers."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_model_len: int = 512,
        vocab_size: int = 64,
        slope: float = 0.5,
        **config: object,
    ) -> None:
        self.clock = ManualClock()
        self._script = ScriptedConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            slope=slope,
        )
        self.engine = TimedEngine(self._script, self.clock)
        self.kv = KVCache(num_blocks=num_blocks, block_size=block_size)
        self.config = DraftConfig(**config)  # type: ignore[arg-type]
        self.drafter = Drafter(
            engine=self.engine,
            kv=self.kv,
            identity=DraftIdentity(incarnation=5, model="draft", vocab_size=vocab_size, tokenizer_fingerprint=b"same"),
            config=self.config,
            clock=self.clock,
        )
        self.peers: dict[int, Peer] = {}

    def peer(self, link_id: int = 1, **changes: object) -> Peer:
        self.drafter.connect(link_id, hello(**changes))
        self.peers[link_id] = Peer(self, link_id)
        return self.peers[link_id]

    def deliver(self, outbound: Sequence[tuple[int, tuple[DraftEvent, ...]]]) -> None:
        for link_id, events in outbound:
            self.peers[link_id].received.extend(events)

    def step(self, poll: Callable[[], None] = nothing_new) -> None:
        self.deliver(self.drafter.step(poll))

    def settle(self) -> None:
        """Step until nothing is left to do."""
        self.deliver(self.drafter.flush())
        for _ in range(MAX_STEPS):
            if not self.drafter.has_work:
                return
            self.step()
        raise AssertionError("the drafter never comes to rest")

    def continuation(self, opening: OpenSequence, text: Sequence[int], count: int) -> list[int]:
        """Draw `count` tokens behind `text` with an engine of its own, every prefix from scratch."""
        engine = ScriptedEngine(self._script)
        table = tuple(range(self._script.num_blocks))
        tokens = list(text)
        for _ in range(count):
            one = ForwardSlice(token_ids=tokens, start=0, block_table=table, num_logits=1)
            row = ProposeRow(
                sampling=opening.sampling,
                prefix=tokens,
                prompt_len=opening.prompt_len,
                noise_key=opening.noise_key,
                rule=opening.rule,
                q_top_k=self.config.q_top_k,
            )
            tokens.append(propose(engine.forward(ForwardBatch(slices=(one,))), [row])[0].token_id)
        return tokens[len(text) :]
