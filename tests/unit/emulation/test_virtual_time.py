"""Virtual time: order, determinism, errors, and an end to every thread."""

import threading

import pytest

from outrider.emulation.mailbox import VirtualMailbox
from outrider.emulation.virtual_time import SimulationStuck, VirtualTime


def test_the_earliest_actor_runs_next_and_equals_take_turns() -> None:
    time, seen = VirtualTime(), list[tuple[str, float]]()

    def live(name: str, step: float, times: int) -> None:
        for _ in range(times):
            time.run(step)
            seen.append((name, time.now()))

    time.add("a", lambda: live("a", 2.0, 3))
    time.add("b", lambda: live("b", 3.0, 2))
    time.simulate()
    assert seen == [("a", 2.0), ("b", 3.0), ("a", 4.0), ("b", 6.0), ("a", 6.0)]


def test_nothing_is_switched_while_one_actor_stays_the_earliest() -> None:
    time = VirtualTime()

    def busy() -> None:
        for _ in range(100):
            time.run(0.01)

    time.add("busy", busy)
    time.add("late", lambda: time.run(2.0))
    time.simulate()
    assert time.now() == 2.0
    assert time.num_switches <= 4


def test_messages_arrive_one_hop_later() -> None:
    time = VirtualTime()
    box: VirtualMailbox[str] = VirtualMailbox(time, hop_s=0.25)
    seen: list[tuple[float, list[str]]] = []

    def take() -> None:
        for timeout_s in (0.5, None, 5.0, 0.0):
            taken = box.take(timeout_s)
            seen.append((time.now(), taken))

    def put() -> None:
        time.run(1.0)
        box.put("x")
        time.run(0.5)
        box.put("y")
        box.put("z")

    time.add("taker", take)
    time.add("putter", put)
    time.simulate()
    assert seen == [(0.5, []), (1.25, ["x"]), (1.75, ["y", "z"]), (1.75, [])]


def test_a_message_under_way_is_not_there_yet() -> None:
    time = VirtualTime()
    box: VirtualMailbox[str] = VirtualMailbox(time, hop_s=0.25)
    seen: list[tuple[float, list[str]]] = []

    def live() -> None:
        box.put("x")
        for timeout_s in (0.0, 0.125, 1.0):
            taken = box.take(timeout_s)
            seen.append((time.now(), taken))

    time.add("alone", live)
    time.simulate()
    assert seen == [(0.0, []), (0.125, []), (0.25, ["x"])]


def test_an_error_in_any_actor_ends_everything() -> None:
    time = VirtualTime()
    box: VirtualMailbox[str] = VirtualMailbox(time, hop_s=0.1)
    before = threading.active_count()

    def forever() -> None:
        while True:
            time.run(0.3)

    def fail() -> None:
        time.run(1.0)
        raise ValueError("on purpose")

    time.add("waits", lambda: box.take(None))
    time.add("works", forever, background=True)
    time.add("fails", fail, background=True)
    with pytest.raises(ValueError, match="on purpose"):
        time.simulate()
    assert threading.active_count() == before


def test_actors_that_wait_for_each_other_for_ever_are_an_error() -> None:
    time = VirtualTime()
    box: VirtualMailbox[str] = VirtualMailbox(time, hop_s=0.1)
    time.add("waits", lambda: box.take(None))
    time.add("waits too", lambda: VirtualMailbox[str](time, hop_s=0.1).take(None))
    with pytest.raises(SimulationStuck):
        time.simulate()


def test_background_actors_end_with_the_others() -> None:
    time, before = VirtualTime(), threading.active_count()

    def forever() -> None:
        while True:
            time.run(0.1)

    time.add("background", forever, background=True)
    time.add("main", lambda: time.run(1.0))
    time.simulate()
    assert time.now() == pytest.approx(1.0)
    assert threading.active_count() == before


def test_hundreds_of_actors() -> None:
    time, total = VirtualTime(), list[float]()

    def live(step: float) -> None:
        for _ in range(5):
            time.run(step)
        total.append(time.now())

    for index in range(200):
        time.add(f"actor {index}", lambda step=index + 1.0: live(step))  # type: ignore[misc]
    time.simulate()
    assert total == [5.0 * (index + 1) for index in range(200)]
