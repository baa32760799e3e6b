"""Many streams at once: each starts a request, reads it, crawls along it or leaves it, and starts the next."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from outrider.core.errors import EngineUnavailable, RequestAborted
from outrider.core.generation import ChoiceEnd, TextDelta
from outrider.core.sequence import FinishReason
from outrider.local.soak.cases import Catalogue
from outrider.local.soak.misuse import BAD_REQUESTS, misuse
from outrider.local.stack import LocalStack
from outrider.local.together import together

__all__ = ["KeepGoing", "Mix", "Outcome", "Tally", "for_requests", "for_seconds", "run_streams"]


class KeepGoing(Protocol):
    """Asked before each request with the number of those begun: whether to begin another."""

    def __call__(self, begun: int) -> bool:
        """True to go on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Shares of the requests; the rest is read to its end."""

    aborted: float = 0.25
    """Ended somewhere: half by an abort, half by leaving."""
    slow: float = 0.05
    """Read slowly: half with a pause after every message, half with one long stall, which may get them cut."""
    bad: float = 0.05
    """Malformed: must be refused."""
    pause_s: float = 0.25
    """Of a crawling reader, after every message."""
    stall_s: float = 5.0
    """Of a stalling reader, after the first message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request that has ended."""

    case: int
    """Index in the catalogue."""
    token_ids: tuple[int, ...]
    aborted: bool = False
    slow: bool = False
    cut: bool = False
    """The router gave up on a slow reader."""
    speculative_rounds: int = 0

    @property
    def complete(self) -> bool:
        """Whether all of the text was delivered."""
        return not (self.aborted or self.cut)


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts over all requests, and what bad ones got that they should not."""

    requests: int = 0
    aborted: int = 0
    slow: int = 0
    cut: int = 0
    refused: int = 0
    tokens: int = 0
    speculative_rounds: int = 0
    not_refused: list[str] = field(default_factory=list)

    def take(self, one: Outcome) -> None:
        """Count a request."""
        self.requests += 1
        self.aborted += one.aborted
        self.slow += one.slow
        self.cut += one.cut
        self.tokens += len(one.token_ids)
        self.speculative_rounds += one.speculative_rounds

    def take_bad(self, problem: str | None) -> None:
        """Count a malformed request; `problem`: what is wrong with the answer."""
        self.requests += 1
        self.refused += problem is None
        if problem is not None and problem not in self.not_refused:
            self.not_refused.append(problem)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests: {self.aborted} aborted, {self.slow} read slowly ({self.cut} cut), "
            f"{self.refused} refused"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a stream does with its next request."""

    case: int
    request_id: str
    abort_at: int | None = None
    """Tokens after which it ends."""
    leaves: bool = False
    pauses_s: tuple[float, float] = (0.0, 0.0)
    """Of a slow reader: after the first message, and after every other."""

    @property
    def slow(self) -> bool:
        """Whether it reads slowly."""
        return max(self.pauses_s) > 0


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
    mix: Mix,
    random: Random,
    stuck_s: float,
    take: Callable[[Outcome], None],
    meter: Callable[[str], None],
) -> Tally:
    """Keep `num_streams` busy; every request that was not malformed goes to `take` when it has ended.

    Raises `EngineUnavailable` naming a stream that has heard nothing for `stuck_s`.
    """
    tally = Tally()
    begun = 0

    async def stream() -> None:
        nonlocal begun
        while keep_going(begun):
            begun += 1
            plan = _plan(catalogue, mix, random, f"soak-{begun}")
            if plan is None:
                tally.take_bad(await misuse(stack, random.choice(BAD_REQUESTS)))
            else:
                outcome = await _one(stack, catalogue, plan, stuck_s)
                tally.take(outcome)
                take(outcome)
            meter(str(tally))

    await together(stream() for _ in range(num_streams))
    return tally


def _plan(catalogue: Catalogue, mix: Mix, random: Random, request_id: str) -> _Plan | None:
    """The next request of a stream; None: a malformed one."""
    kind, case = random.random(), random.randrange(len(catalogue.requests))
    if kind < mix.bad:
        return None
    if kind < mix.bad + mix.slow:
        stalls = random.random() < 0.5
        return _Plan(case=case, request_id=request_id, pauses_s=(mix.stall_s, 0.0) if stalls else (mix.pause_s,) * 2)
    if kind < mix.bad + mix.slow + mix.aborted:
        at = random.randint(0, catalogue.requests[case].max_tokens or 1)
        return _Plan(case=case, request_id=request_id, abort_at=at, leaves=random.random() < 0.5)
    return _Plan(case=case, request_id=request_id)


async def _one(stack: LocalStack, catalogue: Catalogue, plan: _Plan, stuck_s: float) -> Outcome:
    """One request, read as planned."""
    token_ids: list[int] = []
    aborted, cut, rounds, abort_at = False, False, 0, plan.abort_at
    try:
        async with (
            aclosing(stack.stream(catalogue.request(plan.case, plan.request_id))) as events,
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
                    if plan.leaves:
                        aborted = True
                        break
                    await stack.abort(plan.request_id)
                if plan.slow:
                    await asyncio.sleep(plan.pauses_s[bool(token_ids)])
    except TimeoutError as error:
        raise EngineUnavailable(f"{plan.request_id} (case {plan.case}) heard nothing for {stuck_s:g} s") from error
    except RequestAborted:
        if not plan.slow:
            raise
        cut = True
    return Outcome(
        case=plan.case,
        token_ids=tuple(token_ids),
        aborted=aborted,
        slow=plan.slow,
        cut=cut,
        speculative_rounds=rounds,
    )


def _postpone(limit: asyncio.Timeout, seconds: float) -> None:
    limit.reschedule(asyncio.get_running_loop().time() + seconds)
