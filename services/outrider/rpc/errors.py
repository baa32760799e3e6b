"""Domain errors as gRPC statuses and back: one table, used by every server and client.

A status carries its message, the trailers `retry-after-ms` (when to come back) and
`grpc-status-details-bin` (google.rpc.Status with ErrorInfo, and RetryInfo or BadRequest where they
apply). What the table does not know becomes INTERNAL with an opaque id; its text and traceback go
to the log under that id and nowhere else.
"""

import logging
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status as StatusMessage

from outrider.core.errors import (
    CompatibilityError,
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    OutriderError,
    Overloaded,
    ProtocolError,
    RequestAborted,
    Unauthenticated,
    Unsupported,
)
from outrider.core.redaction import without_paths

__all__ = ["RETRY_AFTER", "CallStatus", "Metadatum", "StatusContext", "domain_error", "error_of", "fail", "status_of"]

RETRY_AFTER = "retry-after-ms"
_DETAILS = "grpc-status-details-bin"
_DOMAIN = "outrider"
_ROUTER_LOST = "The actor "
"""How Ray Serve's proxy begins the INTERNAL status of a call whose router was lost under way ("The actor died …")
or whose node was ("The actor ID is unavailable …")."""
_MAX_BYTES = 400  # of one text in UTF-8; all trailers share 8 KiB, and the message takes up to 3 bytes for each

_logger = logging.getLogger(__name__)

E = TypeVar("E", bound=OutriderError)
Metadatum = tuple[str, str | bytes]
"""One key and value of a call's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """How a call ends when it does not end well."""

    code: grpc.StatusCode
    message: str
    trailing: tuple[Metadatum, ...] = ()


class StatusContext(Protocol):
    """The part of a call's context that every door has: grpc.aio's and Ray Serve's alike."""

    def set_code(self, code: grpc.StatusCode) -> Any:
        """Set the status code."""
        ...

    def set_details(self, details: str) -> Any:
        """Set the message."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> Any:
        """Set the trailers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row(Generic[E]):
    """The code of an error class, the facts that travel with it, and how it is rebuilt from them."""

    code: grpc.StatusCode
    facts: Callable[[E], Mapping[str, str]]
    rebuild: Callable[[Mapping[str, str], str], OutriderError]


def _plain(code: grpc.StatusCode, kind: Callable[[str], OutriderError]) -> _Row[OutriderError]:
    return _Row(code=code, facts=lambda error: {}, rebuild=lambda facts, message: kind(message))


def _field_row(code: grpc.StatusCode, kind: Callable[[str, str], OutriderError]) -> _Row[InvalidRequest]:
    return _Row(
        code=code,
        facts=lambda error: {"field": error.field, "problem": error.problem},
        rebuild=lambda facts, message: kind(facts["field"], facts["problem"]),
    )


_MODEL_NOT_FOUND: _Row[ModelNotFound] = _Row(
    code=grpc.StatusCode.NOT_FOUND,
    facts=lambda error: {"model": error.model, "served": error.served},
    rebuild=lambda facts, message: ModelNotFound(facts["model"], facts["served"]),
)
_DUPLICATE: _Row[DuplicateRequest] = _Row(
    code=grpc.StatusCode.ALREADY_EXISTS,
    facts=lambda error: {"request_id": error.request_id},
    rebuild=lambda facts, message: DuplicateRequest(facts["request_id"]),
)
_OVERLOADED: _Row[Overloaded] = _Row(
    code=grpc.StatusCode.RESOURCE_EXHAUSTED,
    facts=lambda error: {"retry_after_s": repr(error.retry_after_s)},
    rebuild=lambda facts, message: Overloaded(message, retry_after_s=float(facts["retry_after_s"])),
)
_UNAVAILABLE: _Row[EngineUnavailable] = _Row(
    code=grpc.StatusCode.UNAVAILABLE,
    facts=lambda error: {"cause": error.cause},
    rebuild=lambda facts, message: EngineUnavailable(facts["cause"]),
)

_TABLE: Mapping[type[OutriderError], _Row[Any]] = {
    InvalidRequest: _field_row(grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
    Unsupported: _field_row(grpc.StatusCode.UNIMPLEMENTED, Unsupported),
    ModelNotFound: _MODEL_NOT_FOUND,
    DuplicateRequest: _DUPLICATE,
    Overloaded: _OVERLOADED,
    DeadlineExceeded: _plain(grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
    RequestAborted: _plain(grpc.StatusCode.CANCELLED, RequestAborted),
    EngineUnavailable: _UNAVAILABLE,
    Unauthenticated: _plain(grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
    ProtocolError: _plain(grpc.StatusCode.INVALID_ARGUMENT, ProtocolError),
    ConfigError: _plain(grpc.StatusCode.FAILED_PRECONDITION, ConfigError),
    CompatibilityError: _plain(grpc.StatusCode.FAILED_PRECONDITION, CompatibilityError),
}
_FROM_INSIDE = frozenset({EngineUnavailable, ConfigError, CompatibilityError})
"""Errors whose words come from a library or the system, and may name files."""
_BY_NAME = {kind.__name__: row for kind, row in _TABLE.items()}


def status_of(error: BaseException) -> CallStatus:
    """The status of an error. Logs an error that is not in the table, under the id in the message."""
    kind = next((one for one in type(error).__mro__ if one in _TABLE), None)
    if kind is None:
        incident = uuid.uuid4().hex
        _logger.error("internal error %s", incident, exc_info=error)
        return CallStatus(code=grpc.StatusCode.INTERNAL, message=f"internal error {incident}")
    row, shown = _TABLE[kind], without_paths if kind in _FROM_INSIDE else str
    message = _cut(shown(str(error)))
    facts = {name: _cut(shown(fact)) for name, fact in row.facts(error).items()}
    details = StatusMessage(code=row.code.value[0], message=message)
    details.details.append(_packed(ErrorInfo(reason=kind.__name__, domain=_DOMAIN, metadata=facts)))
    trailing: list[Metadatum] = []
    if isinstance(error, Overloaded):
        milliseconds = max(math.ceil(error.retry_after_s * 1e3), 0)  # who comes back early is refused again
        delay = Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        details.details.append(_packed(RetryInfo(retry_delay=delay)))
        trailing.append((RETRY_AFTER, str(milliseconds)))
    if isinstance(error, InvalidRequest):
        violation = BadRequest.FieldViolation(field=error.field, description=_cut(error.problem))
        details.details.append(_packed(BadRequest(field_violations=[violation])))
    trailing.append((_DETAILS, details.SerializeToString()))
    return CallStatus(code=row.code, message=message, trailing=tuple(trailing))


def fail(context: StatusContext, error: BaseException) -> None:
    """Put the status of an error on a call. The handler has to return after it: raising loses the trailers."""
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    context.set_trailing_metadata(list(status.trailing))


def error_of(code: grpc.StatusCode, message: str, trailing: Iterable[Metadatum]) -> OutriderError:
    """The domain error behind a status, as a client sees it.

    Exact where an Outrider server made the status; by its code where something in between did.
    """
    metadata = dict(trailing)
    info = _error_info(metadata.get(_DETAILS, b""))
    if info is not None and info.domain == _DOMAIN and info.reason in _BY_NAME:
        return _BY_NAME[info.reason].rebuild(info.metadata, message)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        delay = str(metadata.get(RETRY_AFTER, ""))
        return Overloaded(message, retry_after_s=int(delay) / 1e3 if delay.isdecimal() else 1.0)
    lost = code == grpc.StatusCode.INTERNAL and message.startswith(_ROUTER_LOST)
    if code == grpc.StatusCode.UNAVAILABLE or lost:
        return EngineUnavailable(message)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message)
    if code == grpc.StatusCode.CANCELLED:
        return RequestAborted(message)
    return OutriderError(f"{code.name}: {message}")


def domain_error(error: grpc.aio.AioRpcError) -> OutriderError:
    """The domain error behind a broken call."""
    trailing = cast(Iterable[Metadatum], error.trailing_metadata() or ())
    return error_of(error.code(), error.details() or "", trailing)


def _cut(text: str) -> str:
    """As much of the text as a status can carry, in characters that protobuf takes."""
    return text.encode(errors="replace")[:_MAX_BYTES].decode(errors="ignore")


def _packed(message: ErrorInfo | RetryInfo | BadRequest) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _error_info(data: str | bytes) -> ErrorInfo | None:
    try:
        status = StatusMessage.FromString(data if isinstance(data, bytes) else b"")
    except DecodeError:
        return None
    for packed in status.details:
        info = ErrorInfo()
        if packed.Unpack(info):
            return info
    return None
