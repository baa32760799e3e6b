"""Seats are shared between API keys: none starves, and one alone has everything."""

from dataclasses import replace

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.request import SequenceRequest
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig


def keyed(key_id: str, *, max_tokens: int = 4, priority: int = 0, prompt_len: int = 3) -> SequenceRequest:
    made = request(tuple(range(1, prompt_len + 1)), max_tokens=max_tokens)
    return replace(made, key_id=key_id, priority=priority)


def engine_of(*, seats: int = 2, waiting: int = 256, blocks: int = 64) -> LocalEngine:
    target = ScriptedConfig(block_size=4, num_blocks=blocks)
    return LocalEngine(target=target, config=TargetConfig(max_num_seqs=seats, max_waiting_seqs=waiting))


def order_of_admission(engine: LocalEngine, keys: dict[int, str]) -> list[str]:
    """The API keys in the order in which their sequences got a first token."""
    order: list[str] = []
    seen: set[int] = set()
    while engine.loop.scheduler.has_work:
        engine.step()
        for stream_key, key_id in keys.items():
            if engine.results[stream_key].token_ids and stream_key not in seen:
                seen.add(stream_key)
                order.append(key_id)
    return order


def test_a_newcomer_waits_for_one_seat_however_many_wait_before_it() -> None:
    engine = engine_of(seats=2)
    keys = {engine.submit(keyed("greedy")): "greedy" for _ in range(20)}
    engine.step()
    keys |= {engine.submit(keyed("meek")): "meek" for _ in range(3)}
    order = order_of_admission(engine, keys)
    assert order[:2] == ["greedy", "greedy"]
    assert order[2:8].count("meek") == 3, "every other seat until it has all"
    assert order[8:] == ["greedy"] * 15


def test_one_who_comes_back_at_once_takes_turns_with_those_who_wait() -> None:
    engine = engine_of(seats=1)
    keys = {engine.submit(keyed("a")): "a" for _ in range(4)}
    engine.step()
    order: list[str] = []
    again = engine.submit(keyed("b"))
    for _ in range(100):
        if len(order) == 6:
            break
        engine.step()
        if engine.results[again].end is not None:
            order.append("b")
            again = engine.submit(keyed("b"))
        for stream_key in [one for one in keys if engine.results[one].end is not None]:
            order.append(keys.pop(stream_key))
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_no_priority_reaches_past_another_key() -> None:
    engine = engine_of(seats=1)
    keys = {engine.submit(keyed("pushy", priority=100)): "pushy" for _ in range(6)}
    engine.step()
    keys[engine.submit(keyed("meek"))] = "meek"
    assert order_of_admission(engine, keys) == ["pushy", "meek", *["pushy"] * 5]


def test_priority_orders_the_requests_of_one_key() -> None:
    engine = engine_of(seats=1)
    keys = {}
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 7)):
        keys[engine.submit(keyed("k", priority=priority))] = name
    assert order_of_admission(engine, keys) == ["high", "first", "second", "low"]


def test_one_key_alone_has_all_seats() -> None:
    engine = engine_of(seats=4)
    for _ in range(8):
        engine.submit(keyed("only"))
    engine.step()
    assert len(engine.loop.scheduler.running) == 4


def test_a_long_text_is_not_overtaken_for_ever() -> None:
    engine = engine_of(seats=4, blocks=8)
    engine.submit(keyed("a", max_tokens=12))
    engine.step()
    long = engine.submit(keyed("a", prompt_len=24, max_tokens=2))
    for _ in range(200):
        if engine.results[long].token_ids:
            break
        while engine.loop.scheduler.can_submit("b") and engine.loop.scheduler.num_waiting < 3:
            engine.submit(keyed("b", max_tokens=2))
        engine.step()
    assert engine.results[long].token_ids


@pytest.mark.parametrize(("greedy", "room"), [(74, True), (75, False)])
def test_the_last_quarter_of_the_line_is_for_keys_with_fewer_waiting(greedy: int, room: bool) -> None:
    engine = engine_of(seats=1, waiting=100)
    engine.submit(keyed("running", max_tokens=40))
    engine.step()
    engine.submit(keyed("meek"))
    for _ in range(greedy - 1):
        engine.submit(keyed("greedy"))
    assert engine.loop.scheduler.num_waiting == greedy
    assert engine.loop.scheduler.can_submit("greedy") is room
    assert engine.loop.scheduler.can_submit("meek")
    assert engine.loop.scheduler.can_submit("new")


def test_a_full_line_is_full_for_everybody() -> None:
    engine = engine_of(seats=1, waiting=4)
    engine.submit(keyed("running", max_tokens=40))
    engine.step()
    for _ in range(4):
        engine.submit(keyed("k"))
    assert not engine.loop.scheduler.can_submit("k")
    assert not engine.loop.scheduler.can_submit("new")
