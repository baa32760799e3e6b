"""All engines of the directory, one link each."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from outrider.core.dispatch import EngineStatus
from outrider.core.errors import ConfigError
from outrider.core.policy import GateSettings
from outrider.core.ports import Directory, Endpoint
from outrider.router.dispatch import Candidate
from outrider.router.engine_link import EngineLink, LinkSettings, SessionFactory
from outrider.router.metrics import NoMetrics, RouterMetrics
from outrider.router.timing import Alarm, TimeSource, sleep

__all__ = ["EnginePool"]

_logger = logging.getLogger(__name__)


class _Watcher:
    """A callback that the pool calls until it is cancelled."""

    def __init__(self, watchers: "set[_Watcher]", callback: Callable[[], None]) -> None:
        self.callback = callback
        self._watchers = watchers
        watchers.add(self)

    def cancel(self) -> None:
        self._watchers.discard(self)


class EnginePool:
    """Follows the directory: links what is new, lets go of what left once it is idle.

    The directory is the second opinion on who lives. The loss of a stream is the first: it ends
    sequences at once, while a control plane that does not answer, or forgets a living engine,
    interrupts nothing.
    """

    def __init__(
        self,
        *,
        directory: Directory,
        connect: SessionFactory,
        model: str,
        time: TimeSource,
        gate: GateSettings | None = None,
        settings: LinkSettings | None = None,
        refresh_interval_s: float = 2.0,
        metrics: RouterMetrics | None = None,
        jitter: Callable[[], float] = random.random,
        pending: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`pending`: replicas that do not serve and are expected to, each with the reason; must not block."""
        if not refresh_interval_s > 0:
            raise ConfigError(f"refresh_interval_s: {refresh_interval_s} is not above 0")
        self._directory = directory
        self._connect = connect
        self._model = model
        self._time = time
        self._gate = GateSettings() if gate is None else gate
        self._settings = LinkSettings() if settings is None else settings
        self._refresh_interval_s = refresh_interval_s
        self._metrics: RouterMetrics = NoMetrics() if metrics is None else metrics
        self._jitter = jitter
        self._pending = pending
        self._watchers: set[_Watcher] = set()
        self._links: dict[str, EngineLink] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the directory and try every engine once; go on in the background."""
        await self.refresh()
        for link in list(self._links.values()):
            await link.attempted.wait()
        self._task = asyncio.create_task(self._follow(), name="engine-pool")

    async def close(self) -> None:
        """Leave every engine; what still runs fails with `EngineUnavailable`. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        links, self._links = self._links, {}
        for link in links.values():
            await link.close("the router is closing")

    def loads(self) -> list[Candidate]:
        """Every engine as the dispatch policy sees it."""
        return [link.load() for link in self._links.values()]

    def link(self, replica_id: str) -> EngineLink:
        """The link of an engine that `loads` has just listed."""
        return self._links[replica_id]

    def statuses(self) -> list[EngineStatus]:
        """The state of every engine, by replica id; those without a session say why."""
        return [link.status() for _, link in sorted(self._links.items())]

    def pending(self) -> Sequence[str]:
        """Replicas that do not serve and are expected to, each with the reason; new ones until first tried."""
        untried = [name for name, link in self._links.items() if not link.attempted.is_set()]
        return [*self._pending(), *(f"{name}: not connected yet" for name in untried)]

    def watch(self, callback: Callable[[], None]) -> Alarm:
        """Call `callback` whenever an engine may have come, gone or changed, until it is cancelled."""
        return _Watcher(self._watchers, callback)

    def set_gate(self, gate: GateSettings) -> None:
        """Apply gate settings to every engine, now and on every later connect."""
        self._gate = gate
        for link in self._links.values():
            link.set_gate(gate)

    def max_text_len(self, configured: int) -> int:
        """Longest text in tokens that every connected engine can hold, at most `configured`."""
        hellos = [link.hello for link in self._links.values()]
        return min(
            [configured] + [min(hello.max_model_len, hello.kv_capacity_tokens) for hello in hellos if hello is not None]
        )

    async def refresh(self) -> None:
        """Read the directory once. If it does not answer, the last view stays."""
        try:
            endpoints = await self._directory.endpoints()
        except TimeoutError:
            _logger.warning("the directory does not answer; the last view stays")
        except Exception:
            _logger.exception("the directory failed; the last view stays")
        else:
            await self._apply(endpoints)
        self._changed()

    async def _follow(self) -> None:
        while True:
            await sleep(self._time, self._refresh_interval_s)
            await self.refresh()

    async def _apply(self, endpoints: Sequence[Endpoint]) -> None:
        listed = {one.replica_id: one for one in endpoints}
        for replica_id, link in list(self._links.items()):
            endpoint = listed.get(replica_id)
            link.leaving = endpoint is None
            if endpoint is not None and endpoint != link.endpoint:
                await self._remove(replica_id, f"the engine moved to {endpoint.address}")
            elif endpoint is None and (link.hello is None or not link.outstanding):
                await self._remove(replica_id, "the directory no longer lists the engine")
        for replica_id, endpoint in listed.items():
            if replica_id not in self._links:
                self._links[replica_id] = self._new_link(endpoint)

    async def _remove(self, replica_id: str, cause: str) -> None:
        await self._links.pop(replica_id).close(cause)

    def _new_link(self, endpoint: Endpoint) -> EngineLink:
        return EngineLink(
            endpoint,
            connect=self._connect,
            model=self._model,
            gate=self._gate,
            time=self._time,
            settings=self._settings,
            metrics=self._metrics,
            jitter=self._jitter,
            on_change=self._changed,
        )

    def _changed(self) -> None:
        for one in list(self._watchers):
            one.callback()
