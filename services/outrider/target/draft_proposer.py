"""The target's end of a draft link: what the draft holds, what it owes, and never waiting long.

The draft is an accelerator, never a dependency. Whatever it sends is checked; whatever it fails to
send costs at most one bounded wait, after which rows go on without a block until it speaks again.
"""

from collections.abc import Iterable, Mapping, Sequence

from outrider.core.dispatch import DraftLinkStatus
from outrider.core.link import (
    Busy,
    Capability,
    CloseSequence,
    DraftProposal,
    DraftStats,
    Drain,
    Evicted,
    Launch,
    LinkDown,
    LinkEvent,
    LinkUp,
    NeedResync,
    OpenAck,
    OpenNack,
    OutcomeTable,
    Ping,
    RefusalReason,
    TargetEvent,
    VerdictRow,
    Verdicts,
)
from outrider.core.ports import Clock, DraftTransport
from outrider.core.proposal import BlockLaws, Proposal, SparseLaw
from outrider.core.speculation import SpeculationMode, SpeculationReason
from outrider.target.draft_checks import BlockChecks
from outrider.target.draft_wait import DraftWait
from outrider.target.feature_feed import FeatureFeed
from outrider.target.held_sequence import HeldSequence, Phase
from outrider.target.late_laws import LateLaws
from outrider.target.link_times import LinkTimes
from outrider.target.proposers import DraftTimes, ProposerCounters
from outrider.target.running import Round, RunningSequence
from outrider.target.scheduler import StepBatch

__all__ = ["DraftProposer"]


class DraftProposer:
    """Implements `Proposer` over a `DraftTransport`. Used by the engine thread alone."""

    def __init__(
        self,
        transport: DraftTransport,
        clock: Clock,
        *,
        vocab_size: int,
        wait: DraftWait,
        counters: ProposerCounters,
        feed: FeatureFeed | None = None,
    ) -> None:
        """`feed`: where a draft's features come from, if the engine stores any."""
        self._transport = transport
        self._clock = clock
        self._wait = wait
        self._counters = counters
        self._feed = feed
        self._checks = BlockChecks(vocab_size=vocab_size, counters=counters)
        self._laws = LateLaws(vocab_size=vocab_size, limit_s=wait.limit_s, counters=counters)
        self._held: dict[int, HeldSequence] = {}
        self._outgoing: list[TargetEvent] = []
        """Events that nobody waits for: they travel with the next that somebody does, or the next Launch."""
        self._link: LinkUp | None = None
        self._draining = False
        self._busy_until = 0.0
        self._losses = 0
        self._last_problem = "no draft has been connected yet"
        self._step = 0
        self._times = LinkTimes()

    def links(self) -> tuple[DraftLinkStatus, ...]:
        """The link, for operators."""
        link = self._link
        status = DraftLinkStatus(
            address=link.address if link else "",
            connected=link is not None,
            incarnation=link.hello.incarnation if link else 0,
            open_sequences=sum(one.phase is Phase.READY for one in self._held.values()),
            problem="" if link and not self._wait.suspect else self._last_problem,
            losses=self._losses,
            round_trip_s=self._wait.round_trip_s,
        )
        return (status,)

    def problem(self) -> SpeculationReason | None:
        """Why the draft can serve nobody now."""
        if self._link is None or self._wait.suspect:
            return SpeculationReason.DRAFT_UNAVAILABLE
        if self._wait.resting or self._clock.now() < self._busy_until:
            return SpeculationReason.DRAFT_BUSY
        return None

    def availability(self, running: RunningSequence) -> SpeculationReason | None:
        """Why the draft cannot serve this sequence in its next round."""
        problem = self.problem()
        if problem is not None or self._link is None:
            return problem or SpeculationReason.DRAFT_UNAVAILABLE
        if running.sequence.committed_len >= self._link.hello.max_model_len:
            return SpeculationReason.CONTEXT_TOO_LONG
        held = self._held.get(running.handle)
        if held is not None and held.refusal is RefusalReason.CONTEXT_TOO_LONG:
            return SpeculationReason.CONTEXT_TOO_LONG
        return None

    def prepare(self, admitted: Iterable[RunningSequence]) -> None:
        """Open sequences on the draft, so that it prefills while the target does; later, if it cannot now."""
        able = not self._wait.suspect and self._clock.now() >= self._busy_until
        if able and (openings := self._openings(admitted)):
            self._send(openings)

    @property
    def times(self) -> DraftTimes:
        """Measured: a step at the draft, and what is left of a round trip."""
        return self._times.times

    @property
    def drafts_ahead(self) -> bool:
        """Whether the draft can push blocks for outcomes."""
        return self._can(Capability.CACHED)

    def has_block(self, running: RunningSequence) -> bool:
        """Whether the block for the present text is here already."""
        held = self._held.get(running.handle)
        return held is not None and held.has_block

    def waits(self, wanted: Sequence[RunningSequence]) -> bool:
        """Whether a block is owed to one of these and has not arrived, and the budget is not used up."""
        return any(self._owes(one) for one in wanted) and self._wait.left(self._clock.now()) > 0.0

    def collect(self, wanted: Sequence[RunningSequence]) -> dict[int, Proposal]:
        """Take what has arrived; wait for what is owed, within the budget."""
        self._apply(self._transport.receive(0.0))
        owed = [one for one in wanted if self._owes(one)]
        if not owed:
            self._wait.let_be()
        while owed and (left := self._wait.left(self._clock.now())) > 0.0 and self._link is not None:
            self._apply(self._transport.receive(left))
            owed = [one for one in owed if self._owes(one)]
        if owed:
            self._count_late(owed)
        for one in wanted:
            self._count_lookup(one)
        return {one.handle: block for one in wanted if (block := self._usable(one)) is not None}

    def launch(self, batch: StepBatch, expected_s: float) -> None:
        """A verify step of about `expected_s` starts: tell the draft what is in flight, so that it drafts ahead."""
        if not (self._held or self._outgoing):
            return
        rows = []
        if self.drafts_ahead and self.problem() is None:
            for row in batch.deciding:
                held, ahead = self._held.get(row.running.handle), row.running.ahead
                launched = held.launch(row, ahead) if held is not None and ahead is not None else None
                if launched is not None:
                    rows.append(launched)
        self._laws.start(batch, launched=rows, step_s=expected_s)
        self._send([Launch(step=self._step, rows=tuple(rows), budget_us=int(expected_s * 1e6))] if rows else [])
        if rows:
            self._wait.launched()

    def laws(self) -> Mapping[int, tuple[SparseLaw, ...]]:
        """The verify has ended: the laws, by handle, of launched blocks that came without, as far as they are here."""
        left = 0.0  # at first it only looks
        while self._laws.pending:
            self._apply(self._transport.receive(left))
            left = self._laws.left(self._clock.now())
            if left <= 0.0 or self.problem() is not None:
                break
        return self._laws.finish()

    def resolve(self, rounds: Sequence[Round]) -> None:
        """Look the outcomes of a step up in what the draft has pushed meanwhile."""
        if not self._held:
            return
        self._apply(self._transport.receive(0.0))
        for one in rounds:
            held = self._held.get(one.running.handle)
            if held is not None and one.commit.finish is None:
                held.look_up(one.commit)

    def inform(self, rounds: Sequence[Round]) -> None:
        """Send the verdicts of one step and the plans for the next, as one message.

        Where every block that the draft could offer has been looked up, that message can wait for the
        Launch which follows at once: it saves both sides half of the messages.
        """
        self._wait.end_round()
        going = [one for one in rounds if one.commit.finish is None and one.running.plan.num_draft_tokens > 0]
        if not (going or self._held or self._outgoing):
            return  # gated off, the draft costs one look per step, in `collect`
        self._apply(self._transport.receive(0.0))
        finished = [one.running for one in rounds if one.commit.finish is not None]
        gone = [one.handle for one in finished if self._held.pop(one.handle, None) is not None]
        events: list[TargetEvent] = [CloseSequence(handle=handle) for handle in gone]
        if self._wait.ping_due(self._clock.now()):
            # A draft that has nothing to say, and one that cannot: only an answer tells them apart.
            events.append(Ping(nonce=self._step))
        if self.problem() is None:
            events += self._openings(one.running for one in going)
            events += self._features(going)
            events += self._verdicts(going)
        self._outgoing += events
        if not going or any(one.running.plan.mode is SpeculationMode.SEQUENTIAL for one in going):
            self._send([])

    def explain(self, running: RunningSequence) -> SpeculationReason:
        """Why there was no block for this sequence."""
        held = self._held.get(running.handle)
        return self.problem() or (held.explain() if held is not None else SpeculationReason.DRAFT_NOT_READY)

    def forget(self, running: RunningSequence) -> None:
        """Free a sequence that ended outside a round."""
        if self._held.pop(running.handle, None) is not None:
            self._send([CloseSequence(handle=running.handle)])

    def poll(self) -> None:
        """Nothing runs: send what waits for a step, apply what has arrived."""
        self._send([])
        self._apply(self._transport.receive(0.0))

    def close(self) -> None:
        """Leave the draft."""
        self._transport.close()

    def _openings(self, sequences: Iterable[RunningSequence]) -> list[TargetEvent]:
        if self._link is None or self._draining:
            return []
        events: list[TargetEvent] = []
        for running in sequences:
            held = self._held.get(running.handle)
            if held is not None and not held.may_reopen():
                continue
            if running.sequence.committed_len >= self._link.hello.max_model_len:
                continue
            held = self._held[running.handle] = HeldSequence(running.sequence, self._checks)
            events.append(held.opening())
        return events

    def _features(self, going: Sequence[Round]) -> Sequence[TargetEvent]:
        """What the draft lacks of the sequences that go on, and of those that are being opened."""
        if self._feed is None or not self._can(Capability.FEATURES):
            return ()
        return self._feed.events(self._held.values(), going={one.running.handle for one in going})

    def _can(self, capability: Capability) -> bool:
        return self._link is not None and capability in self._link.hello.capabilities

    def _verdicts(self, rounds: Iterable[Round]) -> list[TargetEvent]:
        self._step += 1
        events: list[TargetEvent] = []
        rows: list[VerdictRow] = []
        feeds = self._can(Capability.FEATURES)
        for one in rounds:
            held = self._held.get(one.running.handle)
            if held is None or held.phase is not Phase.READY or (feeds and not FeatureFeed.is_fed(held)):
                continue
            resync, row = held.verdict(one)
            events += resync
            rows.append(row)
        if rows:
            events.append(Verdicts(step=self._step, rows=tuple(rows)))
            if any(row.plan.mode is SpeculationMode.SEQUENTIAL for row in rows):
                self._wait.start_round(self._clock.now())
        return events

    def _send(self, events: Sequence[TargetEvent]) -> None:
        """Send these behind those that have waited, as one message."""
        events, self._outgoing = [*self._outgoing, *events], []
        if not events or self._link is None:
            return
        if self._transport.send(events):
            self._counters.messages_sent += 1
            return
        # The queue is full: nothing of this message reached the draft, so its view of every
        # sequence is uncertain. Open them anew once it speaks again. Those that have ended are ours no
        # more, and it would keep them until they had long been idle: tell it again.
        self._outgoing = [one for one in events if isinstance(one, CloseSequence)]
        self._last_problem = "the send queue to the draft is full"
        self._wait.suspect = True
        for held in self._held.values():
            held.lose()

    def _apply(self, events: Iterable[LinkEvent]) -> None:
        for event in events:
            if isinstance(event, LinkUp):
                self._start_link(event)
            elif isinstance(event, LinkDown):
                self._lose_link(event)
            else:
                self._counters.messages_received += 1
                if self._link is not None:
                    self._wait.heard(self._clock.now())
                    self._apply_one(event)

    def _apply_one(self, event: LinkEvent) -> None:
        if isinstance(event, DraftStats):
            self._times.step_took(event.step_ms)
        elif isinstance(event, Busy):
            self._busy_until = self._clock.now() + event.retry_after_s
        elif isinstance(event, Drain):
            self._draining = True
            self._last_problem = f"the draft drains: {event.reason}"
        elif isinstance(event, BlockLaws):
            self._laws.take(event)
        elif isinstance(event, DraftProposal | OutcomeTable | OpenAck | OpenNack | NeedResync | Evicted):
            held = self._held.get(event.handle)
            if held is None:
                return  # of a sequence that has ended meanwhile
            if isinstance(event, DraftProposal):
                self._take_block(held, event.proposal)
            elif isinstance(event, OutcomeTable):
                self._take_table(held, event)
            elif isinstance(event, OpenAck):
                self._counters.invalid += not held.acknowledge(event.have_len)
            elif isinstance(event, NeedResync):
                self._counters.invalid += not held.rewind(event.have_len)
            else:
                held.refuse(event.reason)

    def _take_block(self, held: HeldSequence, proposal: Proposal) -> None:
        if self._checks.may_judge(proposal, held.sequence.request, of_table=False):
            held.offer(proposal)
            if proposal.base_len == held.awaited_len and self._wait.answered(self._clock.now()):
                self._counters.hops_s.append(self._times.answered(self._wait.last_s, len(proposal)))

    def _take_table(self, held: HeldSequence, table: OutcomeTable) -> None:
        """Keep a table for the step in flight; one that came late still serves the next step."""
        if held.book.matches(table.base_len, table.parent_block_id):
            self._counters.invalid += not held.book.add(table)
        else:
            self._counters.stale += 1

    def _count_lookup(self, running: RunningSequence) -> None:
        """Count whether a look-up hit, once it matters: when its block is about to be used or missed."""
        held = self._held.get(running.handle)
        hit = held.count_lookup() if held is not None else None
        if held is None or hit is None:
            return
        if not hit and held.awaited_len is None:
            self._times.not_asked()
        self._counters.lookups += 1
        self._counters.hits += hit

    def _start_link(self, event: LinkUp) -> None:
        self._link = event
        self._draining = False
        self._busy_until = 0.0
        self._times.start(event.hello.step_ms)
        self._checks.laws_follow = self._can(Capability.LATE_LAWS)
        self._start_afresh()

    def _lose_link(self, event: LinkDown) -> None:
        self._losses += self._link is not None
        self._link = None
        self._last_problem = event.cause
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Nothing that was said on another link holds any more."""
        self._held.clear()
        self._outgoing = []
        self._wait.reset()
        self._laws.give_up()

    def _owes(self, running: RunningSequence) -> bool:
        held = self._held.get(running.handle)
        return held is not None and held.owes_block()

    def _usable(self, running: RunningSequence) -> Proposal | None:
        held = self._held.get(running.handle)
        if held is None or held.block is None or running.plan.num_draft_tokens == 0:
            return None
        tail = held.block.usable_tail(running.sequence.token_ids)
        if tail is None:
            self._counters.stale += held.drop_stale()
            return None
        # A block that was waited for may bring more than it was worth waiting for.
        longest = running.ahead.num_draft_tokens if running.ahead is not None else 0
        return tail.trimmed(max(running.plan.num_draft_tokens, longest))

    def _count_late(self, owed: Sequence[RunningSequence]) -> None:
        self._counters.late += len(owed)
        self._wait.missed()
        self._last_problem = "the draft has not answered in time"
        for running in owed:
            running.sequence.stats.late += 1
