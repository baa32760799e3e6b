"""The front's supervision: a group of ranks lives and dies as a whole, and is rebuilt as a whole.

    starting ── every rank serves ──▶ ready
       │                                │
       └────────── a rank fails ────────┴──▶ failed(cause) ── back-off ──▶ starting, next epoch

`GroupState` is the state machine and does nothing by itself; `Supervisor` runs it over an
`EngineGroup`, whose implementation knows what a rank is. A failed group is never repaired: its
survivors sit in a communicator that has lost a member, so they end with it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.core.ports import Clock

__all__ = ["EngineGroup", "GroupPhase", "GroupState", "GroupView", "SupervisionPolicy", "Supervisor"]


class GroupPhase(Enum):
    """Where a group stands."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionPolicy:
    """Time limits, all in seconds and above zero."""

    start_s: float = 600.0
    """From creating the ranks to a serving engine."""
    heartbeat_interval_s: float = 1.0
    """Pause between two questions to a rank."""
    heartbeat_s: float = 10.0
    """A rank that leaves a question unanswered this long counts as hung."""
    backoff_s: float = 1.0
    """Pause before the second rebuild in a row; doubles from then on. The first has none."""
    backoff_max_s: float = 30.0
    """Longest pause; a group that was ready for this long clears the record."""

    def __post_init__(self) -> None:
        for name in ("start_s", "heartbeat_interval_s", "heartbeat_s", "backoff_s", "backoff_max_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What can be said about a group from outside."""

    phase: GroupPhase
    epoch: int
    """Which incarnation: 1 for the first; 0 before it."""
    address: str | None
    """Where the engine serves; None unless ready."""
    problem: str
    """Why it is not ready, naming the rank; the cause of the last failure while it starts again."""
    failures_in_a_row: int = 0
    """Incarnations lost since one was last ready for a while. Being ready alone does not clear it: a group that
    serves and dies at once is as sick as one that never serves."""

    @property
    def ready(self) -> bool:
        """Whether the engine serves."""
        return self.phase is GroupPhase.READY


class GroupState:
    """The state machine. Every change is a method; wrong transitions raise `ValueError`."""

    def __init__(self, policy: SupervisionPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._phase = GroupPhase.FAILED
        self._epoch = 0
        self._address: str | None = None
        self._cause = ""
        self._failures_in_a_row = 0
        self._ready_since = 0.0

    @property
    def view(self) -> GroupView:
        """The state as others see it."""
        problem = self._cause or "the engine has not started yet"
        if self._phase is GroupPhase.STARTING:
            problem = f"engine is starting (epoch {self._epoch})"
            if self._cause:
                problem = f"{problem}, after: {self._cause}"
        elif self._phase is GroupPhase.READY:
            problem = ""
        return GroupView(
            phase=self._phase,
            epoch=self._epoch,
            address=self._address,
            problem=problem,
            failures_in_a_row=self.failures_in_a_row,
        )

    @property
    def failures_in_a_row(self) -> int:
        """Failures since a group was last ready for `backoff_max_s`."""
        return 0 if self._is_stable() else self._failures_in_a_row

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next start."""
        repeats = self._failures_in_a_row - 1
        if repeats < 1:
            return 0.0
        # The exponent is bounded first: 2.0**1100 overflows.
        return min(self._policy.backoff_max_s, self._policy.backoff_s * 2.0 ** min(repeats - 1, 64))

    def start(self) -> int:
        """A new incarnation begins; returns its epoch. From failed only."""
        self._expect(GroupPhase.FAILED)
        self._phase = GroupPhase.STARTING
        self._epoch += 1
        return self._epoch

    def serving(self, address: str) -> None:
        """Every rank of the group runs, and rank 0 serves at `address`. From starting only."""
        self._expect(GroupPhase.STARTING)
        self._phase = GroupPhase.READY
        self._address = address
        self._ready_since = self._clock.now()

    def fail(self, cause: str) -> None:
        """The group is lost; `cause` names the rank. From starting or ready."""
        self._expect(GroupPhase.STARTING, GroupPhase.READY)
        self._failures_in_a_row = self.failures_in_a_row + 1
        self._phase = GroupPhase.FAILED
        self._address = None
        self._cause = cause

    def close(self) -> None:
        """The end: no further incarnation. From anywhere."""
        self._phase = GroupPhase.CLOSED
        self._address = None
        self._cause = "the replica is shutting down"

    def _is_stable(self) -> bool:
        ready_for_s = self._clock.now() - self._ready_since
        return self._phase is GroupPhase.READY and ready_for_s >= self._policy.backoff_max_s

    def _expect(self, *phases: GroupPhase) -> None:
        if self._phase not in phases:
            raise ValueError(f"a {self._phase.value} group cannot do this")


class EngineGroup(Protocol):
    """One incarnation of an engine: its ranks, from creation to death. Used on the event loop."""

    @property
    def num_ranks(self) -> int:
        """Ranks 0 … num_ranks - 1."""
        ...

    async def start(self) -> str:
        """Create and start every rank; returns rank 0's address. Raises with the cause, naming the rank."""
        ...

    async def ended(self, rank: int) -> str:
        """Wait until this rank is gone or unusable; returns why."""
        ...

    async def ping(self, rank: int) -> None:
        """Return when the rank answers. May hang or raise when it does not."""
        ...

    async def close(self, cause: str) -> None:
        """Let rank 0 tell its routers why, if it still can, and end every rank for certain.

        Bounded in time. Also called after a failed `start`.
        """
        ...


class Supervisor:
    """Keeps one group running: starts it, watches every rank, ends and rebuilds it."""

    def __init__(
        self,
        make_group: Callable[[int], EngineGroup],
        policy: SupervisionPolicy,
        clock: Clock,
        *,
        on_change: Callable[[GroupView], None] = lambda view: None,
    ) -> None:
        """`make_group` takes the epoch; `on_change` is told every transition, on the event loop."""
        self._make_group = make_group
        self._policy = policy
        self._state = GroupState(policy, clock)
        self._on_change = on_change

    @property
    def view(self) -> GroupView:
        """The state of the group."""
        return self._state.view

    async def run(self) -> None:
        """Run for ever. Cancelling it ends the current group before it returns."""
        try:
            while True:
                await asyncio.sleep(self._state.backoff_s)
                await self._one_life()
        finally:
            self._state.close()
            self._on_change(self.view)

    async def _one_life(self) -> None:
        group = self._make_group(self._state.start())
        self._on_change(self.view)
        cause = "the replica is shutting down"
        try:
            failure = await self._start(group)
            if failure is None:
                self._on_change(self.view)
                failure = await _first(self._watches(group))
            cause = failure
            self._state.fail(cause)
            self._on_change(self.view)
        finally:
            await group.close(cause)

    async def _start(self, group: EngineGroup) -> str | None:
        """Start the group, watching for deaths meanwhile. None: it serves; else the cause."""
        starting = asyncio.ensure_future(group.start())
        deaths = asyncio.ensure_future(_first([self._death(group, rank) for rank in range(group.num_ranks)]))
        try:
            done, _ = await asyncio.wait(
                (starting, deaths), timeout=self._policy.start_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return f"the ranks did not start within {self._policy.start_s:g} s"
            # A death explains a failed start better than the start's own error, so it comes first.
            if deaths in done:
                return deaths.result()
            error = starting.exception()
            if error is not None:
                return f"start failed: {error.cause if isinstance(error, EngineUnavailable) else error}"
            self._state.serving(starting.result())
            return None
        finally:
            await _cancel(starting, deaths)

    def _watches(self, group: EngineGroup) -> list[Coroutine[Any, Any, str]]:
        ranks = range(group.num_ranks)
        return [self._death(group, rank) for rank in ranks] + [self._silence(group, rank) for rank in ranks]

    async def _death(self, group: EngineGroup, rank: int) -> str:
        return f"rank {rank}: {await group.ended(rank)}"

    async def _silence(self, group: EngineGroup, rank: int) -> str:
        while True:
            try:
                async with asyncio.timeout(self._policy.heartbeat_s):
                    await group.ping(rank)
            except TimeoutError:
                return f"rank {rank}: no answer for {self._policy.heartbeat_s:g} s"
            except Exception as error:  # noqa: BLE001 - whatever stops a rank from answering is the cause
                return f"rank {rank}: {error}"
            await asyncio.sleep(self._policy.heartbeat_interval_s)


async def _first(watches: list[Coroutine[Any, Any, str]]) -> str:
    """Result of the first watch that ends; the others are cancelled."""
    tasks = [asyncio.ensure_future(watch) for watch in watches]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # In order of the list: deaths say more than silence.
        return next(task.result() for task in tasks if task.done())
    finally:
        await _cancel(*tasks)


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
