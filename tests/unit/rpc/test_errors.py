"""The table of errors: every domain error has a status, survives it, and nothing else leaks."""

import base64
import logging
from collections.abc import Callable
from functools import partial
from urllib.parse import quote

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from outrider.core import errors
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
from outrider.rpc.errors import RETRY_AFTER, error_of, status_of

CASES = [
    (InvalidRequest("top_p", "2.0 is outside (0, 1]"), grpc.StatusCode.INVALID_ARGUMENT),
    (Unsupported("adapter", "no adapters here"), grpc.StatusCode.UNIMPLEMENTED),
    (ModelNotFound("a", "b"), grpc.StatusCode.NOT_FOUND),
    (DuplicateRequest("r1"), grpc.StatusCode.ALREADY_EXISTS),
    (Overloaded("the queue is full", retry_after_s=1.25), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded("timeout_ms: passed"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (RequestAborted("aborted"), grpc.StatusCode.CANCELLED),
    (EngineUnavailable("rank 1 died"), grpc.StatusCode.UNAVAILABLE),
    (Unauthenticated("the API key is not known here"), grpc.StatusCode.UNAUTHENTICATED),
    (ProtocolError("event: is not set"), grpc.StatusCode.INVALID_ARGUMENT),
    (ConfigError("x: bad"), grpc.StatusCode.FAILED_PRECONDITION),
    (CompatibilityError("vocabularies differ"), grpc.StatusCode.FAILED_PRECONDITION),
]


def details(error: OutriderError) -> Status:
    data = dict(status_of(error).trailing)["grpc-status-details-bin"]
    assert isinstance(data, bytes)
    return Status.FromString(data)


def test_every_domain_error_is_in_the_table() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__} - {OutriderError}
    assert kinds == {type(error) for error, _ in CASES}


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda value: type(value).__name__)
def test_an_error_survives_the_wire(error: OutriderError, code: grpc.StatusCode) -> None:
    status = status_of(error)
    assert status.code == code
    assert status.message == str(error)
    rebuilt = error_of(status.code, status.message, status.trailing)
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    assert vars(rebuilt) == vars(error)


def test_overload_says_when_to_come_back() -> None:
    error = Overloaded("full", retry_after_s=1.25)
    assert dict(status_of(error).trailing)[RETRY_AFTER] == "1250"
    early = Overloaded("full", retry_after_s=0.1204)
    assert dict(status_of(early).trailing)[RETRY_AFTER] == "121", "rounded down, it would be refused again"
    info = RetryInfo()
    assert any(packed.Unpack(info) for packed in details(error).details)
    assert info.retry_delay.ToMilliseconds() == 1250


def test_an_invalid_request_names_the_field_twice() -> None:
    error = InvalidRequest("top_p", "2.0 is outside (0, 1]")
    assert status_of(error).message.startswith("top_p: ")
    bad = BadRequest()
    assert any(packed.Unpack(bad) for packed in details(error).details)
    assert bad.field_violations[0].field == "top_p"


@pytest.mark.parametrize("make", [lambda: RuntimeError("secret of /etc"), lambda: OutriderError("secret of /etc")])
def test_an_unknown_error_shows_an_id_and_nothing_else(
    make: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        try:
            raise make()
        except Exception as error:  # noqa: BLE001 - under test
            status = status_of(error)
    assert status.code == grpc.StatusCode.INTERNAL
    assert "secret" not in status.message
    assert status.trailing == ()
    incident = status.message.split()[-1]
    assert len(incident) == 32
    assert incident in caplog.text
    assert "secret of /etc" in caplog.text
    assert "Traceback" in caplog.text


def test_a_subclass_goes_where_its_base_goes() -> None:
    class Stale(EngineUnavailable):
        pass

    assert status_of(Stale("old")).code == grpc.StatusCode.UNAVAILABLE


def test_long_messages_are_cut() -> None:
    assert len(status_of(ProtocolError("x" * 10_000)).message) == 400
    trailers = status_of(InvalidRequest("stop", "x" * 10_000)).trailing
    assert sum(len(value) for _, value in trailers) < 3000


@pytest.mark.parametrize("character", ["x", "é", "日", "😀", "\ud800"])
@pytest.mark.parametrize("kind", [partial(InvalidRequest, "stop"), EngineUnavailable])
def test_a_long_message_of_any_script_fits_the_trailers(kind: Callable[[str], Exception], character: str) -> None:
    status = status_of(kind(character * 1000))
    sizes = [len(base64.b64encode(value)) for _, value in status.trailing if isinstance(value, bytes)]
    assert sum(sizes) + len(quote(status.message)) < 6000
    assert len(status.message) > 50


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, EngineUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, RequestAborted),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.INTERNAL, OutriderError),
    ],
)
def test_statuses_of_others(code: grpc.StatusCode, kind: type[OutriderError]) -> None:
    """Made by a proxy or by gRPC itself, without our details; or with garbage in their place."""
    assert type(error_of(code, "no luck", ())) is kind
    assert type(error_of(code, "no luck", [("grpc-status-details-bin", b"\xff\xff")])) is kind


@pytest.mark.parametrize(
    "message",
    [
        "The actor died unexpectedly before finishing this task.\n\tclass_name: ServeReplica:outrider:Router",
        "The actor f85e5d23 is unavailable: The actor is temporarily unavailable: RpcError: Socket closed",
    ],
    ids=["its process", "its node"],
)
def test_a_lost_router_is_reason_to_come_back(message: str) -> None:
    """Ray Serve's proxy has no UNAVAILABLE for a call whose router was lost under way."""
    assert type(error_of(grpc.StatusCode.INTERNAL, message, [("request_id", "r1")])) is EngineUnavailable


def test_a_proxy_may_say_when_to_come_back() -> None:
    error = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "slow down", [(RETRY_AFTER, "3000")])
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 3.0


def test_an_error_from_inside_names_no_file() -> None:
    status = status_of(EngineUnavailable("rank 0: no such file: '/models/llama/config.json'"))
    assert status.message == "engine unavailable: rank 0: no such file: '(path)'"
    assert b"/models" not in dict(status.trailing)["grpc-status-details-bin"]
