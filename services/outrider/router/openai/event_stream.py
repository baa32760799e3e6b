"""Server-sent events as an ASGI response that ends with its client, and cuts one that reads nothing."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.router.openai.body import client_left

__all__ = ["DONE", "EventStream", "as_event"]

_logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
"""OpenAI's last event."""


def as_event(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields. When the client leaves, the generator is closed at once.

    A client that has read nothing for `stalled_timeout_s` is cut off: what it holds here is freed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        source: AsyncGenerator[Any, None],
        request_id: str,
        headers: dict[str, str],
        stalled_timeout_s: float,
    ) -> None:
        """`source`: what `events` reads. Closed here as well: a generator that has not begun closes nothing.

        `request_id`: for the log.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._request_id = request_id
        self._stalled_timeout_s = stalled_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as the client stays for."""
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            await self._events.aclose()
            await self._source.aclose()

    async def _write(self, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in events:
                    async with asyncio.timeout(self._stalled_timeout_s):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            _logger.warning(
                "a client has read nothing for %g s and is cut off",
                self._stalled_timeout_s,
                extra={"request_id": self._request_id},
            )
        except OSError:  # the HTTP server's word for a client that has left
            return
