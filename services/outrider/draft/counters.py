"""What a draft counted since it started. Raw; every rate is derived where it is shown."""

from dataclasses import dataclass

__all__ = ["DraftCounters"]


@dataclass(slots=True, kw_only=True)
class DraftCounters:
    """Counters over all links of one draft.

    Share of drafting that was overtaken = superseded / (blocks + superseded).
    """

    steps: int = 0
    rounds: int = 0
    """Batches of blocks."""
    blocks: int = 0
    """Blocks sent."""
    drafted_tokens: int = 0
    """Tokens of the blocks sent."""
    tables: int = 0
    """Outcome tables sent."""
    outcomes: int = 0
    """Blocks in the tables sent."""
    late_laws: int = 0
    """Blocks of tables whose laws were sent when they were launched."""
    adopted: int = 0
    """Verdicts that met a branch: its KV went on without a forward."""
    superseded: int = 0
    """Blocks dropped before they were sent, since the text had moved on."""
    prefill_tokens: int = 0
    dropped_events: int = 0
    """Events that matched nothing: unknown handles, repeated openings."""
    resyncs: int = 0
    """Repairs asked for."""
    drift: int = 0
    """Repairs asked for because a prefix hash did not match."""
    refusals: int = 0
    evictions: int = 0
