"""CUDA graphs of decode steps, one per number of rows.

A decode step of a large model is thousands of small kernels, which the host launches more slowly than
the device runs them. A graph launches them at once, but its shapes and addresses are fixed: so a
step is padded to the next recorded number of rows, and its integers go to one place.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import product
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["CudaRecorder", "PlainRecorder", "Recorder", "Run", "bucket_of", "row_buckets"]

Run: TypeAlias = Callable[[], Tensor]
"""Runs a step on whatever its static inputs hold now; returns the static output."""


def row_buckets(batch_sizes: Sequence[int], widths: Sequence[int]) -> tuple[int, ...]:
    """Numbers of rows to record: every batch size at every width, each number once, in order."""
    return tuple(sorted({batch * width for batch, width in product(batch_sizes, widths)}))


def bucket_of(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds `rows`; None if they are too many."""
    index = bisect_left(buckets, rows)
    return buckets[index] if index < len(buckets) else None


class Recorder(Protocol):
    """Turns a step on static tensors into something that repeats it."""

    def record(self, run: Run) -> Run:
        """Run the step, more than once, and return what repeats it: only on the device, and in order."""
        ...


class PlainRecorder:
    """Records nothing: every repetition runs the step anew. For devices without graphs."""

    def record(self, run: Run) -> Run:
        """Implements `Recorder.record`."""
        run()
        return run


class CudaRecorder:
    """Records CUDA graphs. They share their working memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        """Implements `Recorder.record`. Waits for the device; takes up to a second for a large model."""
        # What a library sets up at its first call (workspaces, communicators) must not be recorded.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, go on asking the device things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
