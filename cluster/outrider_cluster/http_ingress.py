"""The HTTP door behind Serve's proxy: the same replica answers gRPC and HTTP.

Serve hands a deployment without a web framework a Starlette request and sends the response that it
returns. Here that response is an ASGI application's whole answer, streams included.
"""

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["AsgiAnswer", "closed"]


class AsgiAnswer(Response):
    """A response that an ASGI application gives when it is asked to send itself."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer."""
        await self._app(scope, receive, send)


async def closed(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a door that is not enabled: there is nothing here."""
    await PlainTextResponse("not found", status_code=404)(scope, receive, send)
