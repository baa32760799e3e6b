"""Domain errors as HTTP statuses and OpenAI error objects: one table, used by every route.

What the table does not know becomes 500 with an opaque id; its text and traceback go to the log
under that id and nowhere else.
"""

import logging
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from outrider.core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    OutriderError,
    Overloaded,
    RequestAborted,
    Unauthenticated,
    Unsupported,
)
from outrider.core.redaction import without_paths

__all__ = ["BodyTooLarge", "Failure", "Rename", "as_response", "failure_of"]

Rename = Callable[[str], str]
"""From the name of a domain field to the name that the client used."""

_logger = logging.getLogger(__name__)

_UNAVAILABLE_RETRY_S = 1.0


class BodyTooLarge(OutriderError):
    """The body of a request is larger than this door reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a request ends when it does not end well."""

    status: int
    kind: str
    """OpenAI's `type`."""
    message: str
    param: str | None = None
    """The field that is wrong."""
    code: str | None = None
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers that belong to the status."""

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    status: int
    kind: str
    code: str | None = None


_INVALID = "invalid_request_error"
_TABLE: Mapping[type[OutriderError], _Row] = {
    Unsupported: _Row(status=400, kind=_INVALID, code="unsupported_parameter"),
    InvalidRequest: _Row(status=400, kind=_INVALID, code="invalid_value"),
    ModelNotFound: _Row(status=404, kind=_INVALID, code="model_not_found"),
    Unauthenticated: _Row(status=401, kind="authentication_error", code="invalid_api_key"),
    DuplicateRequest: _Row(status=409, kind=_INVALID, code="duplicate_request"),
    BodyTooLarge: _Row(status=413, kind=_INVALID, code="body_too_large"),
    Overloaded: _Row(status=429, kind="rate_limit_error", code="rate_limit_exceeded"),
    RequestAborted: _Row(status=499, kind="api_error", code="request_aborted"),
    EngineUnavailable: _Row(status=503, kind="api_error", code="engine_unavailable"),
    DeadlineExceeded: _Row(status=504, kind="timeout_error", code="deadline_exceeded"),
}


def failure_of(error: BaseException, rename: Rename = lambda field: field) -> Failure:
    """The failure of an error. Logs an error that is not in the table, under the id in the message."""
    if isinstance(error, HTTPException):  # no such route, or not with this method
        headers = dict(error.headers or {})  # 405 has to say what is allowed
        return Failure(status=error.status_code, kind=_INVALID, message=error.detail, headers=headers)
    row = next((_TABLE[one] for one in type(error).__mro__ if one in _TABLE), None)
    if row is None:
        incident = uuid.uuid4().hex
        _logger.error("internal error %s", incident, exc_info=error)
        return Failure(status=500, kind="api_error", message=f"internal error {incident}", code="internal_error")
    message, param, retry_after_s = str(error), None, None
    if isinstance(error, InvalidRequest):
        param = rename(error.field)
        message = f"{param}: {error.problem}"
    elif isinstance(error, ModelNotFound):
        param = "model"
    elif isinstance(error, Overloaded):
        retry_after_s = error.retry_after_s
    elif isinstance(error, EngineUnavailable):
        # Its words come from a library or the system, and may name files.
        message, retry_after_s = without_paths(message), _UNAVAILABLE_RETRY_S
    return Failure(
        status=row.status, kind=row.kind, message=message, param=param, code=row.code, retry_after_s=retry_after_s
    )


def as_response(failure: Failure) -> JSONResponse:
    """The whole response, with `Retry-After` (whole seconds) and `retry-after-ms` where it pays to come back.

    Both are rounded up: who comes back early is refused again.
    """
    headers = dict(failure.headers)
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(failure.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(failure.retry_after_s * 1000))
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(failure.body(), status_code=failure.status, headers=headers)
