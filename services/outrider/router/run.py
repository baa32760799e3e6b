"""The choices of one request, on whichever engines run them: started together, moved when an engine is lost.

A moved choice is opened on another engine as prompt and committed output, with its own noise. What
the client has is neither sent again nor changed: text, stop strings and counts come from the router's
`ChoiceStream`, which knows nothing of engines. With the coupled rule and with greedy decoding the rest is
the text that the lost engine would have made, since the noise depends on seed and position alone. Under
the rejection rule the draws behind the break are new ones: the law of the text stays what it was, the
text itself may differ. The speculation report of a moved choice covers the engine that ended it.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.dispatch import SequenceDelta, SequenceEnd, SequenceErrorCode, SequenceFailure, Timings
from outrider.core.errors import ConfigError, DeadlineExceeded, EngineUnavailable, OutriderError, Overloaded
from outrider.core.generation import ChoiceEnd, TextDelta
from outrider.core.request import SequenceRequest
from outrider.core.sequence import Finish, FinishReason
from outrider.router.dispatch import Dispatcher
from outrider.router.engine_link import EngineLink
from outrider.router.engine_pool import EnginePool
from outrider.router.inbox import ChoiceEvent
from outrider.router.metrics import RouterMetrics
from outrider.router.plan import RequestPlan
from outrider.router.registry import RunningRequest
from outrider.router.stream import ENGINE_RETRY_AFTER_S, ChoiceStream, failure_error
from outrider.router.timing import Alarm, TimeSource

__all__ = ["FailoverSettings", "RequestRun"]

_Session = tuple[EngineLink, int]
"""A link, and which of its sessions."""

_EARLY_S = 1e-3
"""An alarm may ring this much before its time."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverSettings:
    """How long and how often a router looks for another engine."""

    max_moves: int = 8
    """Most moves of one request: one that kills its engines must not go through all of them."""
    grace_s: float = 1.5
    """Wait for another engine where none is expected: long enough to learn of one."""
    rebuild_wait_s: float = 60.0
    """Wait where one is being built, or every engine is full."""

    def __post_init__(self) -> None:
        if self.max_moves < 0:
            raise ConfigError(f"max_moves: {self.max_moves} is below 0")
        for name in ("grace_s", "rebuild_wait_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")


class RequestRun:
    """Runs the choices of one request. Used on one event loop, by whoever reads the request's inbox."""

    def __init__(
        self,
        *,
        plan: RequestPlan,
        choices: Sequence[ChoiceStream],
        running: RunningRequest,
        pool: EnginePool,
        dispatcher: Dispatcher,
        time: TimeSource,
        metrics: RouterMetrics,
        settings: FailoverSettings,
    ) -> None:
        """Starts nothing."""
        self._plan = plan
        self._choices = choices
        self._running = running
        self._pool = pool
        self._dispatcher = dispatcher
        self._time = time
        self._metrics = metrics
        self._settings = settings
        self._started_s = time.now()
        self._unfinished = set(range(plan.n))
        self._sessions: dict[int, _Session] = {}
        """Where each choice runs, or ran last."""
        self._avoided: dict[_Session, float] = {}
        """Sessions that are no place for a lost choice, and until when."""
        self._lost_since_s: dict[int, float] = {}
        """Choices without a token since they lost their engine."""
        self._lost: set[int] = set()
        """Those of them that have no engine now."""
        self._cause = ""
        self._moves = 0
        self._moved: set[int] = set()
        self._first_token_s: dict[int, float] = {}
        self._waiting: list[Alarm] = []

    @property
    def unfinished(self) -> bool:
        """Whether a choice has not ended."""
        return bool(self._unfinished)

    def start(self) -> None:
        """Hand all choices to one engine: they share the prompt's KV.

        Raises `DeadlineExceeded`, `EngineUnavailable` or `Overloaded`.
        """
        self._place(range(self._plan.n))

    def close(self) -> None:
        """Wait for nothing any more. Idempotent."""
        for one in self._waiting:
            one.cancel()
        self._waiting.clear()

    def client_events(self, event: ChoiceEvent) -> list[TextDelta | ChoiceEnd]:
        """What one engine event means for the client. Raises the error of a failed choice.

        A choice that has only lost its engine is left to `move_lost`.
        """
        index, one = event
        if isinstance(one, SequenceDelta):
            return [self._feed(index, one)]
        if one.failure is not None and self._is_lost(index, one.failure):
            return []
        return self._end(index, one)

    def move_lost(self) -> list[TextDelta | ChoiceEnd]:
        """Open lost choices on another engine. Where there is none, the inbox wakes its reader to try again.

        Returns the ends of choices that need no engine any more. Raises `EngineUnavailable` with the
        cause of the loss when no engine has come in time, `DeadlineExceeded` when the request's own
        time is over.
        """
        made = [event for index in sorted(self._lost) for event in self._end_without_engine(index)]
        if not self._lost:
            return made
        lost = sorted(self._lost)
        try:
            self._place(lost)
        except (EngineUnavailable, Overloaded) as error:
            self._wait(error)
            return made
        _logger.info("request goes on on another engine", extra={"request_id": self._plan.request_id})
        self._metrics.sequences_moved(count=len(lost))
        self._moved |= self._lost
        self._lost.clear()
        self.close()
        return made

    def _place(self, indices: Sequence[int]) -> None:
        """Open choices on one engine, each behind the output it has."""
        left_s = self._plan.timeout_s - (self._time.now() - self._running.arrived_s)
        if left_s <= 0:
            after = f", after: {self._cause}" if self._cause else ""
            limit_ms = self._plan.timeout_s * 1000
            raise DeadlineExceeded(f"timeout_ms: {limit_ms:g} passed before an engine was reached{after}")
        requests = [
            self._plan.sequence_request(
                index,
                resume_token_ids=self._choices[index].token_ids,
                timeout_s=left_s,
                traceparent=self._running.span.traceparent,
            )
            for index in indices
        ]
        link, keys = self._submit(requests)
        self._running.place(indices, link, keys)
        self._sessions |= dict.fromkeys(indices, (link, link.sessions))

    def _submit(self, requests: Sequence[SequenceRequest]) -> tuple[EngineLink, tuple[int, ...]]:
        """Give the requests to the engine of choice, or to the next one if that refuses them."""
        engines = [one for one in self._pool.loads() if self._may_use(self._pool.link(one.replica_id))]
        while True:
            link = self._pool.link(self._dispatcher.choose(requests[0].prompt_token_ids, engines))
            try:
                return link, link.submit(requests, self._running.inbox)
            except (EngineUnavailable, Overloaded):
                engines = [one for one in engines if one.ready and one.replica_id != link.endpoint.replica_id]
                if not engines:
                    raise

    def _may_use(self, link: EngineLink) -> bool:
        return self._avoided.get((link, link.sessions), -math.inf) <= self._time.now()

    def _feed(self, index: int, delta: SequenceDelta) -> TextDelta:
        made = self._choices[index].feed(delta)
        now_s, label = self._time.now(), self._plan.traffic_class
        self._lost_since_s.pop(index, None)
        self._first_token_s.setdefault(index, now_s)
        if not self._running.output_tokens:
            self._metrics.first_token(traffic_class=label, after_s=now_s - self._running.arrived_s)
        self._running.output_tokens += len(made.token_ids)
        self._running.permit.count_output(len(made.token_ids))
        self._metrics.tokens_streamed(traffic_class=label, count=len(made.token_ids))
        return made

    def _is_lost(self, index: int, failure: SequenceFailure) -> bool:
        """Note a choice whose engine has failed, or is too full for one that comes from another engine."""
        unavailable = failure.code is SequenceErrorCode.UNAVAILABLE
        full = failure.code is SequenceErrorCode.OVERLOADED and index in self._moved
        if not (unavailable or full):
            return False
        now_s = self._time.now()
        self._avoided[self._sessions[index]] = math.inf if unavailable else now_s + ENGINE_RETRY_AFTER_S
        if unavailable and not self._lost:
            if self._moves >= self._settings.max_moves:
                raise failure_error(failure)
            self._moves += 1
            self._cause = failure.message
        self._lost.add(index)
        self._lost_since_s.setdefault(index, now_s)
        return True

    def _wait(self, error: OutriderError) -> None:
        """Look again when an engine changes or a time is up. Raises when that of the search is."""
        now_s = self._time.now()
        retries_s = [one for one in self._avoided.values() if now_s < one < math.inf]
        expected = bool(retries_s or self._pool.pending()) or isinstance(error, Overloaded)
        limit_s = self._settings.rebuild_wait_s if expected else self._settings.grace_s
        over_s = min(self._lost_since_s[index] for index in self._lost) + limit_s
        if now_s > over_s - _EARLY_S:
            raise EngineUnavailable(f"{self._cause}; no other engine took over within {limit_s:g} s") from error
        self.close()
        wake = self._running.inbox.wake
        deadline_s = self._running.arrived_s + self._plan.timeout_s + _EARLY_S
        next_s = min([over_s, deadline_s, *retries_s])
        self._waiting = [self._pool.watch(wake), self._time.call_later(next_s - now_s, wake)]

    def _end_without_engine(self, index: int) -> list[TextDelta | ChoiceEnd]:
        """The end of a lost choice that an engine would only have confirmed."""
        finish = self._choices[index].reached_end()
        if finish is None and self._running.aborted:
            finish = Finish(reason=FinishReason.ABORTED)
        if finish is None:
            return []
        self._lost.remove(index)
        self._moved.add(index)
        return self._end(index, SequenceEnd(stream_key=0, finish=finish))

    def _end(self, index: int, end: SequenceEnd) -> list[TextDelta | ChoiceEnd]:
        if index in self._moved:
            end = replace(end, timings=self._whole_time(index, end.timings))
        made = self._choices[index].finish(end)
        self._unfinished.discard(index)
        for one in made:
            if isinstance(one, ChoiceEnd):
                self._metrics.choice_finished(traffic_class=self._plan.traffic_class, end=one)
        return made

    def _whole_time(self, index: int, last: Timings) -> Timings:
        """Times over all engines, as seen from here; queue and prefill are the last engine's."""
        now_s = self._time.now()
        first_s = self._first_token_s.get(index, now_s)
        return replace(last, first_token_s=first_s - self._started_s, total_s=now_s - self._started_s)
