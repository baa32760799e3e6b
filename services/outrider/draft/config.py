"""Settings and identity of a draft."""

import math
from dataclasses import dataclass

from outrider.core.errors import ConfigError

__all__ = ["DraftConfig", "DraftIdentity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftIdentity:
    """Who a draft is, as its targets see it. Constant over its life."""

    incarnation: int
    """Changes when the draft restarts; above 0."""
    model: str
    """For logs and status."""
    vocab_size: int
    """Valid token ids are below this; padding of the logits is at or above."""
    tokenizer_fingerprint: bytes
    """Equal fingerprints are what makes two vocabularies one. Who computes it decides on padding."""

    def __post_init__(self) -> None:
        if self.incarnation < 1:
            raise ConfigError(f"incarnation: {self.incarnation} is below 1")
        if self.vocab_size < 1:
            raise ConfigError(f"vocab_size: {self.vocab_size} is below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How much one draft holds and computes at once."""

    max_num_seqs: int = 256
    """Sequences held over all links; more are refused, or take the place of an idle one."""
    max_num_draft_tokens: int = 16
    """Upper bound of K for every plan."""
    max_round_seqs: int = 64
    """Sequences drafted together in one round; the rest wait for the next, fairly over links."""
    max_queued_rows: int = 256
    """More sequences than this waiting for a block make the draft tell its targets that it is busy."""
    busy_retry_after_s: float = 0.05
    """How long a busy draft asks its targets to plan no drafting."""
    prefill_chunk_tokens: int = 256
    """Rows of one prefill forward: the longest that a round waits for prefill."""
    max_catch_up_tokens: int = 32
    """A sequence lacking KV for more tokens than this is prefilled before it is drafted for. One or
    two are lacking after every verdict, more after rounds that the target went alone."""
    q_top_k: int = 32
    """Rejection rule: (token id, probability) pairs of q that travel for each token."""
    num_ranked: int = 7
    """Cached mode: likely tokens kept per position; the outcomes are made of them."""
    max_branch_rows: int = 256
    """Cached mode: most branches, over all sequences, that are drafted in lockstep."""
    table_margin_s: float = 0.003
    """Cached mode: time kept free before the verify ends, for the table to be sent and read. It starts
    here and follows what is seen: more when a table came too late, slowly less while none does."""
    idle_timeout_s: float = 300.0
    """A sequence that heard nothing for this long is freed."""
    reclaim_idle_s: float = 1.0
    """When KV runs out, a sequence that heard nothing for this long may be freed for another."""
    stats_interval_steps: int = 64
    """Steps between two reports of health to every target."""
    inbox_limit: int = 4096
    """Messages that may wait for the drafting thread; at the limit a target is refused."""
    outbox_limit: int = 4096
    """Events that may wait for one target to read; one that reads no more is disconnected."""
    housekeeping_interval_s: float = 1.0
    """How often an idle draft looks for sequences to free."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_draft_tokens",
            "max_round_seqs",
            "max_queued_rows",
            "prefill_chunk_tokens",
            "max_catch_up_tokens",
            "q_top_k",
            "num_ranked",
            "max_branch_rows",
            "stats_interval_steps",
            "inbox_limit",
            "outbox_limit",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        if not (math.isfinite(self.table_margin_s) and self.table_margin_s > 0):
            raise ConfigError(f"table_margin_s: {self.table_margin_s} is not a finite number above 0")
        for name in ("busy_retry_after_s", "idle_timeout_s", "reclaim_idle_s", "housekeeping_interval_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: {value} is not a finite number above 0")
        if self.max_catch_up_tokens < 2:
            raise ConfigError("max_catch_up_tokens: 1 is below 2, the tokens that lack KV after a full accept")
