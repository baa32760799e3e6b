"""vLLM's `speculative_config` dictionary, as it is written there. What has no counterpart is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import ConfigError
from outrider.engine.models.heads import is_head
from outrider.local.config import DraftMethod

__all__ = ["SpeculativeConfig", "parse_speculative_config"]

_KEYS = (
    "model",
    "method",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "draft_tensor_parallel_size",
    "disable_by_batch_size",
)
_METHODS = ("draft_model", "eagle3", "ngram")
_ELSEWHERE = {
    "quantization": "a draft named 'self' is the target in four bits; others run as they are",
    "max_model_len": "the draft holds what the target does",
    "revision": "give a local folder of that revision as the model",
    "speculative_token_tree": "drafts are chains; outcomes are drafted ahead in cached mode",
    "draft_sample_method": "the request's verification rule says how drafts are drawn",
    "rejection_sample_method": "the request's verification rule says how drafts are judged",
}
"""Keys of vLLM's that have no counterpart, and what does their work here."""
_DEFAULT_LOOKUP = 5
"""Longest n-gram where only the method is given, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How blocks are obtained. Raises `ConfigError` naming the key."""

    draft: str | None
    """Draft model or head; None for n-grams alone."""
    method: DraftMethod = "draft_model"
    """What the draft is."""
    num_speculative_tokens: int
    """Most draft tokens per round, K."""
    prompt_lookup_max: int = 0
    """Longest n-gram that is looked up; 0: no n-grams."""
    prompt_lookup_min: int = 1
    """Shortest n-gram that counts as a match."""
    batch_size_threshold: int | None = None
    """No speculation while more sequences than this run; None: as the gate's policy says."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"num_speculative_tokens: {self.num_speculative_tokens} is below 1")
        if self.draft is None and self.prompt_lookup_max < 1:
            raise ConfigError(f"prompt_lookup_max: {self.prompt_lookup_max} is below 1")
        if self.prompt_lookup_min < 1:
            raise ConfigError(f"prompt_lookup_min: {self.prompt_lookup_min} is below 1")
        if self.batch_size_threshold is not None and self.batch_size_threshold < 1:
            raise ConfigError(f"disable_by_batch_size: {self.batch_size_threshold} is below 1")
        if self.prompt_lookup_max and self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )


def parse_speculative_config(config: Mapping[str, Any]) -> SpeculativeConfig:
    """Read the dictionary. Raises `ConfigError` naming an unknown or unsupported key, method or value."""
    for key in config:
        if key not in _KEYS:
            hint = _ELSEWHERE.get(key, f"supported: {', '.join(_KEYS)}")
            raise ConfigError(f"speculative_config: {key!r} is not supported; {hint}")
    model, method = config.get("model"), config.get("method")
    if method is None:
        # As in vLLM: the model's name decides where no method is given.
        method = _method_of(model)
    if method not in _METHODS:
        raise ConfigError(f"speculative_config: method {method!r} is not supported; supported: {', '.join(_METHODS)}")
    if "num_speculative_tokens" not in config:
        raise ConfigError("speculative_config: num_speculative_tokens is missing")
    if method != "ngram":
        return _draft(config, model, "eagle3" if method == "eagle3" else "draft_model")
    return _ngram(config, model)


def _method_of(model: object) -> str:
    if model in (None, "ngram", "[ngram]"):
        return "ngram"
    return "eagle3" if isinstance(model, str) and ("eagle3" in model.lower() or is_head(model)) else "draft_model"


def _draft(config: Mapping[str, Any], model: object, method: DraftMethod) -> SpeculativeConfig:
    if not isinstance(model, str) or not model:
        raise ConfigError(f"speculative_config: method {method} needs the name of a model")
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        if key in config:
            raise ConfigError(f"speculative_config: {key!r} belongs to method ngram")
    if "draft_tensor_parallel_size" in config and _integer(config, "draft_tensor_parallel_size") != 1:
        raise ConfigError("speculative_config: draft_tensor_parallel_size must be 1: a draft is one process")
    return SpeculativeConfig(
        draft=model,
        method=method,
        num_speculative_tokens=_integer(config, "num_speculative_tokens"),
        batch_size_threshold=_threshold(config),
    )


def _ngram(config: Mapping[str, Any], model: object) -> SpeculativeConfig:
    if model not in (None, "ngram", "[ngram]"):
        raise ConfigError(f"speculative_config: model {model!r} does not go with method ngram")
    # As in vLLM: one of the two bounds alone is both of them.
    given = [_integer(config, key) for key in ("prompt_lookup_min", "prompt_lookup_max") if key in config]
    low, high = (given[0], given[-1]) if given else (_DEFAULT_LOOKUP, _DEFAULT_LOOKUP)
    if "draft_tensor_parallel_size" in config:
        raise ConfigError("speculative_config: 'draft_tensor_parallel_size' belongs to methods with a draft")
    return SpeculativeConfig(
        draft=None,
        num_speculative_tokens=_integer(config, "num_speculative_tokens"),
        prompt_lookup_max=high,
        prompt_lookup_min=low,
        batch_size_threshold=_threshold(config),
    )


def _threshold(config: Mapping[str, Any]) -> int | None:
    return _integer(config, "disable_by_batch_size") if "disable_by_batch_size" in config else None


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"speculative_config: {key} must be a whole number, not {value!r}")
    return value
