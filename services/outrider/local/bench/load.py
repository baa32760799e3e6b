"""Load on one address: closed loops keep streams busy, open loops do not care whether anybody is."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import accumulate
from random import Random
from typing import Protocol

from outrider.core.dispatch import EngineStatus
from outrider.core.generation import ChatMessage, ChoiceEnd, GenerationEvent, GenerationRequest, TextDelta
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.local.bench.plan import Piece
from outrider.local.bench.records import Record, Run
from outrider.local.together import together

__all__ = ["Door", "requests_of", "run_load"]


class Door(Protocol):
    """Where requests go: a local stack or a client of a deployment."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request. Raises `OutriderError`s."""
        ...

    async def speculation_status(self) -> Sequence[EngineStatus]:
        """The state of every engine."""
        ...


def requests_of(piece: Piece, *, speculates: bool, max_tokens: int) -> list[GenerationRequest]:
    """The requests of a piece; seeds depend on the piece alone, so that texts are equal in every mode."""
    wish = SpeculationPreference.ON if speculates else SpeculationPreference.OFF
    return [
        GenerationRequest(
            messages=(ChatMessage(role="user", content=prompt.text),),
            max_tokens=max_tokens,
            temperature=prompt.temperature,
            seed=piece.seed * 1000 + number,
            speculation=SpeculationChoice(preference=wish),
        )
        for number, prompt in enumerate(piece.prompts)
    ]


async def run_load(door: Door, piece: Piece, requests: Sequence[GenerationRequest]) -> Run:
    """Run all requests of a piece. The first that fails ends the run with its error."""
    before = await door.speculation_status()
    started = time.perf_counter()
    if piece.request_rate is None:
        records = await _closed_loop(door, requests, piece.concurrency or 1)
    else:
        records = await _open_loop(door, requests, piece.request_rate, Random(piece.seed))
    seconds = time.perf_counter() - started
    steps, phases = _difference(before, await door.speculation_status())
    return Run(seconds=seconds, records=tuple(records), steps=steps, step_seconds=phases)


async def _closed_loop(door: Door, requests: Sequence[GenerationRequest], concurrency: int) -> list[Record]:
    records: list[Record] = []
    waiting = iter(requests)

    async def stream() -> None:
        for request in waiting:
            records.append(await _observed(door, request))

    await together(stream() for _ in range(min(concurrency, len(requests))))
    return records


async def _open_loop(door: Door, requests: Sequence[GenerationRequest], rate: float, random: Random) -> list[Record]:
    """Poisson arrivals: the gaps between requests are exponential, whatever is still running."""
    arrivals = accumulate((random.expovariate(rate) for _ in requests[1:]), initial=0.0)

    async def arriving(request: GenerationRequest, at_s: float) -> Record:
        await asyncio.sleep(at_s)
        return await _observed(door, request)

    return await together(map(arriving, requests, arrivals))


async def _observed(door: Door, request: GenerationRequest) -> Record:
    started = time.perf_counter()
    messages: list[tuple[float, int]] = []
    stats = None
    async with aclosing(door.stream(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta) and event.token_ids:
                messages.append((time.perf_counter(), len(event.token_ids)))
            elif isinstance(event, ChoiceEnd):
                stats = event.speculation.stats
    return Record(started_s=started, messages=tuple(messages), stats=stats)


def _difference(before: Sequence[EngineStatus], after: Sequence[EngineStatus]) -> tuple[int, dict[str, float]]:
    """Steps of all engines meanwhile, and their seconds per phase."""
    steps, phases = 0, dict[str, float]()
    for sign, statuses in ((-1, before), (1, after)):
        for status in statuses:
            steps += sign * status.totals.steps
            for phase, seconds in status.totals.step_seconds:
                phases[phase] = phases.get(phase, 0.0) + sign * seconds
    return steps, phases
