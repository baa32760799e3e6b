"""Real rank processes for tests: each plays a part that the test names, and reports over a pipe."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from outrider.core.errors import EngineUnavailable
from outrider.engine.base import ForwardBatch, ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.rendezvous import join_rendezvous, open_rendezvous
from outrider.engine.tensor_parallel import build_peer, build_primary

__all__ = ["RankGroupUnderTest", "rank_group"]

TIMEOUT_S = 90.0
HOST = "127.0.0.1"


class RankGroupUnderTest:
    """The test's hold on a group whose rank 0 runs the batches it is sent."""

    def __init__(self, processes: list[BaseProcess], primary: Connection) -> None:
        self.processes = processes
        self._primary = primary

    def forward(self, batch: ForwardBatch) -> Any:
        """Rank 0's logits as nested lists, or its `EngineUnavailable` as a string."""
        self._primary.send(batch)
        return receive(self._primary)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Rank 0 copies KV blocks."""
        self._primary.send(pairs)

    def close(self) -> None:
        """Rank 0 closes its engine and ends."""
        self._primary.send(None)

    def exit_codes(self) -> list[int | None]:
        """Wait for every rank to end."""
        deadline = time.monotonic() + TIMEOUT_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]


@contextmanager
def rank_group(config: EngineConfig) -> Iterator[RankGroupUnderTest]:
    """Start `config.tensor_parallel_size` ranks; whatever is left of them is killed at the end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    processes: list[BaseProcess] = [context.Process(target=primary, args=(config, there))]
    try:
        processes[0].start()
        address = receive(here)
        for rank in range(1, config.tensor_parallel_size):
            processes.append(context.Process(target=peer, args=(config, rank, *address)))
            processes[-1].start()
        assert receive(here) == "ready"
        yield RankGroupUnderTest(processes, here)
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(connection: Connection) -> Any:
    assert connection.poll(TIMEOUT_S), "the rank process does not answer"
    return connection.recv()


def primary(config: EngineConfig, connection: Connection) -> None:
    """Rank 0: publish the address, build, then run batches until told None."""
    rendezvous = open_rendezvous(host=HOST, world_size=config.tensor_parallel_size, timeout_s=TIMEOUT_S)
    connection.send((rendezvous.host, rendezvous.port))
    engine = build_primary(config, rendezvous, ignore)
    connection.send("ready")
    while (wanted := connection.recv()) is not None:
        if isinstance(wanted, ForwardBatch):
            connection.send(answer(engine, wanted))
        else:
            engine.copy_blocks(wanted)
    engine.close()


def answer(engine: ModelEngine, batch: ForwardBatch) -> Any:
    try:
        return engine.forward(batch).tolist()
    except (EngineUnavailable, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def peer(config: EngineConfig, rank: int, host: str, port: int) -> None:
    """Rank 1 or above."""
    rendezvous = join_rendezvous(
        rank=rank,
        host=host,
        port=port,
        world_size=config.tensor_parallel_size,
        timeout_s=TIMEOUT_S,
    )
    build_peer(config, rendezvous, ignore).serve_forever()


def ignore(_: str) -> None:
    """A progress sink."""
