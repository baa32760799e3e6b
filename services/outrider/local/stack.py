"""The stack itself: engine thread and router in this process, the draft beside it, always cleaned up."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import count

from outrider.core.dispatch import EngineHello, EngineReport, EngineStatus, ReportRequest
from outrider.core.generation import Caller, GenerationEvent, GenerationRequest
from outrider.core.link import Hello, capabilities
from outrider.core.ports import Clock, Endpoint, EngineSession
from outrider.core.result import GenerationResult, collect
from outrider.engine.base import ModelEngine
from outrider.engine.factory import build_engine
from outrider.engine.models.prepare import Progress
from outrider.local.codec import Codec, check_vocabularies, load_codec
from outrider.local.config import LocalSettings
from outrider.local.draft_handle import DraftLoad, LocalDraft
from outrider.local.draft_process import ChildDraft
from outrider.local.draft_server import DraftServer
from outrider.local.threads import run_in_thread
from outrider.local.watched_link import WatchedLink
from outrider.router.engine_pool import EnginePool
from outrider.router.limits import AdmissionLimits, RouterLimits
from outrider.router.run import FailoverSettings
from outrider.router.service import RouterService, ServiceSettings
from outrider.router.timing import LoopTime
from outrider.rpc.link_client import GrpcDraftTransport
from outrider.target.builder import MonotonicClock, build_host
from outrider.target.host import EngineHost

__all__ = ["LocalStack", "local_stack", "silent", "start_draft"]

_STOP_S = 10.0
_ENGINE_ID = "local"
_TIMEOUT_MS = 24 * 3_600_000
_MAX_REQUESTS = 1 << 20  # whoever calls is the only user


def silent(text: str) -> None:
    """A `Progress` that shows nothing."""


class LocalStack:
    """One engine behind one router. Used on the event loop that started it.

    The engine itself belongs to the caller and outlives the stack, so that several stacks can use
    it in turn; only one of them may have work at a time.
    """

    def __init__(
        self,
        settings: LocalSettings,
        *,
        engine: ModelEngine,
        codec: Codec,
        draft: LocalDraft | None,
        clock: Clock | None = None,
    ) -> None:
        """`clock`: what the engine thread reads instead of the machine's monotonic time."""
        self.settings = settings
        self.codec = codec
        self.draft = draft
        """The draft that it was given; it belongs to the caller as well."""
        self._transport: GrpcDraftTransport | None = None
        self._link: WatchedLink | None = None
        if draft is not None:
            self._transport = GrpcDraftTransport(_greeting(settings, engine, codec), clock=MonotonicClock())
            self._link = WatchedLink(self._transport)
        self._host = build_host(
            engine=engine,
            hello=_hello(settings, engine),
            config=settings.loop,
            gate_settings=settings.gate,
            num_valid_ids=min(codec.vocab_size, engine.limits.vocab_size),
            detokenizers=codec.detokenizer,
            transport=self._link,
            on_failure=silent,  # every session hears of it
            clock=clock,
        )
        self.service = _router(settings, engine, codec, self._host)
        """What a public server would serve."""
        self._session: EngineSession | None = None
        self._nonces = count(1)

    async def start(self) -> None:
        """Start the engine thread and the router, and wait for the draft.

        Raises `EngineUnavailable` when the draft does not answer.
        """
        self._session = self._host.connect("observer")
        self._host.start()
        await self.service.start()
        if self._transport is not None and self._link is not None and self.draft is not None:
            self._transport.start()
            self._transport.set_address(self.draft.address)
            await self._link.wait_up(self.settings.start_timeout_s)

    async def close(self) -> None:
        """End what runs and stop. Idempotent."""
        await self.service.close()
        if self._session is not None:
            self._session.close()
        await run_in_thread(lambda: self._host.stop(_STOP_S))
        if self._transport is not None:
            await self._transport.stop()

    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request. Closing the iterator aborts it. Raises `OutriderError`s."""
        return self.service.stream(request, Caller())

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run a request to its end."""
        async with aclosing(self.service.stream(request, Caller())) as events:
            return await collect(events)

    async def abort(self, request_id: str) -> bool:
        """End a running request; False when there is none of this id."""
        return await self.service.abort(request_id, Caller())

    async def status(self) -> EngineStatus:
        """The engine's counters as of now. Raises `EngineUnavailable`."""
        if self._session is None:
            return self._host.status
        nonce = next(self._nonces)
        self._session.send([ReportRequest(nonce=nonce)])
        while True:
            for event in await self._session.receive():
                if isinstance(event, EngineReport) and event.nonce == nonce:
                    return event.status

    async def speculation_status(self) -> Sequence[EngineStatus]:
        """As `OutriderClient.speculation_status`, of the one engine."""
        return [await self.status()]

    async def draft_load(self) -> DraftLoad | None:
        """What the draft holds; None without a draft."""
        return None if self.draft is None else await self.draft.load()


@asynccontextmanager
async def local_stack(settings: LocalSettings, progress: Progress = silent) -> AsyncIterator[LocalStack]:
    """Build and start everything; end all of it whatever happens inside.

    Raises `ConfigError`, `CompatibilityError` or `EngineUnavailable` naming what does not work.
    """
    if settings.draft is not None:
        await asyncio.to_thread(check_vocabularies, settings.target, settings.draft, progress)
    codec = await asyncio.to_thread(load_codec, settings.target, progress)
    engine = await asyncio.to_thread(build_engine, settings.target, progress)
    async with AsyncExitStack() as parts:
        parts.callback(engine.close)
        draft = await start_draft(settings, progress)
        if draft is not None:
            parts.push_async_callback(draft.stop)
        stack = LocalStack(settings, engine=engine, codec=codec, draft=draft)
        parts.push_async_callback(stack.close)
        await stack.start()
        yield stack


async def start_draft(settings: LocalSettings, progress: Progress) -> LocalDraft | None:
    """Start the draft that the settings name: a process for a real model, else a thread. None without one.

    Raises `ConfigError`, `CompatibilityError` or `EngineUnavailable`.
    """
    config = settings.draft
    if config is None:
        return None
    if config.kind not in ("torch", "eagle3"):
        return await DraftServer.start(config, settings.drafting, progress)
    progress(f"starting the draft {config.model}")
    return await ChildDraft.start(config, settings.drafting, settings.start_timeout_s)


class _OneEngine:
    """Implements `Directory` for the engine of this process."""

    async def endpoints(self) -> Sequence[Endpoint]:
        """The engine, which has no address."""
        return [Endpoint(replica_id=_ENGINE_ID, address="this process")]


def _router(settings: LocalSettings, engine: ModelEngine, codec: Codec, host: EngineHost) -> RouterService:
    async def connect(endpoint: Endpoint) -> EngineSession:
        return host.connect("router")

    pool = EnginePool(directory=_OneEngine(), connect=connect, model=settings.name, time=LoopTime(), gate=settings.gate)
    limits = RouterLimits(
        model=settings.name,
        max_model_len=engine.limits.max_model_len,
        max_num_speculative_tokens=settings.loop.max_draft_tokens_limit if settings.proposes else 0,
        default_timeout_ms=_TIMEOUT_MS,
        max_timeout_ms=_TIMEOUT_MS,
        admission=AdmissionLimits(max_requests=_MAX_REQUESTS, max_tokens=1 << 40),
    )
    # The one engine is never replaced: its loss is final.
    once = FailoverSettings(max_moves=0)
    service = ServiceSettings(max_buffered_events=settings.buffered_events, failover=once)
    return RouterService(codec=codec, pool=pool, limits=limits, time=LoopTime(), settings=service)


def _hello(settings: LocalSettings, engine: ModelEngine) -> EngineHello:
    limits = engine.limits
    return EngineHello(
        engine_id=_ENGINE_ID,
        engine_epoch=1,
        model=settings.name,
        max_model_len=limits.max_model_len,
        kv_capacity_tokens=limits.num_blocks * limits.block_size,
    )


def _greeting(settings: LocalSettings, engine: ModelEngine, codec: Codec) -> Hello:
    """What the target says to the draft first; the link gets an id of its own."""
    return Hello(
        engine_id=_ENGINE_ID,
        engine_epoch=1,
        link_id=0,
        target_model=settings.name,
        vocab_size=codec.vocab_size,
        tokenizer_fingerprint=codec.fingerprint(),
        max_num_draft_tokens=settings.loop.max_draft_tokens_limit,
        max_model_len=engine.limits.max_model_len,
        max_num_seqs=settings.loop.max_num_seqs,
        capabilities=capabilities(stores_features=settings.target.feature_head is not None),
    )
