"""Requests that must be refused, each for its own reason, and nothing else may come of them."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from outrider.core.errors import InvalidRequest, ModelNotFound, OutriderError
from outrider.core.generation import GenerationRequest
from outrider.local.stack import LocalStack

__all__ = ["BAD_REQUESTS", "BadRequest", "misuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """What a careless client sends."""

    request: GenerationRequest
    error: type[OutriderError]
    field: str
    """Named by the error."""


def _invalid(field: str, request: GenerationRequest) -> BadRequest:
    return BadRequest(request=request, error=InvalidRequest, field=field)


BAD_REQUESTS: Sequence[BadRequest] = (
    _invalid("temperature", GenerationRequest(text="x", temperature=-1.0)),
    _invalid("temperature", GenerationRequest(text="x", temperature=float("nan"))),
    _invalid("top_p", GenerationRequest(text="x", top_p=1.5)),
    _invalid("n", GenerationRequest(text="x", n=10_000)),
    _invalid("max_tokens", GenerationRequest(text="x", max_tokens=1 << 30)),
    _invalid("input", GenerationRequest()),
    _invalid("token_ids", GenerationRequest(token_ids=(1, 1 << 30))),
    _invalid("adapter", GenerationRequest(text="x", adapter="a")),
    BadRequest(request=GenerationRequest(text="x", model="other"), error=ModelNotFound, field="model"),
)


async def misuse(stack: LocalStack, bad: BadRequest) -> str | None:
    """Send one; returns what is wrong with the answer, None when it was refused as it should be."""
    try:
        async with aclosing(stack.stream(bad.request)) as events:
            async for event in events:
                return f"{bad.field}: was answered with {type(event).__name__}"
    except bad.error as error:
        return None if bad.field in str(error) else f"{bad.field}: was refused without its name: {error}"
    except OutriderError as error:
        return f"{bad.field}: was refused as {type(error).__name__}: {error}"
    return f"{bad.field}: was answered with nothing"
