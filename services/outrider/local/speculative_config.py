"""vLLM's `speculative_config` dictionary, as it is written there. What has no counterpart is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import ConfigError

__all__ = ["SpeculativeConfig", "parse_speculative_config"]

_KEYS = ("model", "method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_METHODS = ("draft_model", "ngram")
_DEFAULT_LOOKUP = 5
"""Longest n-gram where only the method is given, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How blocks are obtained. Raises `ConfigError` naming the key."""

    draft: str | None
    """Draft model; None for n-grams alone."""
    num_speculative_tokens: int
    """Most draft tokens per round, K."""
    prompt_lookup_max: int = 0
    """Longest n-gram that is looked up; 0: no n-grams."""
    prompt_lookup_min: int = 1
    """Shortest n-gram that counts as a match."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"num_speculative_tokens: {self.num_speculative_tokens} is below 1")
        if self.draft is None and self.prompt_lookup_max < 1:
            raise ConfigError(f"prompt_lookup_max: {self.prompt_lookup_max} is below 1")
        if self.prompt_lookup_min < 1:
            raise ConfigError(f"prompt_lookup_min: {self.prompt_lookup_min} is below 1")
        if self.prompt_lookup_max and self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )


def parse_speculative_config(config: Mapping[str, Any]) -> SpeculativeConfig:
    """Read the dictionary. Raises `ConfigError` naming an unknown or unsupported key, method or value."""
    for key in config:
        if key not in _KEYS:
            raise ConfigError(f"speculative_config: {key!r} is not supported; supported: {', '.join(_KEYS)}")
    model, method = config.get("model"), config.get("method")
    if method is None:
        # As in vLLM: the model's name decides where no method is given.
        method = "ngram" if model in (None, "ngram", "[ngram]") else "draft_model"
    if method not in _METHODS:
        raise ConfigError(f"speculative_config: method {method!r} is not supported; supported: {', '.join(_METHODS)}")
    if "num_speculative_tokens" not in config:
        raise ConfigError("speculative_config: num_speculative_tokens is missing")
    k = _integer(config, "num_speculative_tokens")
    if method == "draft_model":
        if not isinstance(model, str) or not model:
            raise ConfigError("speculative_config: method draft_model needs the name of a model")
        for key in ("prompt_lookup_max", "prompt_lookup_min"):
            if key in config:
                raise ConfigError(f"speculative_config: {key!r} belongs to method ngram")
        return SpeculativeConfig(draft=model, num_speculative_tokens=k)
    return _ngram(config, model, k)


def _ngram(config: Mapping[str, Any], model: object, k: int) -> SpeculativeConfig:
    if model not in (None, "ngram", "[ngram]"):
        raise ConfigError(f"speculative_config: model {model!r} does not go with method ngram")
    # As in vLLM: one of the two bounds alone is both of them.
    given = [_integer(config, key) for key in ("prompt_lookup_min", "prompt_lookup_max") if key in config]
    low, high = (given[0], given[-1]) if given else (_DEFAULT_LOOKUP, _DEFAULT_LOOKUP)
    return SpeculativeConfig(draft=None, num_speculative_tokens=k, prompt_lookup_max=high, prompt_lookup_min=low)


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"speculative_config: {key} must be a whole number, not {value!r}")
    return value
