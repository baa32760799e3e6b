"""How much memory every process of a soak holds, and whether it grows. Reads Linux's /proc."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TOO_SHORT", "MemoryTrend", "MemoryWatch", "trend_of"]

_MIB = 1 << 20
_WARMUP_SHARE = 0.25
_MIN_SPAN_S = 60.0
TOO_SHORT = f"too short to tell, needs {_MIN_SPAN_S:.0f} s behind a warm-up of a quarter"
_NOISE_MIB = 16.0
_NOISE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrend:
    """A straight line through a process's resident memory, the warm-up left out."""

    process: str
    seconds: float
    """Time that the line spans."""
    level_mib: float
    """Mean."""
    slope_mib_per_minute: float

    @property
    def growth_mib(self) -> float:
        """What the line gains over its span."""
        return self.slope_mib_per_minute * self.seconds / 60

    @property
    def judged(self) -> bool:
        """Whether the span is long enough to tell growth from noise."""
        return self.seconds >= _MIN_SPAN_S

    @property
    def grows(self) -> bool:
        """Whether it gains more than allocators alone cause: 16 MiB or 5 %. False while nobody can tell."""
        return self.judged and self.growth_mib > max(_NOISE_MIB, _NOISE_SHARE * self.level_mib)

    def __str__(self) -> str:
        verdict = ("GROWS" if self.grows else "flat") if self.judged else TOO_SHORT
        return (
            f"{self.process}: {self.level_mib:.0f} MiB, {self.slope_mib_per_minute:+.2f} MiB a minute "
            f"over {self.seconds:.0f} s: {verdict}"
        )


def trend_of(process: str, points: Sequence[tuple[float, float]]) -> MemoryTrend:
    """The least-squares line through (seconds, bytes), without the first quarter of the time."""
    start = points[0][0] + _WARMUP_SHARE * (points[-1][0] - points[0][0])
    kept = [(at, size / _MIB) for at, size in points if at >= start]
    mean_at = sum(at for at, _ in kept) / len(kept)
    level = sum(size for _, size in kept) / len(kept)
    spread = sum((at - mean_at) ** 2 for at, _ in kept)
    slope = sum((at - mean_at) * (size - level) for at, size in kept) / spread if spread else 0.0
    return MemoryTrend(
        process=process, seconds=kept[-1][0] - kept[0][0], level_mib=level, slope_mib_per_minute=60 * slope
    )


class MemoryWatch:
    """Looks at this process and its descendants at equal intervals."""

    def __init__(self, interval_s: float = 2.0) -> None:
        """`interval_s`: seconds between two looks."""
        self._interval_s = interval_s
        self._points: dict[int, list[tuple[float, float]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look while the block runs, on the running event loop."""
        task = asyncio.create_task(self._watch(), name="memory-watch")
        try:
            yield
        finally:
            task.cancel()
            self._look()

    def trends(self) -> tuple[MemoryTrend, ...]:
        """One for every process that was seen at least twice and is still there."""
        alive = {os.getpid(), *_descendants(os.getpid())}
        return tuple(
            trend_of("this process" if pid == os.getpid() else f"child {pid}", points)
            for pid, points in sorted(self._points.items())
            if pid in alive and len(points) > 1
        )

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(self._interval_s)

    def _look(self) -> None:
        for pid in (os.getpid(), *_descendants(os.getpid())):
            # It may end while it is looked at.
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self._points.setdefault(pid, []).append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))


def _descendants(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found
