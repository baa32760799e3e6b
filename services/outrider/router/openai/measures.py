"""Counts and measures of an answer: `usage`, and `metrics` with vLLM's account of speculation."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from outrider.core.generation import ChoiceEnd, Usage
from outrider.core.speculation import SpeculationStats

__all__ = ["metrics_of", "speculative_decoding", "usage_of"]


def usage_of(usages: Sequence[Usage]) -> dict[str, Any]:
    """OpenAI's `usage` over all prompts."""
    prompt = sum(one.prompt_tokens for one in usages)
    completion = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_prompt_tokens for one in usages)},
    }


def metrics_of(ends: Sequence[ChoiceEnd], seed: int) -> dict[str, Any] | None:
    """What can be said of one sequence; None for several, as in vLLM: the counts would not be anybody's."""
    if len(ends) != 1:
        return None
    (end,) = ends
    speculation, timings = end.speculation, end.timings
    return {
        "speculative_decoding": speculative_decoding(speculation.stats),
        "outrider": {
            "seed": seed,
            "mode": speculation.mode.value,
            "reason": speculation.reason.value,
            "rounds": speculation.stats.rounds,
            "estimated_speedup": speculation.estimated_speedup,
            "hit_rate": speculation.stats.hit_rate,
            "queue_ms": 1e3 * timings.queue_s,
            "prefill_ms": 1e3 * timings.prefill_s,
            "first_token_ms": 1e3 * timings.first_token_s,
            "total_ms": 1e3 * timings.total_s,
        },
    }


def speculative_decoding(stats: SpeculationStats) -> dict[str, Any] | None:
    """vLLM's `metrics.speculative_decoding` (its level `summary`); None when nothing was verified.

    `acceptance_histogram[j]`: verify steps that accepted exactly j draft tokens. It follows from the
    counts by position: those that accepted at least j, less those that accepted more. Summed it is
    `num_spec_steps`, and weighted with j it is `num_accepted_draft_tokens`.
    """
    if not stats.speculative_rounds:
        return None
    at_least = [stats.speculative_rounds, *stats.accepted_per_position, 0]
    return {
        "num_spec_steps": stats.speculative_rounds,
        "num_draft_tokens": stats.verified,
        "num_accepted_draft_tokens": stats.accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - most for more, most in pairwise(at_least)],
        "num_spec_tokens": len(stats.verified_per_position),
    }
