"""Reading a request's body within a limit, and noticing that its client has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from outrider.core.errors import RequestAborted
from outrider.router.openai.failures import BodyTooLarge

__all__ = ["client_left", "read_body", "while_connected"]

T = TypeVar("T")


async def read_body(receive: Receive, limit: int, announced: str | None) -> bytes:
    """The whole body, of at most `limit` bytes; `announced` is its `content-length`.

    Raises `BodyTooLarge` before reading what is too large, and `RequestAborted` when the client leaves.
    """
    if announced is not None and announced.isdecimal() and int(announced[:20]) > limit:
        raise BodyTooLarge(f"body: {announced[:20]} bytes; the limit is {limit}")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted("the client has left")
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge(f"body: more than {limit} bytes")
        if not message.get("more_body", False):
            return bytes(body)


async def client_left(receive: Receive) -> None:
    """Return once the client of a request whose body has been read is gone."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless its client leaves: then it is cancelled, and `RequestAborted` raised."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(client_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestAborted("the client has left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
