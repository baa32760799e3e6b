"""Who calls: identity and trace context from the metadata of a call."""

from collections.abc import Callable, Iterable
from typing import Any

from outrider.core.generation import Caller

__all__ = ["Authenticate", "anonymous", "caller_of"]

Authenticate = Callable[[str], str]
"""Takes the API key of a call (empty without one), returns the key's id. Raises an `OutriderError`."""


def anonymous(api_key: str) -> str:
    """Everybody is the same caller: no keys are configured."""
    return ""


def caller_of(metadata: Iterable[Any] | None, authenticate: Authenticate) -> Caller:
    """The caller named by `authorization: Bearer KEY` or `x-api-key: KEY`, and its `traceparent`."""
    values = {key.lower(): _as_text(value) for key, value in metadata or ()}
    scheme, _, token = values.get("authorization", "").partition(" ")
    api_key = token.strip() if scheme.lower() == "bearer" else values.get("x-api-key", "")
    return Caller(key_id=authenticate(api_key), traceparent=values.get("traceparent", ""))


def _as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
