"""From a body to domain requests: one for each prompt. The domain's own validation follows behind."""

from dataclasses import dataclass, replace
from typing import Any

from outrider.core.errors import InvalidRequest, Unsupported
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.speculation import SpeculationChoice, SpeculationPreference, VerificationRule
from outrider.router.openai.schema import ChatBody, CompletionBody, GenerationBody

__all__ = ["MAX_PROMPTS", "Call", "chat_call", "chat_name", "completion_call", "completion_name"]

MAX_PROMPTS = 64
"""Prompts of one completion request."""

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_PART_FIELDS = frozenset({"type", "text", "cache_control", "prompt_cache_breakpoint"})
"""Of a part of a message. The latter two are hints to caches, which cannot change an answer."""
_ROLES = {"developer": "system"}  # the newer name of the same role

_EMPTY: tuple[Any, ...] = (None, [], {}, "")
"""How a field that nobody used comes back from an earlier answer."""

_COMMON_NAMES = {"include_stop_str": "include_stop_str_in_output"}
_COMPLETION_NAMES = {"text": "prompt", "token_ids": "prompt", "input": "prompt", "top_logprobs": "logprobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request, ready to run."""

    requests: tuple[GenerationRequest, ...]
    """One for each prompt; choice i of prompt p is choice p * n + i of the answer."""
    chat: bool
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    with_token_ids: bool
    tokens_as_ids: bool
    """Write a token in log-probabilities as `token_id:ID` instead of its text."""

    def rename(self, field: str) -> str:
        """The client's name of a domain field."""
        return chat_name(field) if self.chat else completion_name(field)


def chat_call(body: ChatBody, header_id: str) -> Call:
    """A conversation. Raises `InvalidRequest` or `Unsupported` naming the field."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    if body.add_generation_prompt is not None and body.add_generation_prompt == bool(body.continue_final_message):
        raise InvalidRequest("add_generation_prompt", "is the opposite of continue_final_message")
    request = replace(
        _common(body, header_id),
        messages=tuple(_message(f"messages[{index}]", one) for index, one in enumerate(body.messages)),
        continue_final_message=bool(body.continue_final_message),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _call(body, (request,), chat=True)


def completion_call(body: CompletionBody, header_id: str) -> Call:
    """One or several prompts. Raises `InvalidRequest` naming the field."""
    common = replace(
        _common(body, header_id),
        max_tokens=_DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        top_logprobs=body.logprobs,
    )
    requests = [_with_prompt(common, prompt) for prompt in _prompts(body.prompt)]
    if common.request_id:  # a running id is refused when it comes again
        requests[1:] = [
            replace(one, request_id=f"{common.request_id}-{index}") for index, one in enumerate(requests[1:], 1)
        ]
    return _call(body, tuple(requests), chat=False)


def chat_name(field: str) -> str:
    """What a chat client calls a domain field."""
    if field in ("input", "chat"):
        return "messages"
    return _COMMON_NAMES.get(field, field.removeprefix("chat."))


def completion_name(field: str) -> str:
    """What a completion client calls a domain field."""
    return _COMPLETION_NAMES.get(field, _COMMON_NAMES.get(field, field))


def _call(body: GenerationBody, requests: tuple[GenerationRequest, ...], *, chat: bool) -> Call:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    return Call(
        requests=requests,
        chat=chat,
        n=1 if body.n is None else body.n,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        with_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


def _common(body: GenerationBody, header_id: str) -> GenerationRequest:
    wishes = body.speculation
    return GenerationRequest(
        request_id=body.request_id or header_id,
        model=body.model,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        seed=body.seed,
        n=body.n,
        priority=-(body.priority or 0),
        traffic_class=body.traffic_class or "",
        timeout_ms=body.timeout_ms,
        speculation=SpeculationChoice()
        if wishes is None
        else SpeculationChoice(
            preference=SpeculationPreference(wishes.preference),
            max_tokens=wishes.max_tokens,
            rule=VerificationRule(wishes.rule),
        ),
    )


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token_id in biases:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10):
            raise InvalidRequest("logit_bias", f"{token_id[:20]!r} is not a token id")
    return tuple((int(token_id), bias) for token_id, bias in biases.items())


def _message(field: str, message: dict[str, Any]) -> ChatMessage:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidRequest(f"{field}.role", "is not text")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value not in _EMPTY:
            raise Unsupported(f"{field}.{name}", "is not offered here")
    return ChatMessage(role=_ROLES.get(role, role), content=_content(f"{field}.content", content))


def _content(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, "is neither text nor a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" and isinstance(kind, str):
            raise Unsupported(f"{field}[{index}].type", f"{kind[:40]!r} is not offered here; only text is")
        if kind is None or not isinstance(text := part.get("text"), str):
            raise InvalidRequest(f"{field}[{index}]", "is no part of type text")
        for name, value in part.items():
            if name not in _PART_FIELDS and value not in _EMPTY:
                raise Unsupported(f"{field}[{index}].{name[:40]}", "is not offered here")
        texts.append(text)
    return "".join(texts)


def _prompts(prompt: Any) -> list[Any]:
    """Each prompt by itself: a text, or a list of ids."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not all(isinstance(one, str) or _is_ids(one) for one in prompt):
        raise InvalidRequest("prompt", "is neither text, nor token ids, nor a list of either")
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest("prompt", f"{len(prompt)} prompts; at least 1 and at most {MAX_PROMPTS} are taken")
    return prompt


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _with_prompt(common: GenerationRequest, prompt: Any) -> GenerationRequest:
    return replace(common, text=prompt) if isinstance(prompt, str) else replace(common, token_ids=tuple(prompt))
