"""A router over two engines behind real streams, one of which is lost under way. Scripted models."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.contract.rpc_fakes import Servers, TcpProxy, eventually, proxied
from torch import Tensor

from outrider.core.dispatch import EngineHello
from outrider.core.errors import EngineUnavailable
from outrider.core.generation import Caller, ChoiceEnd, GenerationEvent, GenerationRequest, TextDelta
from outrider.core.policy import GateSettings
from outrider.core.ports import Endpoint
from outrider.engine.base import ForwardBatch
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.engine.scripted_text import ScriptedTokenizer
from outrider.router.engine_pool import EnginePool
from outrider.router.limits import RouterLimits
from outrider.router.run import FailoverSettings
from outrider.router.service import RouterService, ServiceSettings
from outrider.router.timing import LoopTime
from outrider.rpc.channel_options import Keepalive
from outrider.rpc.dispatch_client import GrpcEngineSession
from outrider.rpc.dispatch_server import DispatchServicer
from outrider.rpc.server import RunningServer
from outrider.target.builder import build_host
from outrider.target.config import TargetConfig
from outrider.target.host import EngineHost
from outrider.v1.dispatch_pb2_grpc import add_DispatchServiceServicer_to_server

pytestmark = pytest.mark.timeout(60)

CONFIG = ScriptedConfig()
TOKENIZER = ScriptedTokenizer(CONFIG.vocab_size)
KEEPALIVE = Keepalive(time_s=0.3, timeout_s=0.3)
REQUEST = GenerationRequest(text="HELLO", max_tokens=60, seed=7)
BEFORE = 10
"""Steps that the engine to be lost gets."""


class PacedEngine(ScriptedEngine):
    """Takes a step when it is allowed to; freely once `free` is set."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.steps = threading.Semaphore(0)
        self.free = threading.Event()

    def forward(self, batch: ForwardBatch) -> Tensor:
        while not self.free.is_set() and not self.steps.acquire(timeout=0.05):
            pass
        return super().forward(batch)

    def allow(self, steps: int) -> None:
        self.steps.release(steps)


@dataclass(kw_only=True)
class Replica:
    """An engine behind a server."""

    engine: PacedEngine
    host: EngineHost
    server: RunningServer
    endpoint: Endpoint


class World:
    """Replicas, and a router over them."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.replicas: list[Replica] = []
        self.listed: list[Endpoint] = []
        self.pending: list[str] = []
        self.pool = EnginePool(
            directory=self,
            connect=self._connect,
            model="scripted",
            time=LoopTime(),
            refresh_interval_s=0.1,
            pending=lambda: self.pending,
        )
        self.router = RouterService(
            codec=TOKENIZER,
            pool=self.pool,
            limits=RouterLimits(model="scripted", max_model_len=CONFIG.max_model_len),
            time=LoopTime(),
            settings=ServiceSettings(failover=FailoverSettings(grace_s=0.5, rebuild_wait_s=30.0)),
        )

    async def endpoints(self) -> Sequence[Endpoint]:
        return list(self.listed)

    async def add(self, name: str) -> Replica:
        """A new replica; not listed yet."""
        engine = PacedEngine()
        host = build_host(
            engine=engine,
            hello=EngineHello(
                engine_id=name,
                engine_epoch=1,
                model="scripted",
                max_model_len=CONFIG.max_model_len,
                kv_capacity_tokens=CONFIG.num_blocks * CONFIG.block_size,
            ),
            config=TargetConfig(),
            gate_settings=GateSettings(),
            num_valid_ids=CONFIG.vocab_size,
            detokenizers=TOKENIZER.detokenizer,
            transport=None,
            on_failure=lambda cause: None,
        )
        host.start()
        server = await self.servers.start(
            lambda server: add_DispatchServiceServicer_to_server(DispatchServicer(host), server)
        )
        replica = Replica(
            engine=engine, host=host, server=server, endpoint=Endpoint(replica_id=name, address=server.address)
        )
        self.replicas.append(replica)
        return replica

    async def list(self, *endpoints: Endpoint) -> None:
        """What the directory says from now on; returns when the router is connected to all of it."""
        self.listed = list(endpoints)
        await self.pool.refresh()
        ids = {one.replica_id for one in endpoints}
        await eventually(lambda: {one.replica_id for one in self.pool.loads() if one.ready} == ids)

    def stream(self, request: GenerationRequest) -> "Reading":
        return Reading(self.router.stream(request, Caller()))

    async def close(self) -> None:
        await self.router.close()
        for one in self.replicas:
            one.engine.free.set()
            await asyncio.to_thread(one.host.stop, 5.0)

    async def _connect(self, endpoint: Endpoint) -> GrpcEngineSession:
        return await GrpcEngineSession.connect(endpoint.address, "router", 5.0, keepalive=KEEPALIVE)


class Reading:
    """A stream that is read in the background."""

    def __init__(self, events: AsyncIterator[GenerationEvent]) -> None:
        self.events: list[GenerationEvent] = []
        self.task = asyncio.create_task(self._read(events))

    async def _read(self, events: AsyncIterator[GenerationEvent]) -> None:
        async for event in events:
            self.events.append(event)

    def tokens(self, choice_index: int = 0) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, TextDelta) and event.choice_index == choice_index
            for token in event.token_ids
        ]

    async def outcome(self) -> dict[int, tuple[Any, ...]]:
        """All that a client has in the end, by choice: text, ids, log-probabilities, end, usage."""
        async with asyncio.timeout(30):
            await self.task
        choices: dict[int, tuple[Any, ...]] = {}
        for end in (event for event in self.events if isinstance(event, ChoiceEnd)):
            deltas = [
                event
                for event in self.events
                if isinstance(event, TextDelta) and event.choice_index == end.choice_index
            ]
            indices = [event.first_token_index for event in deltas if event.token_ids]
            lengths = [len(event.token_ids) for event in deltas if event.token_ids]
            assert indices == [sum(lengths[:at]) for at in range(len(lengths))]
            choices[end.choice_index] = (
                "".join(event.text for event in deltas),
                self.tokens(end.choice_index),
                [one for event in deltas for one in event.logprobs],
                end.finish,
                end.stop_string,
                (end.usage.prompt_tokens, end.usage.completion_tokens),
            )
        return choices


@pytest.fixture
async def world() -> AsyncIterator[World]:
    servers = Servers()
    made = World(servers)
    await made.router.start()
    yield made
    await made.close()
    await servers.stop()


async def undisturbed(world: World, request: GenerationRequest) -> dict[int, tuple[Any, ...]]:
    """The outcome on an engine of its own."""
    replica = await world.add("alone")
    replica.engine.free.set()
    await world.list(replica.endpoint)
    outcome = await world.stream(request).outcome()
    await world.list()
    return outcome


async def lose_server(replica: Replica, proxy: TcpProxy) -> None:
    await replica.server.stop(0.0)


async def fall_silent(replica: Replica, proxy: TcpProxy) -> None:
    proxy.silence()


async def fail(replica: Replica, proxy: TcpProxy) -> None:
    replica.host.fail("rank 1: its process has died")


@pytest.mark.parametrize("loss", [lose_server, fall_silent, fail])
@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"temperature": 0.0},
        {"n": 3, "top_logprobs": 2},
        {"stop": ("N", "ZZ"), "min_tokens": 14},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "top_k": 9},
    ],
    ids=lambda wishes: "+".join(wishes) or "plain",
)
async def test_a_lost_engine_changes_nothing_that_its_clients_see(
    world: World, wishes: dict[str, Any], loss: Any
) -> None:
    request = replace(REQUEST, **wishes)
    expected = await undisturbed(world, request)
    first, second = await world.add("first"), await world.add("second")
    second.engine.free.set()
    async with proxied(first.server.port) as proxy:
        await world.list(replace(first.endpoint, address=f"127.0.0.1:{proxy.port}"))
        stream = world.stream(request)
        first.engine.allow(BEFORE)
        await eventually(lambda: len(stream.tokens()) == BEFORE)
        await world.list(*world.listed, second.endpoint)
        await loss(first, proxy)
        assert await stream.outcome() == expected
    assert len(expected[0][1]) > BEFORE, "the loss came after the end"
    assert second.engine.num_forwards > 0


async def test_both_engines_may_be_lost_one_after_the_other(world: World) -> None:
    expected = await undisturbed(world, REQUEST)
    replicas = [await world.add(name) for name in ("first", "second", "third")]
    replicas[2].engine.free.set()
    await world.list(replicas[0].endpoint)
    stream = world.stream(REQUEST)
    for at in range(2):
        replicas[at].engine.allow(BEFORE)
        await eventually(lambda at=at: len(stream.tokens()) == (at + 1) * BEFORE)  # type: ignore[misc]
        await world.list(replicas[at].endpoint, replicas[at + 1].endpoint)
        await replicas[at].server.stop(0.0)
    assert await stream.outcome() == expected


async def test_a_rebuilt_engine_takes_its_streams_up_again(world: World) -> None:
    expected = await undisturbed(world, REQUEST)
    first = await world.add("first")
    await world.list(first.endpoint)
    stream = world.stream(REQUEST)
    first.engine.allow(BEFORE)
    await eventually(lambda: len(stream.tokens()) == BEFORE)
    world.pending = ["first: engine is starting (epoch 2)"]
    world.listed = []
    first.host.fail("rank 1: its process has died")
    await eventually(lambda: not world.pool.loads())
    await asyncio.sleep(0.7)  # longer than the grace where nothing is expected
    again = await world.add("first")
    again.engine.free.set()
    world.pending = []
    world.listed = [again.endpoint]
    assert await stream.outcome() == expected


async def test_without_another_engine_the_error_names_the_cause(world: World) -> None:
    first = await world.add("first")
    await world.list(first.endpoint)
    stream = world.stream(REQUEST)
    first.engine.allow(BEFORE)
    await eventually(lambda: len(stream.tokens()) == BEFORE)
    first.host.fail("rank 1: its process has died")
    with pytest.raises(EngineUnavailable, match="rank 1: its process has died"):
        await stream.outcome()
    assert len(stream.tokens()) == BEFORE
    assert world.router.running_requests == 0


async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_running(world: World) -> None:
    first, second = await world.add("first"), await world.add("second")
    await world.list(first.endpoint, second.endpoint)
    streams = [world.stream(REQUEST) for _ in range(4)]
    for one in (first, second):
        one.engine.allow(BEFORE)
    await eventually(lambda: all(one.tokens() for one in streams))
    await first.server.stop(0.0)
    for stream in streams:
        stream.task.cancel()
    await eventually(lambda: not world.router.running_requests)
    second.engine.free.set()
    await eventually(lambda: second.host.status.running == 0 and second.host.status.waiting == 0)
