"""The public API over real servers: both doors, errors, leaving, resuming, health."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.contract.rpc_fakes import HealthOnly, Servers, eventually

from outrider.core.dispatch import EngineStatus, SpeculationOutcome, Timings
from outrider.core.errors import (
    ConfigError,
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    OutriderError,
    Overloaded,
    RequestAborted,
    Unsupported,
)
from outrider.core.generation import (
    Caller,
    ChoiceEnd,
    GenerationAccepted,
    GenerationEvent,
    GenerationRequest,
    ModelDescription,
    TextDelta,
    Usage,
)
from outrider.core.sequence import Finish, FinishReason
from outrider.core.verdict import TokenLogprobs
from outrider.rpc.backoff import BackoffOptions
from outrider.rpc.client import ClientOptions, OutriderClient
from outrider.rpc.generation_handlers import GenerationHandlers
from outrider.rpc.generation_servicer import PUBLIC_SERVICES, add_public_services
from outrider.rpc.health import Health
from outrider.rpc.ingress import add_health_service
from outrider.rpc.server import RunningServer
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.timeout(60)

MODEL = ModelDescription(
    model="m",
    max_model_len=100,
    vocab_size=50,
    eos_token_ids=(0,),
    max_num_speculative_tokens=7,
    max_choices=16,
    max_top_logprobs=20,
    unsupported_fields=("adapter",),
    server_version="0.1.0",
)
Behaviour = Callable[[GenerationRequest], AsyncIterator[GenerationEvent]]


class ScriptedService:
    """Counts: token i of the output is i, its text is "<i>". `behave` replaces that for one test."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.callers: list[Caller] = []
        self.closed = 0
        self.aborted: list[tuple[str, Caller]] = []
        self.behave: Behaviour = count
        self.problem: Exception | None = None

    async def stream(self, request: GenerationRequest, caller: Caller) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.callers.append(caller)
        try:
            async for event in self.behave(request):
                yield event
        finally:
            self.closed += 1

    async def abort(self, request_id: str, caller: Caller) -> bool:
        self.aborted.append((request_id, caller))
        return request_id == "known"

    async def model_info(self, model: str) -> ModelDescription:
        if model not in ("", "m"):
            raise ModelNotFound(model, "m")
        return MODEL

    async def speculation_status(self) -> Sequence[EngineStatus]:
        if self.problem is not None:
            raise self.problem
        return (EngineStatus(engine_id="e", ready=True),)


def accepted(request: GenerationRequest) -> GenerationAccepted:
    seed = 42 if request.seed is None else request.seed
    return GenerationAccepted(request_id=request.request_id or "made", model="m", seed=seed, prompt_tokens=3)


def delta(index: int, *, choice: int = 0, logprobs: bool = False) -> TextDelta:
    return TextDelta(
        choice_index=choice,
        first_token_index=index,
        text=f"<{index}>",
        token_ids=(index,),
        logprobs=(TokenLogprobs(logprob=-0.5, top=((index, -0.5),)),) if logprobs else (),
        seed=42,
    )


def end(completion_tokens: int, choice: int = 0, stop_string: str | None = None) -> ChoiceEnd:
    return ChoiceEnd(
        choice_index=choice,
        finish=Finish(
            reason=FinishReason.STOP if stop_string else FinishReason.LENGTH,
            stop_string_index=1 if stop_string else None,
        ),
        stop_string=stop_string,
        usage=Usage(prompt_tokens=3, completion_tokens=completion_tokens),
        timings=Timings(total_s=0.5),
        speculation=SpeculationOutcome(),
    )


async def count(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
    yield accepted(request)
    first = len(request.resume_token_ids)
    for index in range(first, request.max_tokens or 0):
        yield delta(index, logprobs=request.top_logprobs is not None)
    yield end((request.max_tokens or 0) - first)


async def forever(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
    yield accepted(request)
    yield delta(0)
    await asyncio.Event().wait()


def failing(*errors: Exception, after: int = 0) -> Behaviour:
    """Each attempt in turn delivers `after` tokens and fails with the next error; then all goes well."""
    left = list(errors)

    async def behave(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        if not left:
            async for event in count(request):
                yield event
            return
        first = len(request.resume_token_ids)
        if after:
            yield accepted(request)
        for index in range(first, first + after):
            yield delta(index)
        raise left.pop(0)

    return behave


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    await servers.stop()


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def server(servers: Servers, service: ScriptedService) -> RunningServer:
    return await servers.start(lambda server: add_public_services(server, service, lambda key: f"id:{key}"))


OPTIONS = ClientOptions(api_key="k", backoff=BackoffOptions(initial_s=0.01, max_s=0.02))


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[OutriderClient]:
    async with OutriderClient(server.address, OPTIONS) as client:
        yield client


async def test_a_stream(client: OutriderClient, service: ScriptedService) -> None:
    request = GenerationRequest(text="hi", max_tokens=3, top_logprobs=0, temperature=0.5, stop=("x", "y"))
    events = [event async for event in client.stream(request)]
    assert events == [accepted(request), *(delta(index, logprobs=True) for index in range(3)), end(3)]
    assert service.requests == [request]
    assert service.callers == [Caller(key_id="id:k")]
    assert service.closed == 1


async def test_a_whole_answer(client: OutriderClient, server: RunningServer, service: ScriptedService) -> None:
    async def two(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        yield accepted(request)
        for index in range(2):
            for choice in (1, 0):
                yield delta(index, choice=choice, logprobs=True)
        yield end(2, choice=1, stop_string="y")
        yield end(2)

    service.behave = two
    request = GenerationRequest(text="hi", n=2, stop=("x", "y"))
    result = await client.generate(request)
    assert [choice.text for choice in result.choices] == ["<0><1>", "<0><1>"]
    assert result.choices[1].end == end(2, choice=1, stop_string="y")
    assert result.usage == Usage(prompt_tokens=3, completion_tokens=4)
    async with grpc.aio.insecure_channel(server.address) as channel:
        response = await GenerationServiceStub(channel).Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="hi")))
    assert [choice.text for choice in response.choices] == ["<0><1>", "<0><1>"]
    assert [len(choice.logprobs) for choice in response.choices] == [2, 2]
    assert response.choices[1].final.stop_string == "y"
    assert response.usage.completion_tokens == 4
    assert response.request_id == "made"


async def test_the_short_calls(client: OutriderClient, service: ScriptedService) -> None:
    assert await client.abort("known")
    assert not await client.abort("unknown")
    assert service.aborted == [("known", Caller(key_id="id:k")), ("unknown", Caller(key_id="id:k"))]
    assert await client.model_info() == MODEL
    assert await client.speculation_status() == (EngineStatus(engine_id="e", ready=True),)
    with pytest.raises(ModelNotFound) as caught:
        await client.model_info("other")
    assert (caught.value.model, caught.value.served) == ("other", "m")
    with pytest.raises(InvalidRequest, match="request_id"):
        await client.abort("")
    service.problem = Overloaded("busy", retry_after_s=2.5)
    with pytest.raises(Overloaded) as busy:
        await client.speculation_status()
    assert busy.value.retry_after_s == 2.5


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("top_p", "2.0 is outside (0, 1]"),
        Unsupported("adapter", "no adapters here"),
        DuplicateRequest("r"),
        Overloaded("full", retry_after_s=0.5),
        DeadlineExceeded("timeout_ms: passed"),
        EngineUnavailable("rank 1 died"),
        RequestAborted("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("after", [0, 1])
async def test_errors_arrive_as_what_they_were(
    client: OutriderClient, service: ScriptedService, error: OutriderError, after: int
) -> None:
    service.behave = failing(error, after=after)
    with pytest.raises(type(error)) as caught:
        await client.generate(GenerationRequest(text="hi", max_tokens=5))
    assert str(caught.value) == str(error)


async def test_a_bug_shows_an_opaque_id_only(
    client: OutriderClient, service: ScriptedService, server: RunningServer
) -> None:
    service.behave = failing(ZeroDivisionError("secret"), ZeroDivisionError("secret"))
    with pytest.raises(OutriderError, match=r"^INTERNAL: internal error [0-9a-f]{32}$"):
        await client.generate(GenerationRequest(text="hi"))
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GenerationServiceStub(channel).Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="hi")))
    assert "secret" not in str(caught.value)


async def test_a_request_without_spec(server: RunningServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GenerationServiceStub(channel).Generate(pb.GenerateRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "spec: is not set"


async def test_leaving_a_stream_aborts_the_request(client: OutriderClient, service: ScriptedService) -> None:
    service.behave = forever
    async with aclosing(client.stream(GenerationRequest(text="hi"))) as events:
        assert isinstance(await anext(events), GenerationAccepted)
    await eventually(lambda: service.closed == 1)


async def test_a_cancelled_whole_answer_aborts_the_request(server: RunningServer, service: ScriptedService) -> None:
    service.behave = forever
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="hi")))
        await eventually(lambda: len(service.requests) == 1)
        call.cancel()
        await eventually(lambda: service.closed == 1)


async def test_a_deadline_aborts_the_request(client: OutriderClient, service: ScriptedService) -> None:
    service.behave = forever
    with pytest.raises(DeadlineExceeded):
        await client.generate(GenerationRequest(text="hi"), timeout_s=0.3)
    await eventually(lambda: service.closed == 1)


async def test_a_client_that_is_closed_says_so(server: RunningServer, service: ScriptedService) -> None:
    service.behave = forever
    client = OutriderClient(server.address)
    running = asyncio.create_task(client.generate(GenerationRequest(text="hi")))
    await eventually(lambda: len(service.requests) == 1)
    await client.close()
    with pytest.raises(RequestAborted):
        await running
    await eventually(lambda: service.closed == 1)


async def test_a_broken_stream_is_resumed_behind_its_last_token(
    client: OutriderClient, service: ScriptedService
) -> None:
    service.behave = failing(EngineUnavailable("one"), DuplicateRequest("made"), EngineUnavailable("two"), after=2)
    request = GenerationRequest(text="hi", max_tokens=9)
    result = await client.generate(request, resume=True)
    assert result.choices[0].token_ids == tuple(range(9))
    assert result.choices[0].text == "".join(f"<{index}>" for index in range(9))
    assert result.usage.completion_tokens == 9
    assert [one.resume_token_ids for one in service.requests] == [(), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]
    assert [one.seed for one in service.requests] == [None, 42, 42, 42]
    assert [one.request_id for one in service.requests] == ["", "made", "made", "made"]


async def test_a_server_that_restarts_in_the_middle(servers: Servers, service: ScriptedService) -> None:
    def add(server: grpc.aio.Server) -> None:
        add_public_services(server, service)

    service.behave = forever
    first = await servers.start(add)
    async with OutriderClient(first.address, OPTIONS) as client:
        stream = client.stream(GenerationRequest(text="hi", max_tokens=4), resume=True)
        async with aclosing(stream) as events:
            seen = [await anext(events), await anext(events)]
            await first.stop()
            service.behave = count
            await servers.start(add, port=first.port)
            seen += [event async for event in events]
    tokens = [token for event in seen if isinstance(event, TextDelta) for token in event.token_ids]
    assert tokens == [0, 1, 2, 3]
    assert sum(isinstance(event, GenerationAccepted) for event in seen) == 1


async def test_resuming_gives_up_after_attempts_without_progress(
    server: RunningServer, service: ScriptedService
) -> None:
    service.behave = failing(*[EngineUnavailable("down")] * 10)
    options = ClientOptions(max_resumes=3, backoff=OPTIONS.backoff)
    async with OutriderClient(server.address, options) as client:
        with pytest.raises(EngineUnavailable):
            await client.generate(GenerationRequest(text="hi"), resume=True)
    assert len(service.requests) == 4


async def test_without_resume_nothing_is_repeated(client: OutriderClient, service: ScriptedService) -> None:
    service.behave = failing(EngineUnavailable("down"), after=1)
    with pytest.raises(EngineUnavailable, match="down"):
        await client.generate(GenerationRequest(text="hi", max_tokens=3))
    assert len(service.requests) == 1


async def test_a_duplicate_is_no_break(client: OutriderClient, service: ScriptedService) -> None:
    service.behave = failing(DuplicateRequest("mine"))
    with pytest.raises(DuplicateRequest):
        await client.generate(GenerationRequest(request_id="mine", text="hi"), resume=True)
    with pytest.raises(InvalidRequest, match=r"^n:"):
        await client.generate(GenerationRequest(text="hi", n=2), resume=True)


# --- the other door: a class with only set_code, set_details and set_trailing_metadata ---------


class IngressContext:
    """As much of a context as Ray Serve's gRPC ingress gives."""

    def __init__(self, metadata: list[tuple[str, str]] | None = None) -> None:
        self._metadata = metadata or []
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: list[tuple[str, Any]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        self.trailing = trailing_metadata


class Ingress:
    """What a Serve deployment class looks like."""

    def __init__(self, service: ScriptedService) -> None:
        self._handlers = GenerationHandlers(service)

    async def Generate(self, request: pb.GenerateRequest, grpc_context: IngressContext) -> pb.GenerateResponse:
        return await self._handlers.generate(request, grpc_context)

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, grpc_context: IngressContext
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        async with aclosing(self._handlers.stream_generate(request, grpc_context)) as responses:
            async for response in responses:
                yield response


async def test_the_same_handlers_behind_an_ingress(service: ScriptedService) -> None:
    ingress = Ingress(service)
    context = IngressContext([("x-api-key", "k"), ("traceparent", "00-1-2-01")])
    spec = pb.GenerationSpec(text="hi", max_tokens=2)
    responses = [one async for one in ingress.StreamGenerate(pb.StreamGenerateRequest(spec=spec), context)]
    assert [one.WhichOneof("event") for one in responses] == ["accepted", "delta", "delta", "final"]
    assert service.callers == [Caller(traceparent="00-1-2-01")]
    assert context.code is None


async def test_an_ingress_returns_with_the_status_set(service: ScriptedService) -> None:
    service.behave = failing(Overloaded("full", retry_after_s=1.0), after=1)
    ingress, context = Ingress(service), IngressContext()
    request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="hi"))
    responses = [one async for one in ingress.StreamGenerate(request, context)]
    assert len(responses) == 2
    assert context.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(context.trailing)["retry-after-ms"] == "1000"
    second = IngressContext()
    assert await ingress.Generate(pb.GenerateRequest(), second) == pb.GenerateResponse()
    assert second.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_ingress_that_closes_its_generator_aborts_the_request(service: ScriptedService) -> None:
    service.behave = forever
    request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="hi"))
    stream = Ingress(service).StreamGenerate(request, IngressContext())
    await anext(stream)
    await stream.aclose()
    assert service.closed == 1


# --- health, start and stop --------------------------------------------------------------------


async def test_health(servers: Servers) -> None:
    health = Health(PUBLIC_SERVICES)
    server = await servers.start(lambda server: add_health_service(HealthOnly(health), server))
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service=PUBLIC_SERVICES[0])
        assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = stub.Watch(ask)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        health.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        health.set_serving(True)
        health.set_serving(False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        listed = await stub.List(health_pb2.HealthListRequest())
        assert set(listed.statuses) == {"", *PUBLIC_SERVICES}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody" + "y" * 100_000))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert "'nobodyyy" in (caught.value.details() or "")
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


async def test_stop_lets_running_calls_end(servers: Servers, service: ScriptedService) -> None:
    release = asyncio.Event()

    async def waits(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        yield accepted(request)
        await release.wait()
        yield delta(0)
        yield end(1)

    service.behave = waits
    server = await servers.start(lambda server: add_public_services(server, service))
    async with OutriderClient(server.address) as client:
        running = asyncio.create_task(client.generate(GenerationRequest(text="hi")))
        await eventually(lambda: len(service.requests) == 1)
        stopping = asyncio.create_task(server.stop(grace_s=20.0))
        await asyncio.sleep(0)
        release.set()
        assert (await running).usage.completion_tokens == 1
        await stopping


async def test_a_taken_port_is_an_error(servers: Servers, service: ScriptedService) -> None:
    def add(server: grpc.aio.Server) -> None:
        add_public_services(server, service)

    server = await servers.start(add)
    with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{server.port}"):
        await servers.start(add, port=server.port)
