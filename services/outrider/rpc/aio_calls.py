"""Corners of grpc.aio: opening a stream that is written by hand, and saying why a call broke."""

import asyncio
from typing import TypeVar, cast

import grpc
import grpc.aio

from outrider.rpc.malformed import refuse_malformed

__all__ = ["END", "describe", "is_being_cancelled", "open_stream", "read_request"]

END: object = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
"""What `read` returns when the other side has ended the stream well."""

Q = TypeVar("Q")
R = TypeVar("R")


def open_stream(method: "grpc.aio.StreamStreamMultiCallable[Q, R]") -> "grpc.aio.StreamStreamCall[Q, R]":
    """Start a bidirectional call for `read` and `write`. Does not connect yet, and raises nothing."""
    return method(None)  # no iterator: the caller writes by hand


async def read_request(context: "grpc.aio.ServicerContext[Q, R]") -> Q | None:
    """The next message of a stream, on the server's side; None at its end.

    Raises `ProtocolError` for bytes that are no message.
    """
    message: object = await context.read()
    refuse_malformed(message)
    return None if message is END else cast("Q", message)


def describe(error: grpc.aio.AioRpcError) -> str:
    """One line about a broken call."""
    return f"{error.code().name}: {error.details() or 'no details'}"


def is_being_cancelled() -> bool:
    """Whether this task is being cancelled. A call that was cut reads as CancelledError too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
