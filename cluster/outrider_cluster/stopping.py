"""Signals that ask a command to stop, as one exception in its main thread."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["StopRequested", "StopSignals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """A signal asked this process to stop. No `Exception`: nothing may swallow it on the way out."""


class StopSignals:
    """Turns the first SIGINT or SIGTERM into `StopRequested`; ignores later ones.

    Later ones are ignored so that an impatient second Ctrl-C cannot interrupt the cleaning up.
    A context manager; use it in the main thread, around everything that has to be cleaned up.
    """

    def __init__(self) -> None:
        self._deferring = False
        self._waiting: signal.Signals | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "StopSignals":
        for one in _SIGNALS:
            self._stack.callback(signal.signal, one, signal.signal(one, self._on_signal))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block end first: a signal that arrives meanwhile raises at its end.

        For foreign code that leaves things half made when it is interrupted, or that installs
        handlers of its own; ours are in force again afterwards.
        """
        self._deferring = True
        try:
            yield
        except SystemExit as exited:
            # What Ray's own SIGTERM handler raises.
            raise StopRequested(signal.SIGTERM.name) from exited
        finally:
            self._deferring = False
            for one in _SIGNALS:
                signal.signal(one, self._on_signal if self._waiting is None else signal.SIG_IGN)
        if self._waiting is not None:
            raise StopRequested(self._waiting.name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self._deferring:
            self._waiting = received
            return
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise StopRequested(received.name)
