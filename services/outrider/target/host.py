"""An engine in its own thread, open to any number of routers. Network code meets it in mailboxes."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.dispatch import (
    EngineHello,
    EngineReport,
    EngineStatus,
    ReportRequest,
    RouterCommand,
    SequenceAbort,
    SequenceEnd,
    SequenceErrorCode,
    SequenceFailure,
    SequenceSubmit,
    UpdateGate,
)
from outrider.core.errors import EngineUnavailable, OutriderError, Overloaded
from outrider.core.load import EngineLoad
from outrider.core.mailbox import Mailbox
from outrider.core.ports import EngineSession
from outrider.target.admission import SequenceFactory
from outrider.target.loop import EngineLoop
from outrider.target.running import RunningSequence, StreamId
from outrider.target.sessions import LocalSession, SessionBoard

__all__ = ["EngineHost"]

_COMMANDS_LIMIT = 8192
_IDLE_S = 1.0  # how often an idle engine looks at its draft link
_RETRY_AFTER_S = 1.0
_STEPS_PER_SNAPSHOT = 16
_NOTICE_S = 1.0  # what routers have sent by then they sent before they heard that the engine leaves
_NO_SESSION = 0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Drain:
    """A command of the engine's own process."""

    on_drained: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaving:
    """An engine that takes no more."""

    on_drained: Callable[[], None]
    heard_by: float
    """On the engine's clock: when every router has heard of it."""
    over: bool = False


class EngineHost:
    """Implements `EngineService`. A failed engine stays failed; its supervisor replaces it whole."""

    def __init__(
        self,
        *,
        hello: EngineHello,
        loop: EngineLoop,
        board: SessionBoard,
        sequences: SequenceFactory,
        on_failure: Callable[[str], None],
    ) -> None:
        """`board` is where `loop` emits to. `on_failure(cause)` is called once, on the engine thread."""
        self._hello = hello
        self._loop = loop
        self._board = board
        self._sequences = sequences
        self._on_failure = on_failure
        self._inbox: Mailbox[tuple[int, RouterCommand | _Drain | None]] = Mailbox(_COMMANDS_LIMIT)
        self._leaving: _Leaving | None = None
        self._status = self._make_status()
        self._load = loop.load()
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped; None while it runs."""
        return self._board.failure

    @property
    def status(self) -> EngineStatus:
        """The latest snapshot, at most about a second old while the engine runs. Any thread."""
        return self._status

    @property
    def load(self) -> EngineLoad:
        """The latest load, as old as `status`. Any thread."""
        return self._load

    def take_hops(self) -> list[float]:
        """Seconds of every hop to the draft that was measured since the last call. One thread, any."""
        hops_s = self._loop.counters.proposers.hops_s
        return [hops_s.popleft() for _ in range(len(hops_s))]

    @property
    def heartbeat(self) -> int:
        """Grows while the engine thread turns over, busy or idle; a hung step stops it. Any thread."""
        return self._beats

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread; running sequences end as unavailable. Returns when it is over or out of time."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Finish what runs and ask the routers, at once, for nothing more. Any thread; the first call counts.

        What they send before they have heard of it runs like the rest. `on_drained` is called once, on the
        engine thread, when nothing is left; the engine goes on serving until it is stopped.
        """
        self._inbox.put_always((_NO_SESSION, _Drain(on_drained)))

    def fail(self, cause: str) -> None:
        """End every session with this cause, at once and from any thread.

        For a supervisor that knows what the engine thread, stuck in a step, cannot say. The thread
        ends when its step does, and reports to `on_failure` then.
        """
        self._board.fail(cause)
        self._inbox.close()

    def connect(self, router_id: str) -> EngineSession:
        """Open a session for a router. Call on an event loop. Raises `EngineUnavailable`."""
        _log.info("router connected", extra={"router_id": router_id})
        return LocalSession(self._hello, self._board, self._submit, self._leave)

    def _submit(self, session_id: int, commands: Sequence[RouterCommand]) -> None:
        # All or none: whoever hears of the refusal sends the same commands again.
        if not self._inbox.put_all([(session_id, command) for command in commands]):
            raise Overloaded("the engine's command queue is full", retry_after_s=_RETRY_AFTER_S)

    def _leave(self, session_id: int) -> None:
        self._inbox.put_always((session_id, None))

    def _run(self) -> None:
        scheduler = self._loop.scheduler
        try:
            while not self._inbox.closed:
                for session_id, command in self._inbox.take(0.0 if scheduler.has_work else _IDLE_S):
                    self._apply(session_id, command)
                if busy := scheduler.has_work:
                    self._loop.step()
                else:
                    self._loop.proposers.poll()
                self._beats += 1
                self._finish_leaving()
                if not busy or self._beats % _STEPS_PER_SNAPSHOT == 0:
                    self._status, self._load = self._make_status(), self._loop.load()
            cause = "the engine was stopped"
        except EngineUnavailable as error:
            cause = error.cause
        except Exception as error:  # noqa: BLE001  whatever it is, every sequence has to hear of it
            _log.exception("engine step failed")
            cause = f"engine step failed: {error if isinstance(error, OutriderError) else type(error).__name__}"
        self._end(cause)

    def _end(self, cause: str) -> None:
        failure = SequenceFailure(code=SequenceErrorCode.UNAVAILABLE, message=cause)
        try:
            for running in list(self._loop.scheduler.all()):
                self._loop.end(running, failure=failure)
        except Exception:  # noqa: BLE001  the sessions below tell the routers all the same
            _log.exception("sequences could not be ended one by one")
        try:  # whatever else is broken, the routers and the supervisor hear of it
            self._board.fail(cause)
            self._on_failure(cause)
        finally:
            self._loop.proposers.close()

    def _apply(self, session_id: int, command: "RouterCommand | _Drain | None") -> None:
        match command:
            case _Drain():
                self._leave_service(command.on_drained)
            case SequenceSubmit():
                self._open(session_id, command)
            case SequenceAbort():
                running = self._find(StreamId(session_id, command.stream_key))
                if running is not None:
                    self._abort(running)
            case UpdateGate():
                self._loop.gate.update(command.settings)
            case ReportRequest():
                report = EngineReport(status=self._make_status(), nonce=command.nonce)
                self._board.emit(session_id, [report])
            case None:
                for running in [one for one in self._loop.scheduler.all() if one.stream.session_id == session_id]:
                    self._abort(running)

    def _open(self, session_id: int, submit: SequenceSubmit) -> None:
        submit = replace(submit, request=self._loop.arrived(submit.request))
        made = self._sequences.make(submit, session_id)
        if isinstance(made, RunningSequence) and not self._loop.scheduler.can_submit(submit.request.key_id):
            made = SequenceFailure(
                code=SequenceErrorCode.OVERLOADED,
                message=f"{self._loop.scheduler.num_waiting} sequences are already waiting on this engine",
            )
        if isinstance(made, SequenceFailure):
            end = SequenceEnd(stream_key=submit.stream_key, failure=made)
            self._loop.refused(submit.request, end)
            self._board.emit(session_id, [end])
        else:
            self._loop.scheduler.submit(made)

    def _abort(self, running: RunningSequence) -> None:
        running.sequence.abort()
        self._loop.end(running)

    def _find(self, stream: StreamId) -> RunningSequence | None:
        return next((one for one in self._loop.scheduler.all() if one.stream == stream), None)

    def _leave_service(self, on_drained: Callable[[], None]) -> None:
        if self._leaving is None:
            self._leaving = _Leaving(on_drained=on_drained, heard_by=self._loop.now() + _NOTICE_S)
            self._status = self._make_status()
            self._board.emit_to_all([EngineReport(status=self._status)])
            _log.info("engine is leaving", extra={"running": self._status.running, "waiting": self._status.waiting})

    def _finish_leaving(self) -> None:
        leaving = self._leaving
        if leaving is None or leaving.over or self._loop.scheduler.has_work or self._loop.now() < leaving.heard_by:
            return
        self._leaving = replace(leaving, over=True)
        leaving.on_drained()

    def _make_status(self) -> EngineStatus:
        status = self._loop.status(self._hello.engine_id)
        if self._leaving is None:
            return status
        left = status.running + status.waiting
        return replace(status, ready=False, problem=f"is leaving: finishes {left} sequences, takes no more")
