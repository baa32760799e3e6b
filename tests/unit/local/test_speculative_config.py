"""vLLM's `speculative_config`: what is understood and what is refused, by name."""

from typing import Any

import pytest

from outrider.core.errors import ConfigError
from outrider.local.speculative_config import SpeculativeConfig, parse_speculative_config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model": "d", "num_speculative_tokens": 5},
            SpeculativeConfig(draft="d", num_speculative_tokens=5),
        ),
        (
            {"method": "draft_model", "model": "d", "num_speculative_tokens": 3},
            SpeculativeConfig(draft="d", num_speculative_tokens=3),
        ),
        (
            {"method": "eagle3", "model": "h", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
            SpeculativeConfig(draft="h", method="eagle3", num_speculative_tokens=3),
        ),
        (
            {"model": "owner/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3},
            SpeculativeConfig(draft="owner/EAGLE3-LLaMA3.1-Instruct-8B", method="eagle3", num_speculative_tokens=3),
        ),
        (
            {"model": "d", "num_speculative_tokens": 3, "disable_by_batch_size": 8},
            SpeculativeConfig(draft="d", num_speculative_tokens=3, batch_size_threshold=8),
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            SpeculativeConfig(draft=None, num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2),
        ),
        (
            {"model": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
            SpeculativeConfig(draft=None, num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=3),
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4},
            SpeculativeConfig(draft=None, num_speculative_tokens=4, prompt_lookup_max=5, prompt_lookup_min=5),
        ),
    ],
)
def test_understood(config: dict[str, Any], expected: SpeculativeConfig) -> None:
    assert parse_speculative_config(config) == expected


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model": "d", "num_speculative_tokens": 5, "quantization": "fp8"}, "'quantization' is not supported"),
        ({"model": "d", "num_speculative_tokens": 5, "revision": "main"}, "'revision' is not supported; give a local"),
        ({"model": "d", "num_speculative_tokens": 5, "colour": 1}, "'colour' is not supported; supported: model"),
        ({"model": "d", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2}, "must be 1: a draft is one"),
        ({"method": "ngram", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}, "methods with a draft"),
        ({"model": "d", "num_speculative_tokens": 5, "disable_by_batch_size": 0}, "disable_by_batch_size: 0 is below"),
        ({"method": "eagle3", "num_speculative_tokens": 5}, "eagle3 needs the name"),
        ({"method": "medusa", "num_speculative_tokens": 5}, "method 'medusa' is not supported; supported: draft_model"),
        ({"model": "d"}, "num_speculative_tokens is missing"),
        ({"model": "d", "num_speculative_tokens": 0}, "num_speculative_tokens: 0 is below 1"),
        ({"model": "d", "num_speculative_tokens": True}, "must be a whole number, not True"),
        ({"method": "draft_model", "num_speculative_tokens": 5}, "needs the name of a model"),
        ({"model": "d", "num_speculative_tokens": 5, "prompt_lookup_max": 3}, "belongs to method ngram"),
        ({"method": "ngram", "model": "d", "num_speculative_tokens": 5}, "'d' does not go with method ngram"),
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 0}, "prompt_lookup_max: 0 is below 1"),
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min: 3 is above prompt_lookup_max 2",
        ),
    ],
)
def test_refused_by_name(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_speculative_config(config)
