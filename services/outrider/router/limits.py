"""What a router allows: the limits of request fields, of time, and of work in flight."""

from dataclasses import dataclass, field

from outrider.core.errors import ConfigError
from outrider.core.speculation import VerificationRule

__all__ = ["MIN_TEXT_LEN", "UNSUPPORTED_FIELDS", "AdmissionLimits", "KeyLimits", "RouterLimits"]

UNSUPPORTED_FIELDS = ("json_schema", "regex", "grammar", "adapter")
"""Fields of the contract that no engine honours; refused by name."""

MIN_TEXT_LEN = 2
"""The shortest text: one prompt token and one output token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one API key may use of one router replica. None: no limit of its own."""

    max_concurrent_sequences: int | None = None
    """Choices of all its requests in flight."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt tokens (once per request) and output tokens; a request runs on when it overdraws."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent_sequences", "requests_per_minute", "tokens_per_minute"):
            if (value := getattr(self, name)) is not None:
                _at_least_1(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Work that one router replica takes on at the same time."""

    max_requests: int = 1024
    """Requests in flight."""
    max_tokens: int = 8_000_000
    """Prompt and charged output tokens of all choices in flight."""
    max_charged_output_tokens: int = 2048
    """A choice is charged its max_tokens, but at most this: few outputs are as long as they may be."""
    max_requests_per_key: int = 256
    """Requests in flight of one API key, so that no caller takes the whole router; callers without
    a key cannot be told apart, and are not limited by it."""
    min_retry_after_s: float = 0.1
    """Least that a refused client is told to wait."""
    max_retry_after_s: float = 30.0
    """Most that a refused client is told to wait; also told while nothing completes."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_charged_output_tokens", "max_requests_per_key"):
            _at_least_1(name, getattr(self, name))
        if not 0 < self.min_retry_after_s <= self.max_retry_after_s:
            raise ConfigError(f"min_retry_after_s: {self.min_retry_after_s} is outside (0, {self.max_retry_after_s}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """The served model and every limit that a request is checked against. Replaced as a whole, live."""

    model: str
    """Served model name."""
    max_model_len: int
    """Longest prompt and output together, in tokens. Draft slack is never part of it."""
    max_num_speculative_tokens: int = 8
    """Limit of `speculation.max_tokens`; 0 where the deployment has no proposer."""
    verification_rules: tuple[VerificationRule, ...] = (VerificationRule.COUPLED, VerificationRule.REJECTION)
    """Rules that the engines offer."""
    max_choices: int = 16
    max_top_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 64
    max_request_id_chars: int = 128
    max_traffic_class_chars: int = 64
    max_abs_priority: int = 100
    max_prompt_chars: int = 4_000_000
    """Text that is tokenized at all; the limit in tokens applies afterwards."""
    default_timeout_ms: int = 600_000
    """Time limit of a request that names none."""
    max_timeout_ms: int = 3_600_000
    """Longest time limit that a request may name."""
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: is empty")
        if self.max_model_len < MIN_TEXT_LEN:
            raise ConfigError(f"max_model_len: {self.max_model_len} is below {MIN_TEXT_LEN}")
        if self.max_num_speculative_tokens < 0:
            raise ConfigError(f"max_num_speculative_tokens: {self.max_num_speculative_tokens} is below 0")
        for name in ("max_choices", "max_prompt_chars", "default_timeout_ms", "max_timeout_ms"):
            _at_least_1(name, getattr(self, name))
        if self.default_timeout_ms > self.max_timeout_ms:
            raise ConfigError(
                f"default_timeout_ms: {self.default_timeout_ms} is above max_timeout_ms {self.max_timeout_ms}"
            )


def _at_least_1(field_name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{field_name}: {value} is below 1")
