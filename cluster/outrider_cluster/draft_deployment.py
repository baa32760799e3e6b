"""A draft replica: engine, drafting loop and link server. Its loss costs speed, nothing else."""

import asyncio
import logging
import os
import secrets
from functools import partial
from typing import Any

from ray import serve

from outrider.core.errors import EngineUnavailable
from outrider.draft.config import DraftIdentity
from outrider.draft.drafter import Drafter
from outrider.draft.loop import DraftLoop
from outrider.engine.factory import build_engine
from outrider.engine.sequence_kv import KVCache
from outrider.rpc.link_server import SpeculationServicer
from outrider.rpc.server import RunningServer, ServerOptions, start_server
from outrider.target.builder import MonotonicClock
from outrider.v1.speculation_pb2_grpc import add_SpeculationServiceServicer_to_server
from outrider_cluster.assembly import draft_config, draft_engine_config, draft_model_name
from outrider_cluster.codec import draft_codec
from outrider_cluster.data_plane import ReplicaView
from outrider_cluster.memory import check_start, draft_plan
from outrider_cluster.node import own_address
from outrider_cluster.sections import DraftSettings
from outrider_cluster.settings import Environment, Settings

__all__ = ["DraftReplica"]

_log = logging.getLogger(__name__)

_STOP_S = 5.0


class DraftReplica:
    """A Serve replica. Loads in the background, so that the service is ready without it."""

    def __init__(self) -> None:
        """Starts nothing; `reconfigure` follows before the replica counts as running."""
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        # Targets tell a restarted draft from the one that they knew.
        self._incarnation = secrets.randbits(62) + 1
        self._settings: Settings | None = None
        self._loop: DraftLoop | None = None
        self._servicer: SpeculationServicer | None = None
        self._server: RunningServer | None = None
        self._starting: asyncio.Task[None] | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """The first settings start the draft; others have to fit it."""
        settings = Settings.model_validate(user_config)
        draft = settings.active_draft
        if draft is None:
            raise ValueError("draft: is not enabled")
        if self._settings is None:
            # Read by the OpenMP runtime when torch is loaded, which happens below.
            os.environ["OMP_NUM_THREADS"] = str(draft.threads)
            self._starting = asyncio.create_task(self._start(settings, draft), name="draft-start")
        elif (self._settings.model, self._settings.draft) != (settings.model, settings.draft):
            await self._stop("the draft is being replaced")
            self._starting = asyncio.create_task(self._start(settings, draft), name="draft-start")
        self._settings = settings

    async def describe(self) -> ReplicaView:
        """What the directory says about this replica."""
        address = self._server.address if self._server is not None else None
        problem = "" if address else "the draft is loading"
        return ReplicaView(replica_id=self._replica_id, address=address, epoch=self._incarnation, problem=problem)

    async def check_health(self) -> None:
        """Raises when the start or the drafting thread has failed: Serve replaces the replica then."""
        if self._starting is not None and self._starting.done():
            self._starting.result()
        if self._loop is not None and self._loop.failure is not None:
            raise EngineUnavailable(f"the draft failed: {self._loop.failure}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Load for the autoscaling policy: engines that draft here."""
        return {"load": float(self._servicer.links if self._servicer is not None else 0)}

    async def __del__(self) -> None:
        await self._stop("the draft is shutting down")

    async def _start(self, settings: Settings, draft: DraftSettings) -> None:
        environment = Environment.read()
        codec = await asyncio.to_thread(draft_codec, settings, draft, environment, _log.info)
        await asyncio.to_thread(check_start, draft_plan, settings, environment, _log.info)
        engine = await asyncio.to_thread(build_engine, draft_engine_config(settings, draft, environment), _log.info)
        config = draft_config(settings, draft)
        loop = DraftLoop(
            drafter=Drafter(
                engine=engine,
                kv=KVCache(num_blocks=engine.limits.num_blocks, block_size=engine.limits.block_size),
                identity=DraftIdentity(
                    incarnation=self._incarnation,
                    model=draft_model_name(settings, draft),
                    vocab_size=min(codec.vocab_size, engine.limits.vocab_size),
                    tokenizer_fingerprint=codec.fingerprint(),
                ),
                config=config,
                clock=MonotonicClock(),
            ),
            config=config,
        )
        await asyncio.to_thread(loop.start)
        servicer = self._servicer = SpeculationServicer(loop, auth_token=environment.auth_token)
        self._server = await start_server(
            [partial(add_SpeculationServiceServicer_to_server, servicer)],
            ServerOptions(host=settings.data_plane.host or own_address()),
        )
        self._loop = loop
        _log.info("draft %s serves at %s", self._replica_id, self._server.address)

    async def _stop(self, reason: str) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        server, self._server = self._server, None
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.drain(reason)
            await asyncio.to_thread(loop.stop, _STOP_S)
        if server is not None:
            await server.stop(_STOP_S)
