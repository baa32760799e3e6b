"""The public API as domain values: what a client asks for and what it gets back."""

from dataclasses import dataclass, field

from outrider.core.dispatch import SpeculationOutcome, Timings
from outrider.core.sequence import Finish
from outrider.core.speculation import SpeculationChoice
from outrider.core.verdict import TokenLogprobs

__all__ = [
    "Caller",
    "ChatMessage",
    "ChoiceEnd",
    "GenerationAccepted",
    "GenerationEvent",
    "GenerationRequest",
    "ModelDescription",
    "TextDelta",
    "Usage",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. Requests are visible and abortable only under the key that started them."""

    key_id: str = ""
    """Stable id of the API key; empty where no keys are configured."""
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request as the client wrote it. None = not set. Nothing is validated yet.

    The meaning and limit of each field is in `protos/outrider/v1/generation.proto`; the router's
    `validation` module is the one place that enforces them.
    """

    request_id: str = ""
    model: str = ""
    text: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    continue_final_message: bool = False
    token_ids: tuple[int, ...] | None = None
    resume_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int | None = None
    top_logprobs: int | None = None
    constraint: str | None = None
    """Name of the constraint field that is set (json_schema, regex, grammar), if any."""
    adapter: str = ""
    priority: int = 0
    traffic_class: str = ""
    timeout_ms: int | None = None
    speculation: SpeculationChoice = field(default_factory=SpeculationChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAccepted:
    """The request was admitted."""

    request_id: str
    model: str
    seed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New committed output of one choice."""

    choice_index: int
    first_token_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts, of committed tokens only."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """The end of one choice."""

    choice_index: int
    finish: Finish
    stop_string: str | None
    usage: Usage
    timings: Timings
    speculation: SpeculationOutcome


GenerationEvent = GenerationAccepted | TextDelta | ChoiceEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The served model and its limits."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_speculative_tokens: int
    max_choices: int
    max_top_logprobs: int
    unsupported_fields: tuple[str, ...]
    server_version: str
