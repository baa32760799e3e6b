"""Many streams at once: each starts a request, reads it or leaves it, and starts the next."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Protocol

from outrider.core.errors import EngineUnavailable
from outrider.core.generation import ChoiceEnd, TextDelta
from outrider.core.sequence import FinishReason
from outrider.local.soak.cases import Catalogue
from outrider.local.stack import LocalStack

__all__ = ["KeepGoing", "Outcome", "for_requests", "for_seconds", "run_streams"]

_ABORT_SHARE = 0.25


class KeepGoing(Protocol):
    """Asked before each request with the number of those begun: whether to begin another."""

    def __call__(self, begun: int) -> bool:
        """True to go on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request that has ended."""

    case: int
    """Index in the catalogue."""
    token_ids: tuple[int, ...]
    aborted: bool
    speculative_rounds: int = 0


def for_seconds(seconds: float) -> KeepGoing:
    """Begin requests for that long."""
    end = time.monotonic() + seconds
    return lambda begun: time.monotonic() < end


def for_requests(count: int) -> KeepGoing:
    """Begin that many requests."""
    return lambda begun: begun < count


async def run_streams(
    stack: LocalStack,
    catalogue: Catalogue,
    *,
    num_streams: int,
    keep_going: KeepGoing,
    random: Random,
    stuck_s: float,
    meter: Callable[[str], None],
) -> list[Outcome]:
    """Keep `num_streams` busy; a quarter of the requests is aborted somewhere.

    Raises `EngineUnavailable` naming a stream that has heard nothing for `stuck_s`.
    """
    outcomes: list[Outcome] = []
    begun = 0

    async def stream() -> None:
        nonlocal begun
        while keep_going(begun):
            begun += 1
            number, case = begun, random.randrange(len(catalogue.requests))
            abort_at = None
            if random.random() < _ABORT_SHARE:
                abort_at = random.randint(0, catalogue.requests[case].max_tokens or 1)
            leaves = random.random() < 0.5
            outcomes.append(await _one(stack, catalogue, case, f"soak-{number}", abort_at, leaves, stuck_s))
            meter(f"{len(outcomes)} requests, {sum(one.aborted for one in outcomes)} aborted")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(stream())
    return outcomes


async def _one(
    stack: LocalStack,
    catalogue: Catalogue,
    case: int,
    request_id: str,
    abort_at: int | None,
    leaves: bool,
    stuck_s: float,
) -> Outcome:
    """One request. With `abort_at` it ends behind that many tokens: by leaving, or by an abort call."""
    token_ids: list[int] = []
    aborted, rounds = False, 0
    try:
        async with (
            aclosing(stack.stream(catalogue.request(case, request_id))) as events,
            asyncio.timeout(None) as limit,
        ):
            _postpone(limit, stuck_s)
            async for event in events:
                _postpone(limit, stuck_s)
                if isinstance(event, TextDelta):
                    token_ids += event.token_ids
                elif isinstance(event, ChoiceEnd):
                    aborted = event.finish.reason is FinishReason.ABORTED
                    rounds = event.speculation.stats.speculative_rounds
                if abort_at is not None and not isinstance(event, ChoiceEnd) and len(token_ids) >= abort_at:
                    abort_at = None
                    if leaves:
                        aborted = True
                        break
                    await stack.abort(request_id)
    except TimeoutError as error:
        raise EngineUnavailable(f"{request_id} (case {case}) has heard nothing for {stuck_s:g} s") from error
    return Outcome(case=case, token_ids=tuple(token_ids), aborted=aborted, speculative_rounds=rounds)


def _postpone(limit: asyncio.Timeout, seconds: float) -> None:
    limit.reschedule(asyncio.get_running_loop().time() + seconds)
