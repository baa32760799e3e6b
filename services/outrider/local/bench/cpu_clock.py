"""CPU time as a clock: what a step costs, free of whatever else the machine does."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ThreadCpuClock"]


class ThreadCpuClock:
    """Implements `Clock` by the CPU time of the calling thread. For parts that one thread calls."""

    def __init__(self) -> None:
        self._left_out_s = 0.0

    def now(self) -> float:
        """Seconds that this thread has computed, without those inside `stopped`."""
        return time.thread_time() - self._left_out_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the CPU time of the block out."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._left_out_s += time.thread_time() - began
