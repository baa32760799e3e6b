"""Settings of the engine loop."""

from dataclasses import dataclass

from outrider.core.errors import ConfigError

__all__ = ["TargetConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """How much one engine runs at once, and how long it waits for its draft."""

    max_num_seqs: int = 64
    """Sequences in the batch at once."""
    max_num_batched_tokens: int = 2048
    """Rows of one forward; a running sequence costs 1 + k, prefill takes the rest."""
    max_waiting_seqs: int = 256
    """Sequences that may wait for admission; more are refused as overloaded."""
    prefill_chunk_tokens: int = 512
    """Most prompt tokens of one sequence in one step, so that running streams never stall longer."""
    max_draft_wait_s: float = 0.25
    """Longest planned wait for a block in sequential mode. The wait follows the measured round trip
    and ends here at the latest; then the row goes on without a block."""
    max_draft_tokens_limit: int = 16
    """Upper bound of K for every setting and request."""
    prompt_lookup_max: int = 0
    """Longest n-gram to look up in the text of the sequence itself; 0 switches n-grams off."""
    prompt_lookup_min: int = 2
    """Shortest n-gram that counts as a match."""
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "prompt_lookup_min"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        if self.max_waiting_seqs < 0:
            raise ConfigError(f"max_waiting_seqs: {self.max_waiting_seqs} is below 0")
        if self.max_draft_wait_s <= 0:
            raise ConfigError(f"max_draft_wait_s: {self.max_draft_wait_s} is not above 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below "
                f"max_num_seqs {self.max_num_seqs}: a step needs one row per sequence"
            )
        if self.prompt_lookup_max and self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"prompt_lookup_max: {self.prompt_lookup_max} is below prompt_lookup_min {self.prompt_lookup_min}"
            )
