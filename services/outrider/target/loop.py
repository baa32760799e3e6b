"""The engine loop: admit, propose, verify, commit, emit. Plain decoding is the same with no blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.core.dispatch import (
    EngineEvent,
    EngineStatus,
    SequenceDelta,
    SequenceEnd,
    SequenceErrorCode,
    SequenceFailure,
)
from outrider.core.load import EngineLoad
from outrider.core.ports import Clock
from outrider.core.proposal import Proposal
from outrider.core.request import SequenceRequest
from outrider.target.counters import EngineCounters
from outrider.target.gate import SpeculationGate
from outrider.target.proposers import ProposerSet
from outrider.target.running import Round, RunningSequence, StreamId
from outrider.target.scheduler import Scheduler, StepBatch
from outrider.target.step_times import StepTimer
from outrider.target.verifier import Verifier
from outrider.telemetry.spans import RoundRecord, SequenceSpans, StepRecord

if TYPE_CHECKING:
    from outrider.engine.base import Logits

__all__ = ["Emit", "EngineLoop"]


class Emit(Protocol):
    """Where the events of a step go: all events of one router in one call."""

    def __call__(self, session_id: int, events: Sequence[EngineEvent]) -> None:
        """Never blocks."""
        ...


class EngineLoop:
    """One engine's loop over its parts. Single-threaded; the host calls `step` while there is work."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        gate: SpeculationGate,
        proposers: ProposerSet,
        verifier: Verifier,
        counters: EngineCounters,
        spans: SequenceSpans,
        clock: Clock,
        emit: Emit,
    ) -> None:
        self.scheduler = scheduler
        self.gate = gate
        self.proposers = proposers
        self.counters = counters
        self._verifier = verifier
        self._spans = spans
        self._clock = clock
        self._emit = emit
        self._undelivered: Sequence[Round] = ()

    def step(self) -> None:
        """One round of every running sequence. Raises `EngineUnavailable` when the engine is gone."""
        phase = StepTimer(self._clock, self.counters.seconds)
        self._admit(self._clock.now())
        phase.ends("plan")
        proposals = self._propose()
        phase.ends("wait")
        batch = self.scheduler.schedule(proposals)
        phase.ends("plan")
        logits = self._forward(batch)
        phase.ends("forward")
        late_laws = self.proposers.laws()
        phase.ends("wait")
        verdicts = self._verifier.verify(batch, logits, late_laws)
        phase.ends("verify")
        rounds = self.scheduler.commit(batch, verdicts, self._clock.now())
        self.proposers.resolve(rounds)
        self._plan(rounds)
        self.proposers.inform(rounds)
        phase.ends("commit")
        self._undelivered = rounds
        if not (self._verifier.queues and self.scheduler.has_work):
            self.deliver()
        phase.ends("emit")
        self.counters.count_step(batch, rounds, phase)
        if self._spans.takes_step():
            self._spans.step_ended(_record(batch, rounds, phase))

    def deliver(self) -> None:
        """Emit what the last step has committed, if that waits for the next forward to hide behind."""
        if self._undelivered:
            rounds, self._undelivered = self._undelivered, ()
            self._emit_rounds(rounds)

    def _forward(self, batch: StepBatch) -> "Logits":
        """Run the step; whatever does not have to come before it is done while the device works."""
        expected_s = self.counters.verify_times.predict(batch.num_rows)
        if not self._verifier.queues:
            self.proposers.launch(batch, expected_s)
            return self._verifier.forward(batch)
        logits = self._verifier.forward(batch)
        self.proposers.launch(batch, expected_s)
        self.deliver()
        self._verifier.wait()
        return logits

    def arrived(self, request: SequenceRequest) -> SequenceRequest:
        """The request of a new sequence, under a span of its own if it is traced."""
        return self._spans.sequence_arrived(request)

    def refused(self, request: SequenceRequest, end: SequenceEnd) -> None:
        """A sequence that had arrived does not run."""
        self._spans.sequence_ended(request, end)

    def end(self, running: RunningSequence, *, failure: SequenceFailure | None = None) -> None:
        """Take a sequence out before it has finished by itself, and tell its router."""
        self.deliver()  # what it has committed comes before its end
        self.scheduler.remove(running)
        self.proposers.forget(running)
        end = self._last_event(running, self._clock.now(), failure=failure)
        self._emit(running.stream.session_id, [end])

    def _admit(self, now: float) -> None:
        for running in self.scheduler.expired(now):
            message = "timeout_ms: the time limit of the request has passed"
            self.end(running, failure=SequenceFailure(code=SequenceErrorCode.DEADLINE, message=message))
        admitted = self.scheduler.admit(now)
        self.gate.observe_load(len(self.scheduler.running))
        self.proposers.prepare([one for one in admitted if self.gate.policy(one) is None])

    def _propose(self) -> dict[int, Proposal]:
        decoding = self.scheduler.decoding()
        for running in decoding:
            if running.plan.num_draft_tokens and (reason := self.gate.policy(running)) is not None:
                # The load or the settings have changed since the round was planned.
                running.plan, running.ahead = self.gate.off(reason), None
            if not running.plan.num_draft_tokens:
                running.note(running.plan.reason)
        wanted = [one for one in decoding if one.plan.num_draft_tokens > 0]
        if self._undelivered and self.proposers.waits(wanted):
            self.deliver()  # now, beside the draft's work, rather than after it
        proposals = self.proposers.collect(wanted)
        self.counters.drafted += sum(len(block) for block in proposals.values())
        return proposals

    def _plan(self, rounds: Sequence[Round]) -> None:
        self.gate.observe_rounds(rounds)
        self.gate.observe_load(len(self.scheduler.running))
        going = [one.running for one in rounds if one.commit.finish is None]
        self.gate.plan(going, self.proposers)

    def _emit_rounds(self, rounds: Sequence[Round]) -> None:
        now = self._clock.now()
        events: dict[int, list[EngineEvent]] = {}
        for one in rounds:
            stream: StreamId = one.running.stream
            outbox = events.setdefault(stream.session_id, [])
            outbox.append(
                SequenceDelta(
                    stream_key=stream.stream_key,
                    first_token_index=one.commit.first_token_index,
                    token_ids=one.commit.token_ids,
                    logprobs=one.commit.logprobs,
                )
            )
            if one.commit.finish is not None:
                outbox.append(self._last_event(one.running, now))
        for session_id, outbox in events.items():
            self._emit(session_id, outbox)

    def _last_event(
        self, running: RunningSequence, now: float, *, failure: SequenceFailure | None = None
    ) -> SequenceEnd:
        length = running.sequence.stats.mean_acceptance_length
        if length is not None:
            running.estimated_speedup = self.counters.step_times.speedup(
                batch_size=max(1, len(self.scheduler.running)), tokens_per_round=length
            )
        end = running.end(now, failure=failure)
        self.counters.count_end(failed=failure is not None)
        self._spans.sequence_ended(running.sequence.request, end)
        return end

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self._clock.now()

    def load(self) -> EngineLoad:
        """The load that the gate reacts to and the autoscaler hears of."""
        oldest = self.scheduler.oldest_arrival
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            kv_usage=self.scheduler.kv_usage,
            queue_s=0.0 if oldest is None else max(0.0, self._clock.now() - oldest),
        )

    def status(self, engine_id: str) -> EngineStatus:
        """A snapshot for routers and operators."""
        reason = self.gate.engine_reason(self.proposers.problem())
        running, counters = len(self.scheduler.running), self.counters
        length = counters.mean_acceptance_length
        speedup = counters.step_times.speedup(batch_size=running, tokens_per_round=length) if length else None
        return EngineStatus(
            engine_id=engine_id,
            ready=True,
            running=running,
            waiting=self.scheduler.num_waiting,
            kv_usage=self.scheduler.kv_usage,
            mode=self.gate.engine_mode(reason, self.proposers),
            reason=reason,
            mean_num_draft_tokens=counters.mean_num_draft_tokens,
            acceptance_rate=counters.recent_acceptance,
            estimated_speedup=speedup,
            draft_links=self.proposers.links(),
            totals=counters.totals(self.scheduler),
        )


def _record(batch: StepBatch, rounds: Sequence[Round], phase: StepTimer) -> StepRecord:
    """A finished step, for traces."""
    return StepRecord(
        rounds=tuple(
            RoundRecord(
                traceparent=one.running.sequence.request.traceparent,
                first_token_index=one.commit.first_token_index,
                num_draft_tokens=len(one.proposal) if one.proposal is not None else 0,
                num_accepted=one.commit.num_accepted,
                num_committed=len(one.commit.token_ids),
                source=one.proposal.source.value if one.proposal is not None else "",
            )
            for one in rounds
        ),
        num_rows=batch.num_rows,
        seconds=phase.by_phase,
    )
