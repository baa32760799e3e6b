"""A client on another host: a process that takes orders as lines of JSON and answers the same way.

`RemoteClient` is the test's end, the module itself (`python -m tests.support.remote_client`) the other.
"""

import asyncio
import dataclasses
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from enum import Enum
from pathlib import Path
from typing import Any

from tests.support.netns import Host

from outrider.core.errors import OutriderError
from outrider.core.generation import ChoiceEnd, GenerationRequest, TextDelta
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.rpc.client import OutriderClient

__all__ = ["Load", "RemoteClient", "Stream"]

_REPOSITORY = Path(__file__).parents[2]
UNDER_WAY_TOKENS = 8
"""A stream is under way once it has this many."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one stream has delivered."""

    seed: int
    text: str
    token_ids: list[int]
    error: str
    """Class and message of what ended it; empty when it ended well."""
    gaps_s: list[float]
    """Between two messages with tokens."""
    rounds: int
    """Of the engine that ended it."""
    speculative_rounds: int


class Load:
    """Streams that were started together."""

    def __init__(self, answers: "queue.Queue[dict[str, Any]]", process: "subprocess.Popen[str]") -> None:
        self._answers = answers
        self._process = process

    def wait_under_way(self, timeout_s: float = 60.0) -> None:
        """Return once every stream has some tokens."""
        assert self._answers.get(timeout=timeout_s) == {"under_way": True}

    def results(self, timeout_s: float = 120.0) -> list[Stream]:
        """Wait for all ends; in order of the seeds."""
        answer = self._answers.get(timeout=timeout_s)
        if answer == {"under_way": True}:
            answer = self._answers.get(timeout=timeout_s)
        return [Stream(**one) for one in answer["streams"]]


class RemoteClient:
    """The test's end. `close` it."""

    def __init__(self, host: Host, env: Mapping[str, str]) -> None:
        command = host.command(sys.executable, "-m", "tests.support.remote_client")
        self._process = subprocess.Popen(
            command, env=dict(env), cwd=_REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def load(
        self,
        address: str,
        seeds: Sequence[int],
        *,
        max_tokens: int,
        resume: bool = False,
        speculation: SpeculationPreference = SpeculationPreference.AUTO,
        timeout_ms: int = 120_000,
    ) -> Load:
        """Start one stream for each seed."""
        order = {
            "op": "load",
            "address": address,
            "seeds": list(seeds),
            "max_tokens": max_tokens,
            "resume": resume,
            "speculation": speculation.value,
            "timeout_ms": timeout_ms,
        }
        return Load(self._send(order), self._process)

    def status(self, address: str, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """The state of every engine, as a router there sees it; empty when none answers."""
        engines: list[dict[str, Any]] = self._send({"op": "status", "address": address}).get(timeout=timeout_s)[
            "engines"
        ]
        return engines

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._reader.join(20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _send(self, order: dict[str, Any]) -> "queue.Queue[dict[str, Any]]":
        number = len(self._answers)
        self._answers[number] = queue.Queue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"number": number, **order}) + "\n")
        self._process.stdin.flush()
        return self._answers[number]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer.pop("number")].put(answer)


class _Reader:
    """One stream of a load, on the other end."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.text = ""
        self.token_ids: list[int] = []
        self.gaps_s: list[float] = []
        self.error = ""
        self.rounds = self.speculative_rounds = 0
        self.under_way = asyncio.Event()

    async def run(self, client: OutriderClient, request: GenerationRequest, *, resume: bool) -> None:
        try:
            await self._read(client, request, resume=resume)
        except OutriderError as error:
            self.error = f"{type(error).__name__}: {error}"
        self.under_way.set()

    async def _read(self, client: OutriderClient, request: GenerationRequest, *, resume: bool) -> None:
        before_s = 0.0
        async with aclosing(client.stream(request, resume=resume)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    now_s = time.monotonic()
                    if before_s:
                        self.gaps_s.append(now_s - before_s)
                    before_s = now_s
                    self.text += event.text
                    self.token_ids += event.token_ids
                    if len(self.token_ids) >= UNDER_WAY_TOKENS:
                        self.under_way.set()
                elif isinstance(event, ChoiceEnd):
                    self.rounds = event.speculation.stats.rounds
                    self.speculative_rounds = event.speculation.stats.speculative_rounds

    def result(self) -> dict[str, Any]:
        stream = Stream(
            seed=self.seed,
            text=self.text,
            token_ids=self.token_ids,
            error=self.error,
            gaps_s=self.gaps_s,
            rounds=self.rounds,
            speculative_rounds=self.speculative_rounds,
        )
        return dataclasses.asdict(stream)


async def _load(order: dict[str, Any]) -> None:
    readers = [_Reader(seed) for seed in order["seeds"]]
    wish = SpeculationChoice(preference=SpeculationPreference(order["speculation"]))
    async with OutriderClient(order["address"]) as client:
        tasks = [
            asyncio.create_task(
                one.run(
                    client,
                    GenerationRequest(
                        text=f"PROMPT {one.seed}",
                        max_tokens=order["max_tokens"],
                        seed=one.seed,
                        speculation=wish,
                        timeout_ms=order["timeout_ms"],
                    ),
                    resume=order["resume"],
                )
            )
            for one in readers
        ]
        await asyncio.gather(*(one.under_way.wait() for one in readers))
        _answer(order, {"under_way": True})
        await asyncio.gather(*tasks)
    _answer(order, {"streams": [one.result() for one in readers]})


async def _status(order: dict[str, Any]) -> None:
    engines: list[Any] = []
    async with OutriderClient(order["address"]) as client:
        try:
            engines = [dataclasses.asdict(one) for one in await client.speculation_status()]
        except OutriderError as error:
            sys.stderr.write(f"{error}\n")
    _answer(order, {"engines": engines})


def _answer(order: dict[str, Any], answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"number": order["number"], **answer}, default=_plain) + "\n")
    sys.stdout.flush()


def _plain(one: object) -> object:
    return one.value if isinstance(one, Enum) else str(one)


async def _serve() -> None:
    work = {"load": _load, "status": _status}
    running: set[asyncio.Task[None]] = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        task = asyncio.create_task(work[order["op"]](order))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(_serve())
