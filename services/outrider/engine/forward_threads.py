"""The CPU threads of an engine's products belong to the one thread that runs it.

Every thread that runs a parallel product makes a team of its own in libgomp, which keeps it. As soon
as the teams of a process count more threads than there are cores, waiting workers spin a hundred
times less and sleep between two products: on two cores that made a forward of 17 ms one of 27.
So what builds an engine computes alone, and the thread that runs it takes the threads.
"""

import threading

import torch

__all__ = ["ForwardThreads", "compute_alone"]


def compute_alone() -> None:
    """Let the calling thread compute without a team: for whatever builds an engine."""
    torch.set_num_threads(1)


class ForwardThreads:
    """`count` threads for whichever thread runs the engine at the time."""

    def __init__(self, count: int) -> None:
        """Takes none yet."""
        self._count = count
        # Not the thread's number: a later thread may get the number of one that has ended.
        self._local = threading.local()

    def claim(self) -> None:
        """Give the calling thread its team. Free when it has one."""
        if not hasattr(self._local, "claimed"):
            torch.set_num_threads(self._count)
            self._local.claimed = True
