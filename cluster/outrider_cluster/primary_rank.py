"""Rank 0: the model's first shard, the engine loop, the data-plane server and the link to a draft."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from random import SystemRandom

from opentelemetry.sdk.trace import TracerProvider

from outrider.core.dispatch import EngineHello
from outrider.core.link import Hello, capabilities
from outrider.engine.base import ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.features import HasFeatures
from outrider.rpc.dispatch_server import DispatchServicer
from outrider.rpc.link_client import GrpcDraftTransport, LinkOptions
from outrider.rpc.link_stream import StreamOptions
from outrider.rpc.server import RunningServer, ServerOptions, start_server
from outrider.target.builder import MonotonicClock, build_host
from outrider.target.draft_assignment import DraftAssignment, DraftOffer
from outrider.target.host import EngineHost
from outrider.target.stall import StallWatch
from outrider.telemetry.engine_metrics import EngineMetrics
from outrider.telemetry.sink import MetricSink, NullSink
from outrider.telemetry.spans import SequenceSpans
from outrider.v1.dispatch_pb2_grpc import add_DispatchServiceServicer_to_server
from outrider_cluster.assembly import gate_settings, target_config, target_engine_config, tls_files
from outrider_cluster.codec import Codec, target_codec
from outrider_cluster.data_plane import EngineIdentity, Meeting, RankPulse
from outrider_cluster.memory import sized_target
from outrider_cluster.observability import Role, provider_for, sequence_observer
from outrider_cluster.settings import Environment, Settings

__all__ = ["PrimaryRank"]

_log = logging.getLogger(__name__)

_STOP_S = 1.0
_FLUSH_MS = 500
_PUBLISH_INTERVAL_S = 1.0


class PrimaryRank:
    """One incarnation of an engine, as its rank 0 process runs it. Used on one event loop."""

    def __init__(
        self,
        settings: Settings,
        identity: EngineIdentity,
        host: str,
        *,
        engine_config: EngineConfig | None = None,
        sink: MetricSink | None = None,
    ) -> None:
        """`host`: address to bind and to publish; `engine_config`: another engine than the settings';
        `sink`: where metrics go. Starts nothing.
        """
        self._settings = settings
        self._environment = Environment.read()
        self._engine_config = engine_config or target_engine_config(settings, self._environment)
        self._identity = identity
        self._host_address = host
        self._rendezvous: object = None
        self._host: EngineHost | None = None
        self._server: RunningServer | None = None
        self._transport: GrpcDraftTransport | None = None
        self._assignment = DraftAssignment(identity.engine_id, SystemRandom())
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[str] = self._loop.create_future()
        self._clock = MonotonicClock()
        timeouts = settings.target.timeouts
        self._stall = StallWatch(limit_s=timeouts.collective_s + timeouts.heartbeat_s, clock=self._clock)
        self._metrics = EngineMetrics(
            sink or NullSink(), {"model_name": settings.model.public_name, "engine": identity.engine_id}
        )
        self._publishing: asyncio.Task[None] | None = None
        self._provider: TracerProvider | None = None

    async def open_meeting(self) -> Meeting:
        """Listen for the other ranks; they are told the result."""
        from outrider.engine.rendezvous import open_rendezvous

        rendezvous = await asyncio.to_thread(
            open_rendezvous,
            host=self._host_address,
            world_size=self._settings.target.tensor_parallel_size,
            timeout_s=self._settings.target.timeouts.collective_s,
        )
        self._rendezvous = rendezvous
        return Meeting(host=rendezvous.host, port=rendezvous.port)

    async def start(self) -> str:
        """Load the model, start engine and server; returns the server's address.

        Raises `ConfigError`, `CompatibilityError` or `EngineUnavailable` with the cause.
        """
        codec = await asyncio.to_thread(target_codec, self._settings, self._environment, _log.info)
        engine = await asyncio.to_thread(self._build_engine)
        self._transport = self._make_transport(engine, codec)
        self._host = build_host(
            engine=engine,
            hello=self._hello(engine),
            config=target_config(self._settings),
            gate_settings=gate_settings(self._settings),
            num_valid_ids=min(codec.vocab_size, engine.limits.vocab_size),
            detokenizers=codec.detokenizer,
            transport=self._transport,
            on_failure=self._from_thread,
            spans=self._spans(),
        )
        servicer = DispatchServicer(self._host, auth_token=self._environment.auth_token)
        self._server = await start_server(
            [partial(add_DispatchServiceServicer_to_server, servicer)],
            ServerOptions(host=self._host_address, tls=tls_files(self._settings)),
        )
        self._host.start()
        if self._transport is not None:
            self._transport.start()
        self._publishing = asyncio.create_task(self._publish(self._host), name="engine-metrics")
        return self._server.address

    async def ended(self) -> str:
        """Wait until the engine has failed; returns why."""
        return await asyncio.shield(self._failure)

    def ping(self) -> RankPulse:
        """Raises `EngineUnavailable` when the engine thread has hung in a step."""
        if self._host is None:
            return RankPulse()
        self._stall.check(self._host.heartbeat)
        return RankPulse(load=self._host.load)

    def set_drafts(self, offers: Sequence[DraftOffer]) -> None:
        """The drafts to choose from, as one look has found them: choose, and stay or move."""
        if self._transport is not None:
            self._transport.set_addresses(self._assignment.look(offers, self._transport.linked))

    async def drain(self) -> None:
        """Take no more sequences, and return when those that run have ended. The caller bounds the wait."""
        if self._host is not None:
            drained = asyncio.Event()
            self._host.drain(partial(self._set_from_thread, drained))
            await drained.wait()

    async def leave(self, cause: str) -> None:
        """Tell every router why this engine ends, and stop serving. Bounded in time."""
        if self._host is not None:
            self._host.fail(cause)
        if self._provider is not None:
            await asyncio.to_thread(self._provider.force_flush, _FLUSH_MS)
        if self._server is not None:
            # The grace lets the failure reach the routers before their streams are cut.
            await self._server.stop(_STOP_S)

    def _set_from_thread(self, event: asyncio.Event) -> None:
        self._loop.call_soon_threadsafe(event.set)

    def _from_thread(self, cause: str) -> None:
        self._loop.call_soon_threadsafe(self._note_failure, cause)

    def _note_failure(self, cause: str) -> None:
        if not self._failure.done():
            self._failure.set_result(cause)

    def _build_engine(self) -> ModelEngine:
        config = self._engine_config
        if config == target_engine_config(self._settings, self._environment):
            config = sized_target(config, self._settings, self._environment, _log.info)
        if self._rendezvous is None:
            from outrider.engine.factory import build_engine

            return build_engine(config, _log.info)
        from outrider.engine.rendezvous import Rendezvous
        from outrider.engine.tensor_parallel import build_primary

        if not isinstance(self._rendezvous, Rendezvous):
            raise TypeError(type(self._rendezvous).__name__)
        return build_primary(config, self._rendezvous, _log.info)

    def _spans(self) -> SequenceSpans:
        telemetry, engine_id = self._settings.telemetry, self._identity.engine_id
        self._provider = provider_for(telemetry, Role.TARGET, engine_id)
        return sequence_observer(self._provider, telemetry, engine_id)

    async def _publish(self, host: EngineHost) -> None:
        while True:
            self._metrics.publish(host.status, engine_epoch=self._identity.epoch, hops_s=host.take_hops())
            await asyncio.sleep(_PUBLISH_INTERVAL_S)

    def _hello(self, engine: ModelEngine) -> EngineHello:
        limits = engine.limits
        return EngineHello(
            engine_id=self._identity.engine_id,
            engine_epoch=self._identity.epoch,
            model=self._settings.model.public_name,
            max_model_len=limits.max_model_len,
            kv_capacity_tokens=limits.num_blocks * limits.block_size,
        )

    def _make_transport(self, engine: ModelEngine, codec: Codec) -> GrpcDraftTransport | None:
        if self._settings.active_draft is None:
            return None
        config = target_config(self._settings)
        hello = Hello(
            engine_id=self._identity.engine_id,
            engine_epoch=self._identity.epoch,
            link_id=0,
            target_model=self._settings.model.public_name,
            vocab_size=codec.vocab_size,
            tokenizer_fingerprint=codec.fingerprint(),
            max_num_draft_tokens=config.max_draft_tokens_limit,
            max_model_len=engine.limits.max_model_len,
            max_num_seqs=config.max_num_seqs,
            capabilities=capabilities(stores_features=isinstance(engine, HasFeatures) and engine.features is not None),
            auth_token=self._environment.auth_token,
        )
        options = LinkOptions(stream=StreamOptions(tls=tls_files(self._settings)))
        return GrpcDraftTransport(hello, clock=self._clock, options=options)
