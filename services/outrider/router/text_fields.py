"""Checks of the text fields of a request: input, labels, stop strings."""

from outrider.core.errors import InvalidRequest
from outrider.core.generation import GenerationRequest
from outrider.router.limits import RouterLimits

__all__ = ["check_input", "check_labels", "check_stop"]

_ROLES = ("system", "user", "assistant")


def check_input(request: GenerationRequest, limits: RouterLimits) -> None:
    """Exactly one input, not empty, not too long to tokenize. Raises `InvalidRequest`."""
    given = [
        name
        for name, value in (("text", request.text), ("chat", request.messages), ("token_ids", request.token_ids))
        if value is not None
    ]
    if len(given) != 1:
        problem = f"{' and '.join(given)} are set" if given else "nothing is set"
        raise InvalidRequest("input", f"{problem}; set exactly one of text, chat, token_ids")
    if request.continue_final_message and request.messages is None:
        raise InvalidRequest("continue_final_message", f"needs chat, but {given[0]} is set")
    if request.text is not None:
        if not request.text:
            raise InvalidRequest("text", "is empty")
        _check_text("text", request.text, limits.max_prompt_chars)
    elif request.token_ids is not None and not request.token_ids:
        raise InvalidRequest("token_ids", "is empty")
    elif request.messages is not None:
        _check_messages(request, limits)


def check_labels(request: GenerationRequest, limits: RouterLimits) -> None:
    """Ids and labels: bounded, and safe to print in a log. Raises `InvalidRequest`."""
    for field, value, limit in (
        ("request_id", request.request_id, limits.max_request_id_chars),
        ("traffic_class", request.traffic_class, limits.max_traffic_class_chars),
    ):
        _check_length(field, value, limit)
        if not value.isprintable():
            raise InvalidRequest(field, "contains a character that is not printable")


def check_stop(request: GenerationRequest, limits: RouterLimits) -> None:
    """Number and size of stop strings and ids. Raises `InvalidRequest`."""
    if len(request.stop) > limits.max_stop_strings:
        raise InvalidRequest("stop", f"{len(request.stop)} strings; the limit is {limits.max_stop_strings}")
    for index, one in enumerate(request.stop):
        if not one:
            raise InvalidRequest(f"stop[{index}]", "is empty")
        _check_text(f"stop[{index}]", one, limits.max_stop_string_chars)
    if len(request.stop_token_ids) > limits.max_stop_token_ids:
        raise InvalidRequest(
            "stop_token_ids", f"{len(request.stop_token_ids)} ids; the limit is {limits.max_stop_token_ids}"
        )


def _check_messages(request: GenerationRequest, limits: RouterLimits) -> None:
    if not request.messages:
        raise InvalidRequest("chat.messages", "is empty; at least 1 is needed")
    for index, one in enumerate(request.messages):
        if one.role not in _ROLES:
            raise InvalidRequest(f"chat.messages[{index}].role", f"{one.role!r} is none of {', '.join(_ROLES)}")
        _check_text(f"chat.messages[{index}].content", one.content, limits.max_prompt_chars)
    total = sum(len(one.content) for one in request.messages)
    if total > limits.max_prompt_chars:
        raise InvalidRequest("chat.messages", f"{total} characters; the limit is {limits.max_prompt_chars}")


def _check_text(field: str, text: str, limit: int) -> None:
    _check_length(field, text, limit)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"character {error.start} is not valid Unicode (a lone surrogate)") from error


def _check_length(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(field, f"{len(text)} characters; the limit is {limit}")
