"""The communicators of one tensor-parallel group, and the broadcast that drives its ranks."""

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.core.errors import EngineUnavailable
from outrider.engine.rendezvous import Rendezvous

__all__ = ["RankGroup", "backend_for"]

# A step of a few dozen decode rows fits into one broadcast; what does not, takes a second one.
_FIRST_BROADCAST = 2048
# An idle rank waits in the broadcast for as long as no request comes. It does not need a time-out
# to notice that rank 0 died: its connection breaks.
_IDLE_TIMEOUT = timedelta(days=365)


def backend_for(device: torch.device) -> str:
    """What sums activations that lie on `device`; commands always travel on the host, over gloo."""
    return "nccl" if device.type == "cuda" else "gloo"


class RankGroup:
    """One process's membership of a group. A process has one in its life; nothing is reused.

    Two communicators: activations, where a rank that is late by the time-out ends the group, and
    commands, where ranks wait while there is no work.
    """

    def __init__(self, rendezvous: Rendezvous, *, backend: str, timeout_s: float) -> None:
        """Meet the other ranks; from then on none may be late by more than `timeout_s` in a step.

        Raises `EngineUnavailable` naming the ranks that do not come to the meeting in its time.
        """
        rendezvous.wait_for_all()
        self.rank = rendezvous.rank
        self.world_size = rendezvous.world_size
        _bind_to_loopback_if(rendezvous.host)
        try:
            dist.init_process_group(
                backend,
                store=rendezvous.store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            commands = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        except RuntimeError as error:
            raise self.failure(error) from error
        self._commands = commands
        self._timeout_s = timeout_s

    def wait_for_all(self) -> None:
        """Wait until every rank is here, however long one takes. Raises as `receive_command`."""
        try:
            dist.barrier(group=self._commands)
        except RuntimeError as error:
            raise self.failure(error) from error

    def sum(self, activations: Tensor) -> Tensor:
        """Add up every rank's `activations`, in place; all ranks call it with the same shape."""
        dist.all_reduce(activations)
        return activations

    def send_command(self, values: Sequence[int]) -> None:
        """Rank 0: hand `values` to every other rank.

        Raises `EngineUnavailable` when one is gone, or does not take them within the time-out.
        """
        message = torch.tensor([len(values), *values], dtype=torch.int32)
        first = torch.zeros(_FIRST_BROADCAST, dtype=torch.int32)
        head = message[:_FIRST_BROADCAST]
        first[: len(head)] = head
        self._send(first)
        if len(message) > _FIRST_BROADCAST:
            self._send(message[_FIRST_BROADCAST:].contiguous())

    def receive_command(self) -> list[int]:
        """Other ranks: wait for rank 0's next command, however long that takes.

        Raises `EngineUnavailable` when rank 0 or another rank is gone.
        """
        first = torch.empty(_FIRST_BROADCAST, dtype=torch.int32)
        self._broadcast(first)
        size = 1 + int(first[0])
        if size <= _FIRST_BROADCAST:
            return first[1:size].tolist()
        rest = torch.empty(size - _FIRST_BROADCAST, dtype=torch.int32)
        self._broadcast(rest)
        return [*first[1:].tolist(), *rest.tolist()]

    def failure(self, error: BaseException) -> EngineUnavailable:
        """The error to raise when a collective failed: the group cannot be used any more."""
        return EngineUnavailable(f"rank {self.rank} of {self.world_size} lost a tensor-parallel peer: {_reason(error)}")

    def close(self) -> None:
        """Leave the group. The other ranks' collectives fail from now on."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _send(self, tensor: Tensor) -> None:
        # A rank that hangs before it asks for a command would hold a sender for the group's whole
        # idle time: gloo sends only what the other side has asked for.
        try:
            work = dist.broadcast(tensor, src=0, group=self._commands, async_op=True)
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                late = RuntimeError(f"no rank may be late by {round(1000 * self._timeout_s)}ms, and one was")
                raise self.failure(late) from error
            raise self.failure(error) from error

    def _broadcast(self, tensor: Tensor) -> None:
        try:
            dist.broadcast(tensor, src=0, group=self._commands)
        except RuntimeError as error:
            raise self.failure(error) from error


def _reason(error: BaseException) -> str:
    """What gloo says happened, without its source location and general advice."""
    first_line = str(error).partition("\n")[0]
    without_place = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first_line)
    return without_place.partition(". This is typically")[0]


def _bind_to_loopback_if(host: str) -> None:
    # gloo listens on the interface that the machine's own name resolves to. When the meeting point
    # is loopback, everything has to stay on it. This process is one rank and nothing else.
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
