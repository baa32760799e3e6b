"""What clients send, field by field, with OpenAI's and vLLM's names.

A field that this server cannot honour may be sent with the value that changes nothing; any other
value is refused by name, and so is a field that nobody knows. Only what cannot change the answer
(labels, caching hints) is passed over.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from outrider.core.errors import InvalidRequest, Unsupported

__all__ = ["ChatBody", "CompletionBody", "GenerationBody", "SpeculationBody", "parse_body"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
"""Fields that are refused, with the values that ask for nothing. null always does."""

_PASSED_OVER = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
        "include_reasoning",
    }
)
"""Fields that cannot change the answer."""


_BRANCHES = frozenset({"str", "int", "float", "bool"})

B = TypeVar("B", bound="GenerationBody")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class StreamOptionsBody(_Body):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    """A last chunk with the counts of the whole request."""
    continuous_usage_stats: bool | None = None
    """The counts so far in every chunk."""
    include_obfuscation: Literal[False] | None = None


class SpeculationBody(_Body):
    """Outrider's own: wishes about speculation. They never change the distribution of the text."""

    preference: Literal["auto", "off", "on"] = "auto"
    max_tokens: int | None = None
    rule: Literal["coupled", "rejection"] = "coupled"


class GenerationBody(_Body):
    """What both endpoints take."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's further names.
    request_id: str | None = None
    top_k: int | None = None
    """0 and -1 keep every token."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    """As in vLLM: lower goes first."""
    # Outrider's own.
    timeout_ms: int | None = None
    traffic_class: str | None = None
    speculation: SpeculationBody | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`, and the one that counts."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Literal[False] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    """Text or token ids, or a list of either."""
    logprobs: int | None = None
    add_special_tokens: Literal[True] | None = None


def parse_body(kind: type[B], body: bytes) -> B:
    """Read JSON. Raises `InvalidRequest` or `Unsupported` naming the first field that is wrong."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", "is not a JSON object")
    for name, wish in value.items():
        if name in _NEUTRAL and wish is not None and wish not in _NEUTRAL[name]:
            raise Unsupported(name, "is not offered here")
    passed_over = _PASSED_OVER | _NEUTRAL.keys()
    fields = {name: wish for name, wish in value.items() if wish is not None and name not in passed_over}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = "is not known" if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidRequest(_path(first["loc"]), problem) from None


def _path(location: tuple[int | str, ...]) -> str:
    """`stop.str` names a branch of a union, which is no part of the client's field."""
    parts = [str(one) for one in location if one not in _BRANCHES and "[" not in str(one)]
    return ".".join(parts)
