"""CPU time as a clock: what a step costs, free of whatever else the machine does."""

import time

__all__ = ["ThreadCpuClock"]


class ThreadCpuClock:
    """Implements `Clock` by the CPU time of the calling thread. For parts that one thread calls."""

    def now(self) -> float:
        """Seconds that this thread has computed."""
        return time.thread_time()
