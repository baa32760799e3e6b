"""A draft with its gRPC server on the loopback, in whatever process runs it."""

import asyncio
import secrets
from functools import partial

from outrider.draft.config import DraftConfig, DraftIdentity
from outrider.draft.drafter import Drafter
from outrider.draft.loop import DraftLoop
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine
from outrider.engine.models.prepare import Progress
from outrider.engine.sequence_kv import KVCache
from outrider.local.codec import load_codec
from outrider.local.draft_handle import DraftLoad
from outrider.local.threads import run_in_thread
from outrider.rpc.link_server import SpeculationServicer
from outrider.rpc.server import RunningServer, start_server
from outrider.target.builder import MonotonicClock
from outrider.v1.speculation_pb2_grpc import add_SpeculationServiceServicer_to_server

__all__ = ["DraftServer"]

_STOP_S = 5.0


class DraftServer:
    """One draft, started and stopped on one event loop. Implements `LocalDraft`."""

    def __init__(self, loop: DraftLoop, drafter: Drafter, kv: KVCache, server: RunningServer) -> None:
        self.address = server.address
        self._loop = loop
        self._drafter = drafter
        self._kv = kv
        self._server = server

    @classmethod
    async def start(cls, engine_config: EngineConfig, config: DraftConfig, progress: Progress) -> "DraftServer":
        """Load the model and serve. Raises `ConfigError` or `CompatibilityError`."""
        codec = await asyncio.to_thread(load_codec, engine_config, progress)
        engine = await asyncio.to_thread(build_engine, engine_config, progress)
        kv = KVCache(num_blocks=engine.limits.num_blocks, block_size=engine.limits.block_size)
        drafter = Drafter(
            engine=engine,
            kv=kv,
            identity=DraftIdentity(
                incarnation=secrets.randbits(62) + 1,
                model=engine_config.model,
                vocab_size=min(codec.vocab_size, engine.limits.vocab_size),
                tokenizer_fingerprint=codec.fingerprint(),
            ),
            config=config,
            clock=MonotonicClock(),
        )
        loop = DraftLoop(drafter=drafter, config=config)
        servicer = SpeculationServicer(loop)
        try:
            await asyncio.to_thread(loop.start)
            server = await start_server([partial(add_SpeculationServiceServicer_to_server, servicer)])
        except BaseException:
            # Nobody else knows of its thread; it may be starting at this moment.
            loop.stop(0.0)
            raise
        return cls(loop, drafter, kv, server)

    async def load(self) -> DraftLoad:
        """What it holds now."""
        return DraftLoad(sequences=self._drafter.num_sequences, kv_usage=self._kv.usage)

    async def stop(self) -> None:
        """End the thread and every link."""
        await run_in_thread(lambda: self._loop.stop(_STOP_S))
        await self._server.stop(0.0)
