"""Rank 1 and above: a shard of the model that runs what rank 0 commands, in a thread of its own."""

import asyncio
import logging
import threading
from typing import TypeVar

from outrider.core.errors import EngineUnavailable
from outrider_cluster.assembly import target_engine_config
from outrider_cluster.data_plane import Meeting, RankPulse
from outrider_cluster.settings import Environment, Settings

__all__ = ["PeerRank"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class PeerRank:
    """One process of a tensor-parallel group. The scripted engine has no shards: its peers only live."""

    def __init__(self, settings: Settings, rank: int) -> None:
        """Starts nothing."""
        self._settings = settings
        self._rank = rank
        self._environment = Environment.read()
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[str] = self._loop.create_future()

    async def start(self, meeting: Meeting | None) -> None:
        """Load this rank's shard and follow rank 0. `meeting` None: there is nothing to follow.

        Raises `ConfigError`, `CompatibilityError` or `EngineUnavailable` with the cause.
        """
        if meeting is None:
            return
        loaded: asyncio.Future[None] = self._loop.create_future()
        # A thread that may be stuck in a collective must not keep the process from ending.
        threading.Thread(target=self._run, args=(meeting, loaded), name="outrider-rank", daemon=True).start()
        await loaded

    async def ended(self) -> str:
        """Wait until this rank has lost its group; returns why."""
        return await asyncio.shield(self._failure)

    def ping(self) -> RankPulse:
        """Answer."""
        return RankPulse()

    def _run(self, meeting: Meeting, loaded: "asyncio.Future[None]") -> None:
        from outrider.engine.rendezvous import join_rendezvous
        from outrider.engine.tensor_parallel import build_peer

        target = self._settings.target
        try:
            rendezvous = join_rendezvous(
                rank=self._rank,
                host=meeting.host,
                port=meeting.port,
                world_size=target.tensor_parallel_size,
                timeout_s=target.timeouts.collective_s,
            )
            peer = build_peer(target_engine_config(self._settings, self._environment), rendezvous, _log.info)
        except Exception as error:  # noqa: BLE001 - raised again where `start` waits
            self._loop.call_soon_threadsafe(_set_error, loaded, error)
            return
        self._loop.call_soon_threadsafe(_set, loaded, None)
        try:
            peer.serve_forever()
            cause = "rank 0 ended the group"
        except EngineUnavailable as error:
            cause = error.cause
        except Exception as error:  # noqa: BLE001 - the front has to hear of whatever it is
            _log.exception("rank %d failed", self._rank)
            cause = f"{type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(_set, self._failure, cause)


def _set(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():  # the waiting call may have been cancelled
        future.set_result(value)


def _set_error(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
