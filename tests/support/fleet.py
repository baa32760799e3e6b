"""Routers, targets and drafts of one deployment in this process, over real gRPC and without Ray."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count

from outrider.core.generation import Caller, GenerationRequest
from outrider.core.ports import Endpoint
from outrider.core.result import GenerationResult, collect
from outrider.router.engine_link import LinkSettings
from outrider.router.engine_pool import EnginePool
from outrider.router.service import RouterService
from outrider.router.timing import LoopTime
from outrider.rpc.dispatch_client import GrpcEngineSession
from outrider.target.draft_assignment import DraftOffer
from outrider_cluster.assembly import gate_settings, router_limits
from outrider_cluster.codec import target_codec
from outrider_cluster.data_plane import EngineIdentity
from outrider_cluster.draft_runtime import DraftRuntime, start_draft
from outrider_cluster.primary_rank import PrimaryRank
from outrider_cluster.settings import Environment, Settings

__all__ = ["Fleet", "fleet"]

_HOST = "127.0.0.1"


class Fleet:
    """One router over engines that come and go. Implements `Directory` for it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._targets: dict[str, tuple[PrimaryRank, str]] = {}
        self._drafts: list[DraftRuntime] = []
        self._incarnations = count(1)
        self._pool = EnginePool(
            directory=self,
            connect=self._connect,
            model=settings.model.public_name,
            time=LoopTime(),
            gate=gate_settings(settings),
            # A small part of a long text of the formula, of which a second is enough for thousands of tokens.
            settings=LinkSettings(report_interval_s=0.02),
            refresh_interval_s=0.05,
        )
        self.router = RouterService(
            codec=target_codec(settings, Environment.read(), print),
            pool=self._pool,
            limits=router_limits(settings),
            time=LoopTime(),
        )

    async def endpoints(self) -> Sequence[Endpoint]:
        return [Endpoint(replica_id=name, address=address) for name, (_, address) in self._targets.items()]

    async def add_target(self, name: str, settings: Settings | None = None) -> None:
        """Start an engine; it takes requests from the router's next look on."""
        rank = PrimaryRank(settings or self.settings, EngineIdentity(engine_id=name, epoch=1), _HOST)
        self._targets[name] = (rank, await rank.start())
        self.look()
        async with asyncio.timeout(20):
            while not any(one.engine_id == name and one.ready for one in await self.router.speculation_status()):  # noqa: ASYNC110 - the router looks by itself
                await asyncio.sleep(0.02)

    async def retire_target(self, name: str) -> None:
        """What a front does when Serve takes its replica out: drain, then end."""
        rank, _ = self._targets[name]
        await rank.drain()
        del self._targets[name]
        await _end(rank)

    async def add_draft(self, settings: Settings | None = None) -> DraftRuntime:
        """Start a draft, and tell every engine."""
        settings = settings or self.settings
        assert settings.active_draft is not None
        made = await start_draft(settings, settings.active_draft, incarnation=next(self._incarnations), host=_HOST)
        self._drafts.append(made)
        self.look()
        return made

    async def retire_draft(self, draft: DraftRuntime) -> None:
        """Drain a draft and end it; the engines hear of it by themselves."""
        self._drafts.remove(draft)
        await draft.stop("the draft is being replaced")

    async def wait_until_drafting(self, engines: int) -> None:
        """Return once that many engines have a link that is up."""
        async with asyncio.timeout(20):
            while await self._drafted_for() < engines:  # noqa: ASYNC110 - the links are other tasks'
                await asyncio.sleep(0.02)

    def look(self) -> None:
        """What every front does about once a second: tell its engine which drafts there are, and how loaded."""
        for rank, _ in self._targets.values():
            rank.set_drafts(
                [
                    DraftOffer(replica_id=one.address, address=one.address, links=one.links, sequences=one.sequences)
                    for one in self._drafts
                ]
            )

    async def wait_until_balanced(self, links: Sequence[int]) -> None:
        """Look until the drafts have these numbers of links, in any order."""
        async with asyncio.timeout(30):
            while sorted(one.links for one in self._drafts) != sorted(links):
                self.look()
                await asyncio.sleep(0.05)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run a request to its end."""
        async with aclosing(self.router.stream(request, Caller())) as events:
            return await collect(events)

    def update(self, settings: Settings) -> None:
        """Apply settings that change live, as a router deployment does."""
        self.router.update_settings(gate_settings(settings), router_limits(settings))

    async def close(self) -> None:
        """End everything."""
        await self.router.close()
        for rank, _ in self._targets.values():
            await _end(rank)
        for draft in self._drafts:
            await draft.stop("the test is over")

    async def _drafted_for(self) -> int:
        statuses = await self.router.speculation_status()
        return sum(any(link.connected for link in one.draft_links) for one in statuses)

    async def _connect(self, endpoint: Endpoint) -> GrpcEngineSession:
        return await GrpcEngineSession.connect(endpoint.address, "router", 5.0)


async def _end(rank: PrimaryRank) -> None:
    """In a deployment the process goes; here what it leaves has to be taken down."""
    await rank.leave("the engine has left")
    if rank._transport is not None:
        await rank._transport.stop()
    if rank._publishing is not None:
        rank._publishing.cancel()
        await asyncio.gather(rank._publishing, return_exceptions=True)


@asynccontextmanager
async def fleet(settings: Settings, *, targets: Sequence[str] = (), drafts: int = 0) -> AsyncIterator[Fleet]:
    """A fleet for the duration of a block, with so many drafts and these engines."""
    made = Fleet(settings)
    await made.router.start()
    try:
        for _ in range(drafts):
            await made.add_draft()
        for name in targets:
            await made.add_target(name)
        if drafts:
            await made.wait_until_drafting(len(targets))
        yield made
    finally:
        await made.close()
