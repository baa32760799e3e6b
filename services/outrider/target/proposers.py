"""Where blocks come from: the port every proposer implements, and the choice between them.

With a draft and n-grams together, the choice depends only on what was known before any token of
the round was drawn (how long is the match, what was accepted before, is a draft able to serve this
sequence, did its block arrive), never on the drafted ids; so the rejection rule stays exact.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.dispatch import DraftLinkStatus
from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.speculation import SpeculationReason
from outrider.target.running import Round, RunningSequence
from outrider.target.scheduler import StepBatch

__all__ = ["BlockChoice", "DraftTimes", "Proposer", "ProposerCounters", "ProposerSet"]


_MAX_HOPS = 4096
"""More than the steps of a second; without a reader the oldest go."""


@dataclass(slots=True)
class ProposerCounters:
    """Raw counters of one engine's proposers."""

    messages_sent: int = 0
    messages_received: int = 0
    late: int = 0
    stale: int = 0
    invalid: int = 0
    late_laws: int = 0
    """Blocks that were judged without their laws."""
    lookups: int = 0
    """Outcomes that were looked up in a table."""
    hits: int = 0
    """Look-ups that found their block: no round trip at all."""
    hops_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_HOPS))
    """Every hop to the draft that was measured and that nobody has taken yet. Appended by the engine thread;
    another may take from the left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTimes:
    """What a block costs, as far as it was measured; zeros without a draft."""

    step_s: float = 0.0
    """One draft step."""
    hop_s: float = 0.0
    """One way between target and draft."""


class Proposer(Protocol):
    """Offers blocks. Never changes a sequence; may count in its stats what arrived."""

    def problem(self) -> SpeculationReason | None:
        """Why it can serve no sequence at all right now; None when it can."""
        ...

    def availability(self, running: RunningSequence) -> SpeculationReason | None:
        """Why it cannot serve this sequence now; None when it can."""
        ...

    @property
    def times(self) -> DraftTimes:
        """What its blocks cost."""
        ...

    @property
    def drafts_ahead(self) -> bool:
        """Whether it can push blocks for outcomes of a step that still runs."""
        ...

    def has_block(self, running: RunningSequence) -> bool:
        """Whether the block for the present text is here, so that collecting it costs no waiting."""
        ...

    def launch(self, batch: StepBatch, expected_s: float) -> None:
        """A step of about this many seconds starts."""
        ...

    def laws(self) -> Mapping[int, tuple[SparseLaw, ...]]:
        """The step's verify has ended: laws, by handle, of blocks in flight that came without them.

        Whose laws are missing must not depend on the drafted ids.
        """
        ...

    def resolve(self, rounds: Sequence[Round]) -> None:
        """These rounds are over: find out whether the blocks that follow are here."""
        ...

    def prepare(self, admitted: Iterable[RunningSequence]) -> None:
        """These sequences will speculate: get ready for them."""
        ...

    def waits(self, wanted: Sequence[RunningSequence]) -> bool:
        """Whether `collect` would have to wait for one of these now."""
        ...

    def collect(self, wanted: Sequence[RunningSequence]) -> dict[int, Proposal]:
        """Blocks for the coming step by handle, at most `plan.num_draft_tokens` long each."""
        ...

    def inform(self, rounds: Sequence[Round]) -> None:
        """These rounds are finished; `running.plan` holds what comes next."""
        ...

    def explain(self, running: RunningSequence) -> SpeculationReason:
        """Why it offered nothing to a sequence that it was asked for."""
        ...

    def forget(self, running: RunningSequence) -> None:
        """This sequence is gone."""
        ...

    def poll(self) -> None:
        """Nothing runs: look at what has arrived meanwhile."""
        ...

    def links(self) -> tuple[DraftLinkStatus, ...]:
        """Links to drafts, for operators."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class BlockChoice(Protocol):
    """Decides between a draft and copies of the text, before either's tokens are looked at."""

    def copies(self, wanted: Sequence[RunningSequence]) -> dict[int, Proposal]:
        """Blocks, by handle, of the sequences that take a copy whatever the draft has."""
        ...

    def learn(self, rounds: Sequence[Round]) -> None:
        """These rounds are over."""
        ...

    def forget(self, running: RunningSequence) -> None:
        """This sequence is gone."""
        ...


class ProposerSet:
    """A draft link, n-grams, both or none, as one proposer.

    The draft comes first and n-grams in its stead, unless `choice` prefers a copy.
    """

    def __init__(self, proposers: Sequence[Proposer], choice: BlockChoice | None = None) -> None:
        self._proposers = tuple(proposers)
        self._choice = choice

    def problem(self) -> SpeculationReason | None:
        """None when any proposer can serve."""
        return self._first_reason([one.problem() for one in self._proposers])

    def availability(self, running: RunningSequence) -> SpeculationReason | None:
        """None when any proposer can serve this sequence."""
        return self._first_reason([one.availability(running) for one in self._proposers])

    @property
    def times(self) -> DraftTimes:
        """Of the first proposer, which the others only stand in for."""
        return self._proposers[0].times if self._proposers else DraftTimes()

    @property
    def drafts_ahead(self) -> bool:
        """Whether any proposer can."""
        return any(one.drafts_ahead for one in self._proposers)

    def has_block(self, running: RunningSequence) -> bool:
        """Whether any proposer has it."""
        return any(one.has_block(running) for one in self._proposers)

    def launch(self, batch: StepBatch, expected_s: float) -> None:
        """Tell every proposer."""
        for one in self._proposers:
            one.launch(batch, expected_s)

    def laws(self) -> Mapping[int, tuple[SparseLaw, ...]]:
        """Of all proposers."""
        return {handle: laws for one in self._proposers for handle, laws in one.laws().items()}

    def resolve(self, rounds: Sequence[Round]) -> None:
        """Tell every proposer."""
        for one in self._proposers:
            one.resolve(rounds)

    def prepare(self, admitted: Iterable[RunningSequence]) -> None:
        """Tell every proposer."""
        admitted = list(admitted)
        for one in self._proposers:
            one.prepare(admitted)

    def waits(self, wanted: Sequence[RunningSequence]) -> bool:
        """Whether any proposer would."""
        return any(one.waits(wanted) for one in self._proposers)

    def collect(self, wanted: Sequence[RunningSequence]) -> dict[int, Proposal]:
        """Ask in order; a later proposer is asked only for sequences that still have no block."""
        found = {} if self._choice is None else self._choice.copies(wanted)
        for one in self._proposers:
            missing = [running for running in wanted if running.handle not in found]
            found.update(one.collect(missing))
        for running in wanted:
            if (block := found.get(running.handle)) is not None:
                running.sequence.stats.drafted += len(block)
                running.note(SpeculationReason.ON)
            else:
                running.note(self._proposers[0].explain(running))
        return found

    def inform(self, rounds: Sequence[Round]) -> None:
        """Tell every proposer."""
        if self._choice is not None:
            self._choice.learn(rounds)
        for one in self._proposers:
            one.inform(rounds)

    def forget(self, running: RunningSequence) -> None:
        """Tell every proposer."""
        if self._choice is not None:
            self._choice.forget(running)
        for one in self._proposers:
            one.forget(running)

    def poll(self) -> None:
        """Let every proposer look."""
        for one in self._proposers:
            one.poll()

    def links(self) -> tuple[DraftLinkStatus, ...]:
        """Links of all proposers."""
        return tuple(link for one in self._proposers for link in one.links())

    def close(self) -> None:
        """Stop them all."""
        for one in self._proposers:
            one.close()

    def _first_reason(self, reasons: list[SpeculationReason | None]) -> SpeculationReason | None:
        if not reasons:
            return SpeculationReason.NOT_CONFIGURED
        return None if None in reasons else reasons[0]
