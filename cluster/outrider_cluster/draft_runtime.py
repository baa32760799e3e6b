"""A running draft: engine, drafting loop and link server. Knows nothing of Ray."""

import asyncio
import logging
from dataclasses import asdict
from functools import partial

from outrider.core.threads import share_interpreter
from outrider.draft.config import DraftIdentity
from outrider.draft.drafter import Drafter
from outrider.draft.loop import DraftLoop
from outrider.engine.factory import build_engine
from outrider.engine.sequence_kv import KVCache
from outrider.rpc.link_server import SpeculationServicer
from outrider.rpc.server import RunningServer, ServerOptions, start_server
from outrider.target.builder import MonotonicClock
from outrider.telemetry.draft_metrics import DraftReport
from outrider.telemetry.spans import DraftSpans
from outrider.v1.speculation_pb2_grpc import add_SpeculationServiceServicer_to_server
from outrider_cluster.assembly import draft_config, draft_engine_config, draft_model_name, tls_files
from outrider_cluster.codec import draft_codec
from outrider_cluster.memory import sized_draft
from outrider_cluster.sections import DraftSettings
from outrider_cluster.settings import Environment, Settings

__all__ = ["DraftRuntime", "start_draft"]

_log = logging.getLogger(__name__)

_STOP_S = 5.0


class DraftRuntime:
    """What `start_draft` has started."""

    def __init__(
        self, loop: DraftLoop, drafter: Drafter, kv: KVCache, servicer: SpeculationServicer, server: RunningServer
    ) -> None:
        self._loop = loop
        self._drafter = drafter
        self._kv = kv
        self._servicer = servicer
        self._server = server

    @property
    def address(self) -> str:
        """Where targets connect."""
        return self._server.address

    @property
    def links(self) -> int:
        """Targets that are connected."""
        return self._servicer.links

    @property
    def sequences(self) -> int:
        """Sequences open now, over all links. A number of the drafting thread, read without waiting for it."""
        return self._drafter.num_sequences

    @property
    def failure(self) -> Exception | None:
        """What ended the drafting thread; None while it is well."""
        return self._loop.failure

    def report(self) -> DraftReport:
        """The state now. Numbers of the drafting thread, read without waiting for it."""
        return DraftReport(
            ready=self.failure is None,
            links=self.links,
            sequences=self.sequences,
            kv_usage=self._kv.usage,
            step_s=self._drafter.recent_step_s,
            totals=asdict(self._drafter.counters),
        )

    async def stop(self, reason: str) -> None:
        """Tell every target, end the thread, stop the server. Bounded in time."""
        self._loop.drain(reason)
        await asyncio.to_thread(self._loop.stop, _STOP_S)
        await self._server.stop(_STOP_S)


async def start_draft(
    settings: Settings, draft: DraftSettings, *, incarnation: int, host: str, spans: DraftSpans | None = None
) -> DraftRuntime:
    """Load the model and serve on `host`; `spans`: where traces go.

    Raises `ConfigError` or `CompatibilityError` with the cause.
    """
    share_interpreter()
    environment = Environment.read()
    codec = await asyncio.to_thread(draft_codec, settings, draft, environment, _log.info)
    engine_config = draft_engine_config(settings, draft, environment)
    engine_config = await asyncio.to_thread(sized_draft, engine_config, settings, draft, environment, _log.info)
    engine = await asyncio.to_thread(build_engine, engine_config, _log.info)
    config = draft_config(settings, draft)
    kv = KVCache(num_blocks=engine.limits.num_blocks, block_size=engine.limits.block_size)
    drafter = Drafter(
        engine=engine,
        kv=kv,
        identity=DraftIdentity(
            incarnation=incarnation,
            model=draft_model_name(settings, draft),
            vocab_size=min(codec.vocab_size, engine.limits.vocab_size),
            tokenizer_fingerprint=codec.fingerprint(),
        ),
        config=config,
        clock=MonotonicClock(),
        spans=spans,
    )
    loop = DraftLoop(drafter=drafter, config=config)
    servicer = SpeculationServicer(loop, auth_token=environment.auth_token)
    try:
        await asyncio.to_thread(loop.start)
        server = await start_server(
            [partial(add_SpeculationServiceServicer_to_server, servicer)],
            ServerOptions(host=host, tls=tls_files(settings)),
        )
    except BaseException:
        # Nobody else knows of its thread; it may be starting at this moment.
        loop.stop(0.0)
        raise
    return DraftRuntime(loop, drafter, kv, servicer, server)
