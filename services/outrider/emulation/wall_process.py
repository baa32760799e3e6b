"""The processes of a run in real time: a draft and a target, each with its gRPC server on loopback.

A process announces its address through its pipe and then answers questions until it is told to end.
"""

import asyncio
import contextlib
from functools import partial
from multiprocessing.connection import Connection

from outrider.core.dispatch import EngineHello
from outrider.core.policy import GateSettings
from outrider.core.threads import share_interpreter
from outrider.draft.loop import DraftLoop
from outrider.emulation.pair import TOKENIZER, VOCAB_SIZE, EmulatedDraft, PairSettings, greeting
from outrider.engine.emulated.clock import WallClock
from outrider.engine.emulated.engine import EmulatedEngine
from outrider.rpc.dispatch_server import DispatchServicer
from outrider.rpc.link_client import GrpcDraftTransport
from outrider.rpc.link_server import SpeculationServicer
from outrider.rpc.server import start_server
from outrider.target.builder import build_host
from outrider.v1.dispatch_pb2_grpc import add_DispatchServiceServicer_to_server
from outrider.v1.speculation_pb2_grpc import add_SpeculationServiceServicer_to_server

__all__ = ["BUSY_QUESTION", "draft_process", "target_process"]

BUSY_QUESTION = "busy_s"
"""Asks for the device time spent so far; any other message ends the process."""

_STOP_S = 1.0


def draft_process(settings: PairSettings, pipe: Connection) -> None:
    """Main of the draft's process."""
    share_interpreter()
    asyncio.run(_serve_draft(settings, pipe))


def target_process(settings: PairSettings, gate: GateSettings, draft_address: str | None, pipe: Connection) -> None:
    """Main of the target's process; without a draft's address it has none at all."""
    share_interpreter()
    asyncio.run(_serve_target(settings, gate, draft_address, pipe))


async def _serve_draft(settings: PairSettings, pipe: Connection) -> None:
    draft = EmulatedDraft(settings, WallClock())
    loop = DraftLoop(drafter=draft.drafter, config=draft.config)
    await asyncio.to_thread(loop.start)
    servicer = SpeculationServicer(loop)
    server = await start_server([partial(add_SpeculationServiceServicer_to_server, servicer)])
    await _answer(pipe, server.address, draft.engine)
    await asyncio.to_thread(loop.stop, _STOP_S)
    await server.stop(0.0)


async def _serve_target(
    settings: PairSettings, gate: GateSettings, draft_address: str | None, pipe: Connection
) -> None:
    clock = WallClock()
    engine = EmulatedEngine(settings.engine_config(settings.profile.target, drafts=False), clock)
    transport = GrpcDraftTransport(greeting(settings), clock=clock) if draft_address else None
    host = build_host(
        engine=engine,
        hello=EngineHello(
            engine_id="emulated",
            engine_epoch=1,
            model=settings.profile.target.name,
            max_model_len=settings.max_model_len,
            kv_capacity_tokens=engine.limits.num_blocks * engine.limits.block_size,
        ),
        config=settings.target_config,
        gate_settings=gate,
        num_valid_ids=VOCAB_SIZE,
        detokenizers=TOKENIZER.detokenizer,
        transport=transport,
        on_failure=lambda cause: None,  # every session hears of it
        clock=clock,
    )
    server = await start_server([partial(add_DispatchServiceServicer_to_server, DispatchServicer(host))])
    host.start()
    if transport is not None:
        transport.start()
        transport.set_address(draft_address)
    await _answer(pipe, server.address, engine)
    await asyncio.to_thread(host.stop, _STOP_S)
    if transport is not None:
        await transport.stop()
    await server.stop(0.0)


async def _answer(pipe: Connection, address: str, engine: EmulatedEngine) -> None:
    """Say where the server is, and answer until the end; a parent that is gone is an end too."""
    pipe.send(address)
    with contextlib.suppress(EOFError, OSError):
        while await asyncio.to_thread(pipe.recv) == BUSY_QUESTION:
            pipe.send(engine.busy_s)
