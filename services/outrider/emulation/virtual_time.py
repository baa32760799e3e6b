"""Discrete-event time for actors that are ordinary threads.

Exactly one actor runs at any moment; the others wait for the baton. An actor gives it up when it
spends time or waits for a message, and the actor with the earliest wake-up gets it next; among equals
the one that has waited longest. So a simulation is deterministic, and software costs no time at all.
Nothing is switched while the running actor stays the earliest.
"""

import heapq
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count

__all__ = ["Actor", "SimulationStuck", "VirtualTime"]

_NEVER = float("inf")


class SimulationStuck(RuntimeError):
    """Every actor waits for a message that nobody will send."""


class _Ended(BaseException):
    """Unwinds an actor when the simulation is over. No `except Exception` may hold it up."""


class Actor:
    """One thread of a simulation."""

    def __init__(self, name: str, body: Callable[[], object], *, background: bool) -> None:
        self.name = name
        self.background = background
        self.baton = threading.Lock()  # locked: somebody else runs
        self.baton.acquire()
        self.ticket = 0
        """Number of its valid entry in the queue; older entries are void."""
        self.body = body
        self.thread: threading.Thread | None = None


class VirtualTime:
    """The clock and the scheduler. Implements `core.ports.Clock` and `engine.emulated.clock.DeviceClock`.

    `now` is the running actor's time, so one object serves every actor as its clock.
    """

    counts_software = False

    def __init__(self) -> None:
        self._now = 0.0
        self._queue: list[tuple[float, int, Actor, int]] = []
        self._order = count()
        self._actors: list[Actor] = []
        self._running: Actor | None = None
        self._alive = 0
        self._failure: BaseException | None = None
        self._ending = False
        self._over = threading.Event()
        self.num_switches = 0
        """Times that the baton went from one actor to another."""

    def now(self) -> float:
        """Seconds since the start of the simulation."""
        return self._now

    def add(self, name: str, body: Callable[[], object], *, background: bool = False) -> Actor:
        """An actor that starts with the simulation. Background actors do not keep it going."""
        actor = Actor(name, body, background=background)
        self._actors.append(actor)
        return actor

    def simulate(self) -> None:
        """Run until every actor that is not in the background has returned; then all threads are over.

        Raises the first exception that left an actor, `SimulationStuck` when nobody can go on.
        """
        self._alive = sum(not actor.background for actor in self._actors)
        for actor in self._actors:
            actor.thread = threading.Thread(target=self._live, args=(actor,), name=actor.name, daemon=True)
            self._enqueue(actor, self._now)
            actor.thread.start()
        try:
            if self._alive:
                self._pass_on()
                self._over.wait()
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    def run(self, seconds: float) -> None:
        """The running actor spends this much time."""
        self._sleep_until(self._now + seconds)

    def wait_until(self, moment: float | None) -> None:
        """The running actor does nothing until then, or until `wake` makes it earlier; None: until `wake`."""
        self._sleep_until(_NEVER if moment is None else max(moment, self._now))

    def wake(self, actor: Actor, moment: float) -> None:
        """Let a waiting actor go on at `moment`, unless it does so earlier anyway. Called by the running actor."""
        self._enqueue(actor, max(moment, self._now))

    @property
    def current(self) -> Actor:
        """The running actor. Raises `RuntimeError` outside a simulation."""
        if self._running is None:
            raise RuntimeError("no actor is running")
        return self._running

    def _end(self) -> None:
        """Unwind every actor that is left, and wait for the threads."""
        self._ending = True
        for actor in self._actors:
            with suppress(RuntimeError):  # it is free already: its actor has not taken it yet
                actor.baton.release()
        for actor in self._actors:
            if actor.thread is not None:
                actor.thread.join()

    def _sleep_until(self, moment: float) -> None:
        if self._ending:  # interrupted from outside
            raise _Ended
        actor = self.current
        if moment != _NEVER:
            if self._first() > moment:
                self._now = moment
                return
            self._enqueue(actor, moment)
        self._pass_on()
        self._await_baton(actor)

    def _first(self) -> float:
        """Time of the earliest valid entry; void ones are dropped."""
        while self._queue and self._queue[0][3] != self._queue[0][2].ticket:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else _NEVER

    def _enqueue(self, actor: Actor, moment: float) -> None:
        actor.ticket += 1
        heapq.heappush(self._queue, (moment, next(self._order), actor, actor.ticket))

    def _pass_on(self) -> None:
        """Give the baton to the earliest actor."""
        if self._first() == _NEVER:
            self._finish(SimulationStuck("every actor waits for a message that nobody will send"))
            return
        moment, _, actor, _ = heapq.heappop(self._queue)
        actor.ticket += 1  # it has no entry any more
        self._now = moment
        if actor is not self._running:
            self.num_switches += 1
        self._running = actor
        actor.baton.release()

    def _await_baton(self, actor: Actor) -> None:
        actor.baton.acquire()
        if self._ending:
            raise _Ended

    def _live(self, actor: Actor) -> None:
        try:
            self._await_baton(actor)
            actor.body()
        except _Ended:
            return
        except BaseException as error:  # noqa: BLE001  raised again by `simulate`
            self._finish(error)
            return
        self._alive -= not actor.background
        if self._alive:
            self._pass_on()
        else:
            self._finish(None)

    def _finish(self, failure: BaseException | None) -> None:
        if not self._over.is_set():
            self._failure = failure
            self._over.set()
