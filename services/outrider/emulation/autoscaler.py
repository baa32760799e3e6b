"""The autoscaler of a cluster in virtual time: the same demand and the same rule, with Serve's delays.

In a deployment Serve's controller averages what replicas report and applies bounds and delays; here this
module does. `tests/unit/emulation` holds it against Serve's own function.
"""

from collections import deque
from dataclasses import dataclass, field

from outrider.core.errors import ConfigError
from outrider.core.load import LoadTargets
from outrider.core.scaling import replicas_for

__all__ = ["Autoscaler", "ScalingSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """How a fleet follows its load. Times in seconds. Raises `ConfigError` naming the field."""

    targets: LoadTargets = field(default_factory=lambda: LoadTargets(sequences=28.0))
    min_replicas: int = 1
    max_replicas: int = 4
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 60.0
    measure_interval_s: float = 2.0
    look_back_s: float = 6.0
    start_s: float = 40.0
    """From the wish for a replica to the first sequence that it takes: placement and weights."""
    targets_per_draft: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(f"max_replicas: {self.min_replicas} … {self.max_replicas} are no bounds above 0")
        for name in ("measure_interval_s", "look_back_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        for name in ("upscale_delay_s", "downscale_delay_s", "start_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")
        if self.targets_per_draft < 1:
            raise ConfigError(f"targets_per_draft: {self.targets_per_draft} is below 1")


class Autoscaler:
    """Decides how many replicas there shall be. Knows nothing but demand and time."""

    def __init__(self, settings: ScalingSettings) -> None:
        """Begins with the fewest."""
        self._settings = settings
        self._seen: deque[tuple[float, float]] = deque()
        self._direction = 0
        self._since = 0.0
        self.wanted = settings.min_replicas
        """Replicas that shall be there now."""

    def observe(self, now: float, demand: float) -> int:
        """Take the summed demand of all replicas in, and return what is wanted from now on."""
        self._seen.append((now, demand))
        while self._seen[0][0] < now - self._settings.look_back_s:
            self._seen.popleft()
        mean = sum(one for _, one in self._seen) / len(self._seen)
        return self.decide(now, replicas_for(mean, current=self.wanted))

    def decide(self, now: float, desired: int) -> int:
        """Follow a wish once it has lasted for its delay; another direction in between starts it anew."""
        direction = (desired > self.wanted) - (desired < self.wanted)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay_s = self._settings.upscale_delay_s if direction > 0 else self._settings.downscale_delay_s
        if direction and now - self._since >= delay_s:
            self.wanted = min(max(desired, self._settings.min_replicas), self._settings.max_replicas)
            self._direction = 0
        return self.wanted
