"""A constant load on one pair in real time: what the software really costs.

Target and draft have a process each; the router and one gRPC client are in this one. Between client,
router, target and draft everything travels by gRPC over loopback, as in a deployment without Ray.
"""

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from outrider.core.dispatch import EngineReport, ReportRequest, SpeculationTotals
from outrider.core.errors import EngineUnavailable
from outrider.core.generation import GenerationRequest, TextDelta
from outrider.core.policy import GateSettings
from outrider.core.ports import Endpoint, EngineSession
from outrider.emulation.pair import MAX_K, TOKENIZER, Load, PairSettings, emulated_request
from outrider.emulation.sample import Sample, sample_of
from outrider.emulation.wall_process import BUSY_QUESTION, draft_process, target_process
from outrider.engine.emulated.clock import WallClock
from outrider.router.engine_pool import EnginePool
from outrider.router.limits import RouterLimits
from outrider.router.service import RouterService
from outrider.router.timing import LoopTime
from outrider.rpc.client import OutriderClient
from outrider.rpc.dispatch_client import GrpcEngineSession
from outrider.rpc.generation_servicer import add_public_services
from outrider.rpc.server import start_server

__all__ = ["run_wall"]

_START_S = 60.0
_STOP_S = 5.0
_CONNECT_S = 5.0


class _OneEngine:
    """Implements `Directory` for a single engine."""

    def __init__(self, address: str) -> None:
        self._endpoint = Endpoint(replica_id="emulated", address=address)

    async def endpoints(self) -> Sequence[Endpoint]:
        """The engine."""
        return [self._endpoint]


class _Streams:
    """The load: one client's streams, and how many tokens they have brought."""

    def __init__(self) -> None:
        self.tokens = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, client: OutriderClient, requests: Sequence[GenerationRequest]) -> None:
        """Open all streams."""
        self._tasks = [asyncio.create_task(self._follow(client, request)) for request in requests]

    async def wait(self, seconds: float) -> None:
        """Let them run for some time. Raises what a stream raises, and `EngineUnavailable` if one ends early."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
            raise EngineUnavailable("a stream ended before it was measured")

    async def stop(self) -> None:
        """Leave all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, client: OutriderClient, request: GenerationRequest) -> None:
        async with contextlib.aclosing(client.stream(request)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    self.tokens += len(event.token_ids)


async def run_wall(settings: PairSettings, gate: GateSettings, load: Load, *, drafts: bool) -> Sample:
    """Run `settings.batch` streams for about as long as the steps take; what happened in that time.

    Committed tokens are those that the client received. Starts and ends its own processes. Raises
    `EngineUnavailable` when one of them does not start, or ends.
    """
    step_s = settings.profile.target.step_s(rows=settings.batch * 8)
    async with _processes(settings, gate, drafts=drafts) as (target_address, ask_busy):
        session = await GrpcEngineSession.connect(target_address, "emulation", _CONNECT_S)
        nonces = count(1)
        streams = _Streams()

        async def sample() -> Sample:
            totals, busy_s = await _totals(session, next(nonces)), await ask_busy()
            return sample_of(totals, seconds=WallClock().now(), draft_busy_s=busy_s, committed=streams.tokens)

        try:
            async with _router(settings, gate, target_address) as client:
                streams.start(client, [_public(settings, load.first_seed + i) for i in range(settings.batch)])
                try:
                    await streams.wait(load.warmup_steps * step_s + 0.5)
                    before = await sample()
                    await streams.wait(load.steps * step_s)
                    return (await sample()).since(before)
                finally:
                    await streams.stop()
        finally:
            session.close()
            await session.wait_closed()


def _public(settings: PairSettings, seed: int) -> GenerationRequest:
    """The same text by the public API."""
    request = emulated_request(settings, seed)
    return GenerationRequest(
        token_ids=request.prompt_token_ids, max_tokens=settings.max_tokens, temperature=0.0, seed=seed
    )


@asynccontextmanager
async def _router(settings: PairSettings, gate: GateSettings, address: str) -> AsyncIterator[OutriderClient]:
    """A router behind its public gRPC server, and a client of it."""
    model = settings.profile.target.name
    pool = EnginePool(
        directory=_OneEngine(address),
        connect=lambda endpoint: GrpcEngineSession.connect(endpoint.address, "router", _CONNECT_S),
        model=model,
        time=LoopTime(),
        gate=gate,
    )
    limits = RouterLimits(model=model, max_model_len=settings.max_model_len, max_num_speculative_tokens=MAX_K)
    router = RouterService(codec=TOKENIZER, pool=pool, limits=limits, time=LoopTime())
    await router.start()
    server = await start_server([lambda server: add_public_services(server, router)])
    try:
        async with OutriderClient(server.address) as client:
            yield client
    finally:
        await server.stop(0.0)
        await router.close()


async def _totals(session: EngineSession, nonce: int) -> SpeculationTotals:
    """The engine's counters, as of its next step."""
    session.send([ReportRequest(nonce=nonce)])
    while True:
        for event in await session.receive():
            if isinstance(event, EngineReport) and event.nonce == nonce:
                return event.status.totals


@asynccontextmanager
async def _processes(
    settings: PairSettings, gate: GateSettings, *, drafts: bool
) -> AsyncIterator[tuple[str, Callable[[], Any]]]:
    """Draft and target, running; the target's address, and a question to the draft."""
    children: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
    context = multiprocessing.get_context("spawn")
    # The children read it when they load torch: threads that share so little work wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    async def start(main: Callable[..., None], *args: object) -> tuple[str, Connection]:
        pipe, theirs = context.Pipe()
        process = context.Process(target=main, args=(*args, theirs), daemon=True)
        process.start()
        theirs.close()
        children.append((process, pipe))
        if not await asyncio.to_thread(pipe.poll, _START_S):
            raise EngineUnavailable(f"{main.__name__} has not started within {_START_S:g} s")
        return await asyncio.to_thread(_received, pipe, main.__name__), pipe

    try:
        draft_address, draft_pipe = await start(draft_process, settings) if drafts else (None, None)
        target_address, _ = await start(target_process, settings, gate, draft_address)

        async def busy_s() -> float:
            if draft_pipe is None:
                return 0.0
            draft_pipe.send(BUSY_QUESTION)
            return float(await asyncio.to_thread(_received, draft_pipe, "the draft"))

        yield target_address, busy_s
    finally:
        for _, pipe in children:
            pipe.close()  # the end of their work
        for process, _ in children:
            await asyncio.to_thread(process.join, _STOP_S)
            if process.is_alive():
                process.kill()


def _received(pipe: Connection, name: str) -> Any:
    """The next message. Raises `EngineUnavailable` when the process has ended."""
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise EngineUnavailable(f"{name} has ended") from error
