"""Clients that come and go in masses, and those that fall silent: nothing is left behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import grpc
import grpc.aio
import httpx2 as httpx
import pytest
from tests.contract.rpc_fakes import Servers, eventually, proxied
from tests.support.http_door import http_server
from tests.unit.router.byte_codec import ByteCodec
from tests.unit.router.fakes import World

from outrider.core.dispatch import SequenceSubmit
from outrider.router.openai.door import OpenAIDoor
from outrider.rpc.channel_options import Keepalive
from outrider.rpc.generation_servicer import add_public_services
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.timeout(90)

STREAMS = 120


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    made = Servers()
    yield made
    await made.stop()


@asynccontextmanager
async def endless_text(world: World) -> AsyncIterator[list[SequenceSubmit]]:
    """Give every sequence a token now and then; yields what was submitted."""
    submitted: list[SequenceSubmit] = []

    async def talk() -> None:
        lengths: dict[int, int] = {}
        while True:
            while not world.engine.submits.empty():
                submitted.append(world.engine.submits.get_nowait())
            aborted = set(world.engine.session.aborted)
            for one in submitted:
                if one.stream_key not in aborted:
                    at = lengths.get(one.stream_key, 0)
                    lengths[one.stream_key] = at + 1
                    world.engine.tokens(one, at, 120)
            await asyncio.sleep(0.002)

    talking = asyncio.create_task(talk())
    try:
        yield submitted
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


async def storm(world: World, request: Callable[[int, asyncio.Event], Awaitable[None]]) -> None:
    """Many requests, cancelled at any moment or once text has come; then look at what is left."""
    chance = random.Random(5)
    async with endless_text(world) as submitted:

        async def one(index: int) -> None:
            heard = asyncio.Event()
            task = asyncio.ensure_future(request(index, heard))
            if index % 2:
                await heard.wait()
            else:
                await asyncio.wait([task], timeout=chance.random() * 0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(index) for index in range(STREAMS)))
        await eventually(lambda: not world.service.running_requests)
    while not world.engine.submits.empty():
        submitted.append(world.engine.submits.get_nowait())
    assert submitted, "some got as far as the engine"
    assert sorted(world.engine.session.aborted) == sorted(one.stream_key for one in submitted)
    admission = world.service._admission
    assert (admission.requests, admission.tokens, admission._uses) == (0, 0, {})
    assert not world.pool.link("e0").outstanding


async def test_a_storm_of_cancels_over_grpc(servers: Servers) -> None:
    async with World() as world:
        server = await servers.start(partial(add_public_services, service=world.service))
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = GenerationServiceStub(channel)

            async def stream(index: int, heard: asyncio.Event) -> None:
                spec = pb.GenerationSpec(text="hi", n=1 + index % 3)
                call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=60)
                try:
                    async for _ in call:
                        heard.set()
                finally:
                    call.cancel()

            await storm(world, stream)


async def test_a_storm_of_cancels_over_http() -> None:
    async with World() as world:
        door = OpenAIDoor(world.service, tokens=ByteCodec(), authenticate=lambda key: "", ready=lambda: True)
        limits = httpx.Limits(max_connections=None)
        async with http_server(door.app) as url, httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:

            async def stream(index: int, heard: asyncio.Event) -> None:
                body = {"prompt": "hi", "n": 1 + index % 3, "stream": index % 4 != 0, "max_tokens": 900}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        heard.set()

            await storm(world, stream)


async def test_a_client_that_fell_silent_is_given_up(servers: Servers) -> None:
    async with World() as world:
        server = await servers.start(
            partial(add_public_services, service=world.service), keepalive=Keepalive(time_s=0.2, timeout_s=0.2)
        )
        async with proxied(server.port) as proxy, grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            spec = pb.GenerationSpec(text="hi")
            call = GenerationServiceStub(channel).StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=60)
            first = await call.read()
            assert isinstance(first, pb.StreamGenerateResponse)
            submit = await world.engine.submits.get()
            proxy.silence()
            await eventually(lambda: not world.service.running_requests)
            assert world.engine.session.aborted == [submit.stream_key]
            call.cancel()
