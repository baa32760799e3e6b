"""Events of a stream as JSON objects and as one line for people. Scripts read the former: its keys stay."""

from typing import Any

from outrider.core.dispatch import SpeculationOutcome
from outrider.core.generation import ChoiceEnd, GenerationAccepted, GenerationEvent, TextDelta
from outrider.core.speculation import SpeculationMode

__all__ = ["as_json", "speculation_as_json", "summary_of"]


def as_json(event: GenerationEvent) -> dict[str, Any]:
    """One event. The last one of a choice has finish_reason, usage, timings and speculation."""
    if isinstance(event, GenerationAccepted):
        return {
            "request_id": event.request_id,
            "model": event.model,
            "seed": event.seed,
            "prompt_tokens": event.prompt_tokens,
        }
    if isinstance(event, TextDelta):
        return {
            "choice_index": event.choice_index,
            "first_token_index": event.first_token_index,
            "text": event.text,
            "token_ids": list(event.token_ids),
        }
    return {
        "choice_index": event.choice_index,
        "finish_reason": event.finish.reason.value,
        "stop_string": event.stop_string,
        "stop_token_id": event.finish.stop_token_id,
        "usage": {
            "prompt_tokens": event.usage.prompt_tokens,
            "completion_tokens": event.usage.completion_tokens,
            "cached_prompt_tokens": event.usage.cached_prompt_tokens,
        },
        "timings": {
            "queue_s": event.timings.queue_s,
            "prefill_s": event.timings.prefill_s,
            "first_token_s": event.timings.first_token_s,
            "total_s": event.timings.total_s,
        },
        "speculation": speculation_as_json(event.speculation),
    }


def speculation_as_json(outcome: SpeculationOutcome) -> dict[str, Any]:
    """What speculation did: mode, reason, raw counters, and the rates that follow from them."""
    stats = outcome.stats
    return {
        "mode": outcome.mode.value,
        "reason": outcome.reason.value,
        "rounds": stats.rounds,
        "speculative_rounds": stats.speculative_rounds,
        "drafted": stats.drafted,
        "verified": stats.verified,
        "accepted": stats.accepted,
        "committed": stats.committed,
        "late": stats.late,
        "stale": stats.stale,
        "late_laws": stats.late_laws,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "estimated_speedup": outcome.estimated_speedup,
    }


def summary_of(event: GenerationEvent) -> str | None:
    """One line about a finished choice; None for other events."""
    if not isinstance(event, ChoiceEnd):
        return None
    usage, timings, outcome = event.usage, event.timings, event.speculation
    parts = [
        f"{usage.completion_tokens} tokens in {timings.total_s:.2f} s ({event.finish.reason.value})",
        f"first after {timings.first_token_s * 1000:.0f} ms",
    ]
    stats = outcome.stats
    if stats.acceptance_rate is not None and stats.mean_acceptance_length is not None:
        parts.append(f"accepted {stats.acceptance_rate:.0%}, {stats.mean_acceptance_length:.2f} tokens a round")
    if outcome.mode is SpeculationMode.OFF:
        parts.append(f"speculation off: {outcome.reason.value}")
    return ", ".join(parts)
