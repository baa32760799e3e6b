"""What an emulated device does instead of computing: it lets time pass."""

import time
from typing import Protocol

__all__ = ["DeviceClock", "WallClock"]

_SLEEP_OVERSHOOT_S = 150e-6


class DeviceClock(Protocol):
    """Time that a device spends."""

    @property
    def counts_software(self) -> bool:
        """Whether time passes while software runs, and not only while devices do."""
        ...

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def run(self, seconds: float) -> None:
        """Return when this much time has passed since the call."""
        ...


class WallClock:
    """The machine's own time: a device takes as long as the real one would, and software comes on top."""

    counts_software = True

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def run(self, seconds: float) -> None:
        """Sleep; the last moments in short naps, since the kernel wakes a sleeper late."""
        end = time.monotonic() + seconds
        if seconds > _SLEEP_OVERSHOOT_S:
            time.sleep(seconds - _SLEEP_OVERSHOOT_S)
        while time.monotonic() < end:
            time.sleep(0)
