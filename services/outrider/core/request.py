"""One sequence to run, as the engine sees it: token ids in, limits and wishes attached."""

from dataclasses import dataclass, field

from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice

__all__ = ["SequenceRequest", "StopConditions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """What ends a sequence, besides deadline and abort. Scanned in order by `Sequence.commit`."""

    max_tokens: int
    """Most output tokens, resumed ones included."""
    min_tokens: int = 0
    """Stop strings are ignored below this many output tokens (ids are suppressed by the law)."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-text ids of the model; empty when the request ignores them."""
    token_ids: tuple[int, ...] = ()
    """The request's own stop ids."""
    strings: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    """Whether stop strings are looked for in text without special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One choice of a request, validated, tokenized and keyed by the router."""

    request_id: str
    choice_index: int = 0
    prompt_token_ids: tuple[int, ...]
    resume_token_ids: tuple[int, ...] = ()
    """Output that the client has already; counts as output, is never sent again."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopConditions
    noise_key: int
    """64-bit key of the shared noise, made from (seed, choice index)."""
    key_id: str = ""
    """Id of the API key that it runs under: an engine shares its seats between keys."""
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: only those of the committed tokens."""
    speculation: SpeculationChoice = field(default_factory=SpeculationChoice)
    priority: int = 0
    traffic_class: str = ""
    timeout_s: float | None = None
    """Time left when the engine receives the request; None: no limit."""
    traceparent: str = ""
