"""An ASGI application on a real HTTP server and a free loopback port, inside the test's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp

__all__ = ["http_server"]


@contextlib.asynccontextmanager
async def http_server(app: ASGIApp) -> AsyncIterator[str]:
    """Serve until the block ends; yields the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    # Accepted connections inherit it: a client that reads nothing shows soon.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    # Signals are the test's own.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listener.close()
