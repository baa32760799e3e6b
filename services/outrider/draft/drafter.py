"""Decides what a draft computes next: blocks that targets wait for, then prefill."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from outrider.core.errors import CompatibilityError, ProtocolError
from outrider.core.link import (
    Capability,
    DraftEvent,
    DraftProposal,
    DraftStats,
    Drain,
    Hello,
    HelloAck,
    RefusalReason,
    TargetEvent,
)
from outrider.core.ports import Clock
from outrider.core.proposal import Proposal
from outrider.core.speculation import ProposalSource
from outrider.draft.ahead import AheadDrafter
from outrider.draft.branch import Branch, BranchDrafter
from outrider.draft.config import DraftConfig, DraftIdentity
from outrider.draft.counters import DraftCounters
from outrider.draft.intake import Intake
from outrider.draft.link import Link
from outrider.draft.prefill import Prefiller
from outrider.draft.residents import Residents
from outrider.draft.sequence import DraftSequence
from outrider.draft.timing import StepTimer
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine, wait_of
from outrider.engine.features import FeatureSink
from outrider.engine.sequence_kv import KVCache
from outrider.telemetry.spans import DraftSpans

__all__ = ["Drafter", "Outbound", "nothing_new"]

Outbound = tuple[int, tuple[DraftEvent, ...]]
"""A link id and the events that travel to it in one message."""

_CAPABILITIES = frozenset({Capability.SEQUENTIAL, Capability.CACHED, Capability.SPARSE_LAWS, Capability.LATE_LAWS})
_WITH_FEATURES = frozenset({Capability.SEQUENTIAL, Capability.SPARSE_LAWS, Capability.FEATURES})
_WARM_UP_STEPS = 4


def nothing_new() -> None:
    """For `Drafter.step` where no events can arrive between the forwards of a round."""


class _Drafting:
    """One sequence in a round: valid while the sequence is held and its text has not moved."""

    def __init__(self, link: Link, sequence: DraftSequence, num_draft_tokens: int) -> None:
        self.link = link
        self.sequence = sequence
        self.branch = sequence.branch(num_draft_tokens)
        self._version = sequence.version

    @property
    def current(self) -> bool:
        """True while the target can use the block."""
        held = self.link.sequences.get(self.sequence.handle) is self.sequence
        return held and self.sequence.version == self._version

    def block(self, block_id: int) -> Proposal:
        """What was drafted, as a proposal.

        A target in cached mode asks for few tokens when it has to wait for them. What its table held and
        came too late with costs no more waiting, so all of that goes along.
        """
        length = max(self.branch.num_draft_tokens, self.sequence.ahead_len)
        return Proposal(
            base_len=len(self.sequence.text),
            block_id=block_id,
            token_ids=tuple(self.branch.token_ids[:length]),
            source=ProposalSource.DRAFT,
            laws=tuple(self.branch.laws[:length]),
        )


class Drafter:
    """One draft model, serving the sequences of any number of links. One thread calls it.

    `handle` changes state and computes nothing; `step` does one bounded unit of work. Both queue
    events, which `step` and `flush` return, one message per link.
    """

    def __init__(
        self,
        *,
        engine: ModelEngine,
        kv: KVCache,
        identity: DraftIdentity,
        config: DraftConfig,
        clock: Clock,
        spans: DraftSpans | None = None,
    ) -> None:
        self.counters = DraftCounters()
        self._engine = engine
        self._identity = identity
        self._config = config
        self._clock = clock
        self._timer = StepTimer()
        sink = engine if isinstance(engine, FeatureSink) else None
        self._capabilities = _CAPABILITIES if sink is None else _WITH_FEATURES
        self._residents = Residents(kv=kv, config=config, clock=clock, counters=self.counters, sink=sink, spans=spans)
        self._intake = Intake(
            residents=self._residents,
            config=config,
            clock=clock,
            counters=self.counters,
            max_model_len=engine.limits.max_model_len,
        )
        self._prefiller = Prefiller(
            engine=engine,
            residents=self._residents,
            counters=self.counters,
            chunk_tokens=config.prefill_chunk_tokens,
            max_catch_up_tokens=config.max_catch_up_tokens,
        )
        self._branches = BranchDrafter(engine=engine, kv=kv, clock=clock, timer=self._timer, q_top_k=config.q_top_k)
        self._ahead = AheadDrafter(
            engine=engine,
            residents=self._residents,
            branches=self._branches,
            config=config,
            clock=clock,
            timer=self._timer,
            counters=self.counters,
        )
        self._prefill_is_due = False

    def check(self, hello: Hello) -> HelloAck:
        """Answer a greeting. Changes nothing and may be called from any thread.

        Raises `CompatibilityError` when the vocabularies differ.
        """
        if hello.tokenizer_fingerprint != self._identity.tokenizer_fingerprint:
            raise CompatibilityError(
                f"tokenizer_fingerprint: {hello.target_model!r} has {hello.tokenizer_fingerprint.hex()}, "
                f"the draft {self._identity.model!r} has {self._identity.tokenizer_fingerprint.hex()}"
            )
        if Capability.FEATURES in self._capabilities - hello.capabilities:
            raise CompatibilityError(
                f"features: the draft {self._identity.model!r} reads features, which {hello.target_model!r} "
                "does not store; name the head at the target"
            )
        return HelloAck(
            incarnation=self._identity.incarnation,
            draft_model=self._identity.model,
            vocab_size=self._identity.vocab_size,
            tokenizer_fingerprint=self._identity.tokenizer_fingerprint,
            max_model_len=self._engine.limits.max_model_len,
            kv_capacity_tokens=self._residents.kv.capacity_tokens,
            step_ms=self._timer.single_ms,
            capabilities=self._capabilities,
        )

    def connect(self, link_id: int, hello: Hello) -> HelloAck:
        """Start a link under an id that no open link has.

        Raises `CompatibilityError` when the vocabularies differ.
        """
        ack = self.check(hello)
        if link_id in self._residents.links:
            raise ProtocolError(f"link {link_id} is already open")
        link = self._residents.links[link_id] = Link(
            link_id,
            hello,
            vocab_size=min(hello.vocab_size, self._identity.vocab_size, self._engine.limits.vocab_size),
            max_num_draft_tokens=min(hello.max_num_draft_tokens, self._config.max_num_draft_tokens),
            table_margin_s=self._config.table_margin_s,
        )
        common = hello.capabilities & self._capabilities
        if Capability.CACHED in common:
            link.num_ranked = self._config.num_ranked
        link.late_laws = Capability.LATE_LAWS in common
        return ack

    def handle(self, link_id: int, events: Sequence[TargetEvent]) -> None:
        """Apply the events of one message. Those of a link that is gone are dropped."""
        link = self._residents.links.get(link_id)
        if link is None:
            self.counters.dropped_events += len(events)
        else:
            self._intake.apply(link, events)

    def disconnect(self, link_id: int) -> None:
        """Free everything of a link. Idempotent."""
        link = self._residents.links.get(link_id)
        if link is not None:
            self._residents.remove_link(link)

    @property
    def num_sequences(self) -> int:
        """Sequences held over all links."""
        return self._residents.num_sequences

    @property
    def recent_step_s(self) -> float:
        """Recent mean of a draft step; 0 before the first."""
        return self._timer.recent_ms / 1e3

    def has_link(self, link_id: int) -> bool:
        """True from `connect` until `disconnect` or the target's Goodbye."""
        return link_id in self._residents.links

    def drain(self, reason: str) -> None:
        """Take no new sequences, and say so to every target. Open ones go on."""
        self._intake.draining = True
        for link in self._residents.links.values():
            link.send(Drain(reason=reason))

    @property
    def has_work(self) -> bool:
        """True when `step` would do or return something."""
        links = self._residents.links.values()
        if self._residents.num_owed > 0 or self._prefiller.has_work or self._ahead.has_work:
            return True
        return any(link.has_outbound for link in links)

    def step(self, poll: Callable[[], None] = nothing_new) -> list[Outbound]:
        """Do one unit of work: one round of blocks, one round of outcome tables, or one chunk of prefill.

        Blocks come first, for targets wait for them; then tables. After each round one chunk is done,
        so neither waits for more than one unit of the other. Between the forwards of a round `poll` is
        called; it may call `handle`, `connect` and `disconnect`, and blocks that this makes useless
        are dropped.
        """
        self.counters.steps += 1
        self.tick()
        drafting = [] if self._prefill_is_due and self._prefiller.has_work else self._begin_round()
        if drafting:
            self._prefill_is_due = True
            self._run_round(drafting, poll)
        elif self._ahead.has_work and not (self._prefill_is_due and self._prefiller.has_work):
            self._prefill_is_due = True
            self._ahead.run(poll)
        else:
            self._prefill_is_due = False
            self._prefiller.run_chunk(self.counters.steps)
        if self.counters.steps % self._config.stats_interval_steps == 0:
            self._report()
        return self.flush()

    def tick(self) -> None:
        """Free what has been idle too long."""
        self._residents.evict_idle()

    def flush(self) -> list[Outbound]:
        """Take the events that wait, one message per link."""
        links = [link for link in self._residents.links.values() if link.has_outbound]
        return [(link.link_id, link.take_outbound()) for link in links]

    def warm_up(self) -> None:
        """Run a few single steps on a sequence of its own, so that the step time is known."""
        kv, key, wait = self._residents.kv, self._residents.new_kv_key(), wait_of(self._engine)
        kv.open(key, [0])
        try:
            length = min(_WARM_UP_STEPS, self._engine.limits.max_model_len)
            kv.reserve(key, length)
            for start in range(length):
                began = self._clock.now()
                one = ForwardSlice(token_ids=[0], start=start, block_table=kv.block_table(key), num_logits=1)
                self._engine.forward(ForwardBatch(slices=(one,)))
                if wait is not None:
                    wait()
                if start or length == 1:  # the first one pays for what is made once
                    self._timer.record(self._clock.now() - began, num_branches=1)
        finally:
            kv.close(key)

    def _begin_round(self) -> list[_Drafting]:
        """Pick the sequences of the next round, in turn over links, and make room for their blocks."""
        links = sorted(self._residents.links.values(), key=lambda one: one.last_round)
        waiting = [
            sorted(
                ((link, one) for one in link.sequences.values() if one.owes_block and not self._prefiller.needs(one)),
                key=lambda held: held[1].last_heard,
            )
            for link in links
        ]
        in_turn = [held for rank in zip_longest(*waiting) for held in rank if held is not None]
        drafting = []
        for link, sequence in in_turn[: self._config.max_round_seqs]:
            link.last_round = self.counters.steps
            length = len(sequence.text)
            num_draft_tokens = min(sequence.num_owed, self._engine.limits.max_model_len - length + 1)
            if self._residents.prepare(sequence, length + num_draft_tokens - 1, keep=sequence.draft_from):
                drafting.append(_Drafting(link, sequence, num_draft_tokens))
            else:
                self._residents.evict(link, sequence, RefusalReason.NO_SPACE)
        return drafting

    def _run_round(self, drafting: Sequence[_Drafting], poll: Callable[[], None]) -> None:
        """Draft the blocks of all picked sequences together, and queue them."""
        by_branch = {id(one.branch): one for one in drafting}

        def keep_wanted(branches: list[Branch]) -> list[Branch]:
            poll()
            return [branch for branch in branches if by_branch[id(branch)].current]

        self._branches.draft(
            [one.branch for one in drafting],
            num_valid_ids=min(one.link.vocab_size for one in drafting),
            keep_wanted=keep_wanted,
        )
        self.counters.rounds += 1
        for one in drafting:
            if not one.current:
                self.counters.superseded += 1
                continue
            block = one.block(one.link.next_block_id())
            one.sequence.offer(block)
            one.link.send(DraftProposal(handle=one.sequence.handle, proposal=block))
            self.counters.blocks += 1
            self.counters.drafted_tokens += len(block)
            self._residents.spans.drafted(one.sequence.kv_key, what="block", size=len(block))
        if any(one.sequence.ahead_len for one in drafting):
            poll()  # takes the blocks along
            self._look_beyond([one for one in drafting if one.current and one.sequence.ahead_len])
        self._branches.settle()

    def _look_beyond(self, drafted: Sequence[_Drafting]) -> None:
        if drafted:
            num_valid_ids = min(one.link.vocab_size for one in drafted)
            self._ahead.look_beyond([one.branch for one in drafted], num_valid_ids)

    def _report(self) -> None:
        queued = self._residents.num_owed
        for link in self._residents.links.values():
            link.send(
                DraftStats(
                    open_sequences=len(link.sequences),
                    kv_usage=self._residents.kv.usage,
                    step_ms=self._timer.recent_ms,
                    queued_rows=queued,
                    drift_total=link.drift_total,
                )
            )
