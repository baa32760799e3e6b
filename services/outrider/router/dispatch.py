"""Which engine runs a request: the one that knows its prefix, unless another is clearly freer."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.errors import ConfigError, EngineUnavailable

__all__ = ["Candidate", "DispatchSettings", "Dispatcher", "affinity_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Weights of the policy."""

    affinity_tokens: int = 128
    """Prompts that agree in this many first tokens prefer the same engine; shorter ones prefer none."""
    affinity_slack: int = 4
    """The preferred engine is taken while its load is at most this much above the least."""

    def __post_init__(self) -> None:
        if self.affinity_tokens < 1:
            raise ConfigError(f"affinity_tokens: {self.affinity_tokens} is below 1")
        if self.affinity_slack < 0:
            raise ConfigError(f"affinity_slack: {self.affinity_slack} is below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One engine as the policy sees it."""

    replica_id: str
    ready: bool
    problem: str = ""
    """Why it is not ready."""
    outstanding: int = 0
    """Sequences of this router on it."""
    reported: int = 0
    """Running and waiting sequences of all routers, by the last report."""
    outstanding_at_report: int = 0
    """Sequences of this router at that time; they are part of `reported`."""
    stale: bool = False
    """The report is overdue: the engine may be about to be found dead."""
    leaving: bool = False
    """The directory no longer lists it; it is chosen only if no other engine is left."""

    @property
    def load(self) -> int:
        """Estimate of its sequences now: the report, corrected by what this router knows since."""
        return max(self.outstanding, self.reported + self.outstanding - self.outstanding_at_report)


def affinity_key(prompt_token_ids: Sequence[int], tokens: int) -> bytes | None:
    """Hash of the first `tokens` ids; None for a shorter prompt, which has no prefix worth keeping."""
    if len(prompt_token_ids) < tokens:
        return None
    packed = b"".join(one.to_bytes(4, "little") for one in prompt_token_ids[:tokens])
    return hashlib.blake2b(packed, digest_size=16).digest()


class Dispatcher:
    """Chooses engines. Holds only whose turn it is among equals."""

    def __init__(self, settings: DispatchSettings | None = None) -> None:
        self._settings = DispatchSettings() if settings is None else settings
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, prompt_token_ids: Sequence[int], engines: Sequence[Candidate]) -> str:
        """Return the replica id of the engine to use.

        Raises `EngineUnavailable` naming why no engine is ready.
        """
        candidates = _best_kind([one for one in engines if one.ready])
        if not candidates:
            raise EngineUnavailable(_why_none(engines))
        least = min(one.load for one in candidates)
        chosen = self._preferred(prompt_token_ids, candidates, least)
        if chosen is None:
            equals = [one for one in candidates if one.load == least]
            chosen = min(equals, key=lambda one: self._turns.get(one.replica_id, 0))
        self._turn += 1
        self._turns = {one.replica_id: self._turns.get(one.replica_id, 0) for one in engines}
        self._turns[chosen.replica_id] = self._turn
        return chosen.replica_id

    def _preferred(
        self, prompt_token_ids: Sequence[int], candidates: Sequence[Candidate], least: int
    ) -> Candidate | None:
        """The engine of this prefix, if it is not too busy.

        Rendezvous hashing: all routers agree without talking, and an engine that comes or goes
        moves only its own share of the prefixes.
        """
        key = affinity_key(prompt_token_ids, self._settings.affinity_tokens)
        if key is None:
            return None
        preferred = max(candidates, key=lambda one: hashlib.blake2b(one.replica_id.encode(), key=key).digest())
        return preferred if preferred.load <= least + self._settings.affinity_slack else None


def _best_kind(ready: Sequence[Candidate]) -> list[Candidate]:
    """The engines of the most trusted kind that has any: listed and fresh, listed, the rest."""
    for allow_stale, allow_leaving in ((False, False), (True, False), (True, True)):
        kind = [one for one in ready if one.stale <= allow_stale and one.leaving <= allow_leaving]
        if kind:
            return kind
    return []


def _why_none(engines: Sequence[Candidate]) -> str:
    if not engines:
        return "the directory lists no engine"
    return "no engine is ready: " + "; ".join(f"{one.replica_id}: {one.problem}" for one in engines)
