"""What Serve gets for an HTTP request: a response that is a whole ASGI application."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from outrider_cluster.http_ingress import AsgiAnswer, closed


async def hello(request: Request) -> Response:
    return PlainTextResponse(f"hello {await request.body()!r}")


async def answer_of(app: ASGIApp, path: str) -> tuple[int, bytes]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"x", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await AsgiAnswer(app)(scope, receive, send)
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)


async def test_the_application_answers_by_itself() -> None:
    app = Starlette(routes=[Route("/hello", hello, methods=["POST"])])
    assert await answer_of(app, "/hello") == (200, b"hello b'x'")
    assert (await answer_of(app, "/other"))[0] == 404


async def test_a_closed_door_has_nothing() -> None:
    assert (await answer_of(closed, "/v1/models"))[0] == 404
