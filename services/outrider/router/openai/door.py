"""The ASGI application: routes, authentication, and the way of one request through the parts."""

import asyncio
import string
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider import __version__
from outrider.core.caller import Authenticate, caller_of
from outrider.core.errors import ConfigError, EngineUnavailable, ProtocolError
from outrider.core.generation import Caller, GenerationAccepted, TextDelta
from outrider.core.ports import GenerationService
from outrider.router.openai.answer import Answer
from outrider.router.openai.body import read_body, while_connected
from outrider.router.openai.event_stream import DONE, EventStream, as_event
from outrider.router.openai.events import PromptEvent, results_of, stream_of
from outrider.router.openai.failures import as_response, failure_of
from outrider.router.openai.requests import Call, chat_call, chat_name, completion_call, completion_name
from outrider.router.openai.schema import ChatBody, CompletionBody, parse_body
from outrider.router.openai.token_text import TokenBytes, TokenTexts

__all__ = ["DoorOptions", "OpenAIDoor"]

_OFF_LOOP_BYTES = 64 << 10
"""Bodies of at least this size are parsed in a thread: other streams go on meanwhile."""

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorOptions:
    """Limits of the door; those of the fields are the service's own."""

    max_body_bytes: int = 16 << 20
    stalled_timeout_s: float = 30.0
    """A streaming client that reads nothing for this long is cut off."""

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes: {self.max_body_bytes} is below 1")
        if not self.stalled_timeout_s > 0:
            raise ConfigError(f"stalled_timeout_s: {self.stalled_timeout_s} is not above 0")


class OpenAIDoor:
    """Serves a `GenerationService` port over HTTP. `app` is the ASGI application."""

    def __init__(
        self,
        service: GenerationService,
        *,
        tokens: TokenBytes,
        authenticate: Authenticate,
        ready: Callable[[], bool],
        options: DoorOptions | None = None,
        started_at_s: float = 0.0,
    ) -> None:
        """`ready`: whether some engine takes requests; `started_at_s`: the model's `created`, in Unix time."""
        self._service = service
        self._tokens = tokens
        self._authenticate = authenticate
        self._ready = ready
        self._options = options or DoorOptions()
        self._started_at_s = started_at_s
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", _guarded(self._chat, chat_name), methods=["POST"]),
                Route("/v1/completions", _guarded(self._complete, completion_name), methods=["POST"]),
                Route("/v1/models", _guarded(self._models), methods=["GET"]),
                Route("/v1/models/{model:path}", _guarded(self._model), methods=["GET"]),
                Route("/health", _guarded(self._health), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _no_route},
        )

    async def _chat(self, request: Request) -> Response:
        caller = self._caller(request)
        body = await self._parsed(ChatBody, request)
        return await self._answer(chat_call(body, request.headers.get("x-request-id", "")), caller, request)

    async def _complete(self, request: Request) -> Response:
        caller = self._caller(request)
        body = await self._parsed(CompletionBody, request)
        return await self._answer(completion_call(body, request.headers.get("x-request-id", "")), caller, request)

    async def _models(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse({"object": "list", "data": [await self._described("")]})

    async def _model(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse(await self._described(request.path_params["model"]))

    async def _health(self, request: Request) -> Response:
        """Asked by load balancers, which have no key."""
        if not self._ready():
            raise EngineUnavailable("no engine takes requests")
        return JSONResponse({"status": "ok"})

    def _caller(self, request: Request) -> Caller:
        return caller_of(request.headers.items(), self._authenticate)

    async def _described(self, model: str) -> dict[str, Any]:
        info = await self._service.model_info(model)
        return {
            "id": info.model,
            "object": "model",
            "created": int(self._started_at_s),
            "owned_by": "outrider",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def _parsed(self, kind: type[Any], request: Request) -> Any:
        body = await read_body(request.receive, self._options.max_body_bytes, request.headers.get("content-length"))
        if len(body) < _OFF_LOOP_BYTES:
            return parse_body(kind, body)
        return await asyncio.to_thread(parse_body, kind, body)

    async def _answer(self, call: Call, caller: Caller, request: Request) -> Response:
        texts = TokenTexts(self._tokens, as_ids=call.tokens_as_ids)
        if call.stream:
            return await while_connected(request.receive, self._streamed(call, caller, texts))
        results = await while_connected(request.receive, results_of(self._service, call, caller))
        accepted = results[0].accepted
        answer = Answer(call, accepted, texts, __version__)
        return JSONResponse(answer.whole(results), headers=_id_header(accepted.request_id))

    async def _streamed(self, call: Call, caller: Caller, texts: TokenTexts) -> Response:
        """A stream whose request has been admitted: what is refused before has a status of its own."""
        events = stream_of(self._service, call, caller)
        try:
            prompt, accepted = await anext(events)
            if not isinstance(accepted, GenerationAccepted):
                raise ProtocolError("event: the stream did not begin with its acceptance")
            answer = Answer(call, accepted, texts, __version__)
            answer.accept(prompt, accepted)
            return EventStream(
                _chunks(call, answer, events),
                source=events,
                request_id=accepted.request_id,
                headers=_id_header(accepted.request_id),
                stalled_timeout_s=self._options.stalled_timeout_s,
            )
        except BaseException:
            await events.aclose()
            raise


async def _chunks(call: Call, answer: Answer, events: AsyncGenerator[PromptEvent, None]) -> AsyncGenerator[bytes, None]:
    """Server-sent events. An error under way is one as well, since the status has gone out long ago."""
    async with aclosing(events):
        try:
            for chunk in answer.first_chunks():
                yield as_event(chunk)
            async for prompt, event in events:
                if isinstance(event, GenerationAccepted):
                    answer.accept(prompt, event)
                elif isinstance(event, TextDelta):
                    if (shown := answer.delta_chunk(prompt, event)) is not None:
                        yield as_event(shown)
                else:
                    yield as_event(answer.end_chunk(prompt, event))
            if call.include_usage:
                yield as_event(answer.usage_chunk())
        except Exception as error:  # noqa: BLE001 - becomes an event
            yield as_event(failure_of(error, call.rename).body())
        yield DONE


def _id_header(request_id: str) -> dict[str, str]:
    """The id in ASCII, which is all that a header can carry: other characters are percent-encoded."""
    return {"x-request-id": quote(request_id, safe=f"{string.punctuation} ")}


def _guarded(endpoint: Endpoint, rename: Callable[[str], str] = lambda field: field) -> Endpoint:
    """An endpoint whose errors become error objects, here and nowhere else."""

    async def guarded(endpoint: Endpoint, request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:  # noqa: BLE001 - becomes a response
            return as_response(failure_of(error, rename))

    return partial(guarded, endpoint)


async def _no_route(request: Request, error: Exception) -> Response:
    return as_response(failure_of(error))
