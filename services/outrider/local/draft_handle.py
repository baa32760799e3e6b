"""A running draft as the rest of a local stack sees it, in whatever process it lives."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["DraftLoad", "LocalDraft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoad:
    """What a draft holds."""

    sequences: int
    """Sequences over all links."""
    kv_usage: float
    """Share of its KV blocks in use."""


class LocalDraft(Protocol):
    """A draft that serves links on the loopback."""

    @property
    def address(self) -> str:
        """host:port of its links."""
        ...

    async def load(self) -> DraftLoad:
        """What it holds now. Raises `EngineUnavailable` when it has ended."""
        ...

    async def stop(self) -> None:
        """End it and every link."""
        ...
