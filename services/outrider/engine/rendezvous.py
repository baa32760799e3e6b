"""How the ranks of one tensor-parallel group find each other.

Rank 0 opens a store on a port that the system chose and publishes it; the others join. The port is
bound before it is published, because a port that is picked and then closed can be taken by someone
else in between.
"""

import socket
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.core.errors import EngineUnavailable

__all__ = ["Rendezvous", "join_rendezvous", "open_rendezvous"]

_BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A rank's hold on the meeting point; keep it for the life of the group."""

    rank: int
    world_size: int
    host: str
    port: int
    timeout_s: float
    """Seconds that the meeting may take: ranks load their weights before, at their own speed."""
    store: TCPStore = field(repr=False)

    def wait_for_all(self) -> None:
        """Say that this rank is here and wait for the others.

        Raises `EngineUnavailable` naming those that do not come in time.
        """
        try:
            self.store.set(_key(self.rank), "here")
            self.store.wait([_key(rank) for rank in range(self.world_size)], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise EngineUnavailable(f"rank {self.rank}: {self._absent()} within {self.timeout_s} s") from error

    def _absent(self) -> str:
        try:
            absent = [rank for rank in range(self.world_size) if not self.store.check([_key(rank)])]
        except RuntimeError:
            return f"rank 0 at {self.host}:{self.port} did not answer"
        return f"ranks {', '.join(map(str, absent))} of {self.world_size} did not come"


def open_rendezvous(*, host: str, world_size: int, timeout_s: float) -> Rendezvous:
    """Rank 0: listen on `host`, on a free port. The result's host and port go to the other ranks."""
    # TCPStore of its own accord listens on every interface, and it asks nobody for a password.
    with socket.create_server((host, 0), backlog=_BACKLOG) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return Rendezvous(rank=0, world_size=world_size, host=host, port=port, timeout_s=timeout_s, store=store)


def join_rendezvous(*, rank: int, host: str, port: int, world_size: int, timeout_s: float) -> Rendezvous:
    """Rank 1 and above: connect to rank 0's store.

    Raises `EngineUnavailable` when nobody answers there in time.
    """
    try:
        store = TCPStore(
            host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise EngineUnavailable(f"rank {rank} cannot reach rank 0 at {host}:{port} within {timeout_s} s") from error
    return Rendezvous(rank=rank, world_size=world_size, host=host, port=port, timeout_s=timeout_s, store=store)


def _key(rank: int) -> str:
    return f"outrider/rank/{rank}"
