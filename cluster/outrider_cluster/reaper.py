"""End every process that this one has started, also those whose own parent died first.

Ray's agents outlive a raylet that was ended while it started. As a child subreaper this process
becomes the parent of all such orphans, so that at the end it can find them, end them and wait for
them. Linux only, like the whole deployment.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["no_process_left"]

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 3.0
_PAUSE_S = 0.02


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """For a command's whole life: when the block ends, no descendant of this process is left.

    Not for a process with children that others own: every child is ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        _end_descendants()


def _end_descendants() -> None:
    # Ending one child may hand us its children, hence the loop until none is left.
    deadline = time.monotonic() + _GRACE_S
    asked: set[int] = set()
    while children := _living_children():
        impatient = time.monotonic() > deadline
        for pid in children - asked if not impatient else children:
            asked.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if impatient else signal.SIGTERM)
        # waitpid cannot wait for "any child, at most this long".
        time.sleep(_PAUSE_S)


def _living_children() -> set[int]:
    """Children that still run; those that have ended are reaped."""
    found: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended meanwhile
            found.update(int(pid) for pid in listing.read_text().split())
    return {pid for pid in found if not _reap(pid)}


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
