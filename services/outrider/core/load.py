"""How loaded an engine is: one view of it, for the speculation gate, the status and the autoscaler.

The gate reads `running` in every step and reacts in that step; the autoscaler reads the same numbers
seconds later and asks for replicas. So a burst first turns speculation off, then adds replicas, and
speculation comes back where the batches have become small again.
"""

from dataclasses import dataclass

from outrider.core.errors import ConfigError

__all__ = ["EngineLoad", "LoadTargets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One engine at one moment."""

    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences that wait for admission."""
    kv_usage: float = 0.0
    """Share of KV blocks in use."""
    queue_s: float = 0.0
    """How long the sequence that has waited longest has been waiting, in seconds."""

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not (self.running or self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTargets:
    """The load that an engine shall have. Raises `ConfigError` naming the field."""

    sequences: float
    """Running and waiting sequences."""
    kv_usage: float = 0.8
    """Share of KV blocks in use: above it sequences are soon preempted."""
    queue_s: float = 2.0
    """Longest wait for admission, in seconds."""

    def __post_init__(self) -> None:
        for name in ("sequences", "kv_usage", "queue_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")

    def demand(self, load: EngineLoad) -> float:
        """Engines that this engine's work would load as wanted; 1: it is loaded just right.

        The scarcest of seats, KV and time counts. A wait says that there is too little, not by how much:
        it never asks for more than twice what there is.
        """
        seats = (load.running + load.waiting) / self.sequences
        return max(seats, load.kv_usage / self.kv_usage, min(2.0, load.queue_s / self.queue_s))
