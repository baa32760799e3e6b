"""One engine: keeps a session to it, routes its events, notices its loss, comes back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.dispatch import (
    EngineHello,
    EngineReport,
    EngineStatus,
    ReportRequest,
    RouterCommand,
    SequenceAbort,
    SequenceDelta,
    SequenceEnd,
    SequenceSubmit,
    UpdateGate,
)
from outrider.core.errors import ConfigError, EngineUnavailable, OutriderError, Overloaded
from outrider.core.policy import GateSettings
from outrider.core.ports import Endpoint, EngineSession
from outrider.core.request import SequenceRequest
from outrider.router.dispatch import Candidate
from outrider.router.inbox import RequestInbox
from outrider.router.limits import MIN_TEXT_LEN
from outrider.router.metrics import RouterMetrics
from outrider.router.routes import SequenceRoutes
from outrider.router.timing import Alarm, TimeSource, sleep

__all__ = ["EngineLink", "LinkSettings", "SessionFactory"]

SessionFactory = Callable[[Endpoint], Awaitable[EngineSession]]
"""Opens a session; raises `EngineUnavailable` when nobody answers."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Times of a link, in seconds."""

    connect_timeout_s: float = 5.0
    report_interval_s: float = 1.0
    """Between two requests for a report."""
    stale_after_s: float = 5.0
    """A report older than this no longer counts as the engine's state."""
    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "report_interval_s", "stale_after_s", "backoff_first_s", "backoff_max_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")

    def backoff_s(self, failures: int, jitter: float) -> float:
        """Wait before the next attempt, after that many failures in a row; `jitter` in [0, 1)."""
        longest = min(self.backoff_first_s * 2.0 ** min(failures - 1, 30), self.backoff_max_s)
        return longest * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    status: EngineStatus
    at_s: float
    outstanding: int


class EngineLink:
    """A session to one engine that renews itself. Used on one event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        connect: SessionFactory,
        model: str,
        gate: GateSettings,
        time: TimeSource,
        settings: LinkSettings,
        metrics: RouterMetrics,
        jitter: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a session begins or ends, and at every report."""
        self.endpoint = endpoint
        self.leaving = False
        """True while the directory does not list the engine."""
        self.attempted = asyncio.Event()
        """Set after the first attempt to connect, whatever came of it."""
        self.sessions = 0
        """Sessions opened so far: tells a new incarnation of the engine from a lost one."""
        self._connect = connect
        self._model = model
        self._gate = gate
        self._time = time
        self._settings = settings
        self._metrics = metrics
        self._jitter = jitter
        self._on_change = on_change
        self._session: EngineSession | None = None
        self._problem = "not connected yet"
        self._routes = SequenceRoutes()
        self._report: _Report | None = None
        self._connected_at_s = 0.0
        self._nonce = 0
        self._unsent: list[RouterCommand] = []
        self._alarm: Alarm | None = None
        self._task = asyncio.create_task(self._run(), name=f"engine-link {endpoint.replica_id}")

    @property
    def hello(self) -> EngineHello | None:
        """Who answers; None while not connected."""
        return None if self._session is None else self._session.hello

    @property
    def outstanding(self) -> int:
        """Sequences of this router on the engine."""
        return len(self._routes)

    def load(self) -> Candidate:
        """The engine as the dispatch policy sees it."""
        status = self.status()
        report = self._report
        return Candidate(
            replica_id=self.endpoint.replica_id,
            ready=status.ready,
            problem=status.problem,
            outstanding=self.outstanding,
            reported=0 if report is None else report.status.running + report.status.waiting,
            outstanding_at_report=0 if report is None else report.outstanding,
            stale=self._report_age_s() > self._settings.stale_after_s,
            leaving=self.leaving,
        )

    def status(self) -> EngineStatus:
        """The last report, flagged when it is overdue; not ready while there is no session."""
        known = self._report.status if self._report is not None else EngineStatus(engine_id=self._name(), ready=True)
        if self._session is None:
            return replace(known, ready=False, problem=self._problem, running=0, waiting=0)
        age_s = self._report_age_s()
        if age_s > self._settings.stale_after_s:
            overdue = f"no report for {age_s:.1f} s"
            return replace(known, problem=f"{known.problem}; {overdue}" if known.problem else overdue)
        return known

    def submit(self, requests: Sequence[SequenceRequest], inbox: RequestInbox) -> tuple[int, ...]:
        """Start choices of a request, all or none; their events go to `inbox`. Returns the stream keys.

        Raises `EngineUnavailable` or `Overloaded`.
        """
        if self._session is None:
            raise EngineUnavailable(self._problem)
        keys = self._routes.reserve(len(requests))
        self._session.send(
            [SequenceSubmit(stream_key=key, request=one) for key, one in zip(keys, requests, strict=True)]
        )
        self._routes.add(keys, [one.choice_index for one in requests], inbox)
        return keys

    def abort(self, keys: Sequence[int]) -> None:
        """Ask the engine to end sequences; their ends still arrive. Ended ones are passed over."""
        self._control([SequenceAbort(stream_key=key) for key in keys if key in self._routes])

    def drop(self, keys: Sequence[int]) -> None:
        """End sequences that nobody listens to any more."""
        self.abort(keys)
        self._routes.forget(keys)

    def set_gate(self, gate: GateSettings) -> None:
        """Send new gate settings now, and on every later connect."""
        self._gate = gate
        self._control([UpdateGate(settings=gate)])

    async def close(self, cause: str) -> None:
        """Leave the engine; what still runs there ends as unavailable, with this cause."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.attempted.set()
        self._end_session(cause)

    async def _run(self) -> None:
        failures = 0
        while True:
            heard = await self._serve_session()
            failures = 1 if heard else failures + 1
            await sleep(self._time, self._settings.backoff_s(failures, self._jitter()))

    async def _serve_session(self) -> bool:
        """Connect and route events until the session breaks; True if the engine said more than hello."""
        session = await self._open()
        self.attempted.set()
        if session is None:
            return False
        heard = False
        try:
            self._begin(session)
            while events := await session.receive():
                for event in events:
                    self._route(event)
                    heard = heard or not isinstance(event, EngineHello)
                self._flush()
            self._lose("the session was closed")
        except EngineUnavailable as error:
            self._lose(error.cause)
        except Exception as error:
            _logger.exception("engine %s: the session failed", self.endpoint.replica_id)
            self._lose(f"{type(error).__name__}: {error}")
        finally:
            session.close()
        return heard

    async def _open(self) -> EngineSession | None:
        """One attempt; None leaves the cause in `_problem`."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                session = await self._connect(self.endpoint)
        except TimeoutError:
            self._problem = f"no answer from {self.endpoint.address} within {self._settings.connect_timeout_s:g} s"
        except OutriderError as error:
            self._problem = error.cause if isinstance(error, EngineUnavailable) else str(error)
        except Exception as error:
            _logger.exception("engine %s: cannot connect", self.endpoint.replica_id)
            self._problem = f"{type(error).__name__}: {error}"
        else:
            if not (misfit := self._misfit(session.hello)):
                return session
            self._problem = misfit
            session.close()
        return None

    def _misfit(self, hello: EngineHello) -> str:
        """Why this router cannot use the engine; empty if it can."""
        if hello.model != self._model:
            return f"serves {hello.model!r}, but this router serves {self._model!r}"
        if min(hello.max_model_len, hello.kv_capacity_tokens) < MIN_TEXT_LEN:
            return f"holds texts of {hello.kv_capacity_tokens} tokens, of at most {hello.max_model_len}"
        return ""

    def _begin(self, session: EngineSession) -> None:
        self._session = session
        self.sessions += 1
        self._report = None
        self._connected_at_s = self._time.now()
        self._metrics.engine_connected(replica_id=self.endpoint.replica_id)
        self._control([UpdateGate(settings=self._gate)])
        self._ask_report()
        self._on_change()

    def _ask_report(self) -> None:
        """Ask for a report now and again after the interval."""
        self._nonce += 1
        self._alarm = self._time.call_later(self._settings.report_interval_s, self._ask_report)
        if any(isinstance(one, ReportRequest) for one in self._unsent):
            self._flush()
        else:
            self._control([ReportRequest(nonce=self._nonce)])

    def _route(self, event: SequenceDelta | SequenceEnd | EngineReport | EngineHello) -> None:
        if isinstance(event, EngineReport):
            self._report = _Report(status=event.status, at_s=self._time.now(), outstanding=self.outstanding)
            self._on_change()
        elif isinstance(event, SequenceDelta | SequenceEnd) and (undeliverable := self._routes.deliver(event)):
            self.drop(undeliverable)

    def _lose(self, cause: str) -> None:
        """The session broke: say so, and end what ran on it."""
        lost = self._end_session(cause)
        _logger.warning("engine %s lost with %d sequences: %s", self.endpoint.replica_id, lost, cause)
        self._metrics.engine_lost(replica_id=self.endpoint.replica_id, failed_sequences=lost)
        self._on_change()

    def _end_session(self, cause: str) -> int:
        """Everything that ran on the session ends at once; returns how many sequences did."""
        self._session, self._problem, self._unsent = None, cause, []
        if self._alarm is not None:
            self._alarm.cancel()
        return self._routes.lose_all(cause)

    def _control(self, commands: Sequence[RouterCommand]) -> None:
        if self._session is not None:
            self._unsent.extend(commands)
            self._flush()

    def _flush(self) -> None:
        """Send what is waiting; a full queue keeps it until the next event or report."""
        if self._session is None or not self._unsent:
            return
        try:
            self._session.send(self._unsent)
        except Overloaded:
            return
        except EngineUnavailable as error:  # `receive` reports it as well, and ends the session
            _logger.debug("engine %s: %s", self.endpoint.replica_id, error)
        self._unsent = []

    def _report_age_s(self) -> float:
        since_s = self._connected_at_s if self._report is None else self._report.at_s
        return self._time.now() - since_s

    def _name(self) -> str:
        return self.endpoint.replica_id if self._session is None else self._session.hello.engine_id
