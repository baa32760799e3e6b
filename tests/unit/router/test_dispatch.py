"""The dispatch policy: prefix affinity, then the least loaded engine."""

from dataclasses import replace

import pytest

from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.router.dispatch import Candidate, Dispatcher, DispatchSettings, affinity_key

SETTINGS = DispatchSettings(affinity_tokens=4, affinity_slack=2)
ENGINES = [Candidate(replica_id=f"e{index}", ready=True) for index in range(3)]


def loaded(*loads: int) -> list[Candidate]:
    return [replace(one, outstanding=load) for one, load in zip(ENGINES, loads, strict=True)]


def test_short_prompts_go_to_the_least_loaded() -> None:
    assert Dispatcher(SETTINGS).choose((1, 2), loaded(3, 1, 2)) == "e1"


def test_equals_take_turns() -> None:
    dispatcher = Dispatcher(SETTINGS)
    chosen = [dispatcher.choose((1,), ENGINES) for _ in range(6)]
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == ["e0", "e1", "e2"]


def test_prompts_with_one_prefix_go_to_one_engine() -> None:
    dispatcher = Dispatcher(SETTINGS)
    assert len({dispatcher.choose((1, 2, 3, 4, tail), ENGINES) for tail in range(10)}) == 1


def test_prefixes_spread_over_engines() -> None:
    dispatcher = Dispatcher(SETTINGS)
    assert {dispatcher.choose((head, 2, 3, 4), ENGINES) for head in range(50)} == {"e0", "e1", "e2"}


def test_order_and_other_engines_do_not_move_a_prefix() -> None:
    prompts = [(head, 2, 3, 4) for head in range(50)]
    home = {one: Dispatcher(SETTINGS).choose(one, ENGINES) for one in prompts}
    assert home == {one: Dispatcher(SETTINGS).choose(one, ENGINES[::-1]) for one in prompts}
    for one in prompts:
        if home[one] != "e2":
            assert Dispatcher(SETTINGS).choose(one, ENGINES[:2]) == home[one]


def test_preferred_engine_is_left_when_it_is_clearly_busier() -> None:
    prompt = (1, 2, 3, 4)
    home = Dispatcher(SETTINGS).choose(prompt, ENGINES)
    busy = [replace(one, outstanding=2 if one.replica_id == home else 0) for one in ENGINES]
    assert Dispatcher(SETTINGS).choose(prompt, busy) == home
    busier = [replace(one, outstanding=3 if one.replica_id == home else 0) for one in ENGINES]
    assert Dispatcher(SETTINGS).choose(prompt, busier) != home


def test_prefix_hash_needs_a_whole_prefix() -> None:
    assert affinity_key((1, 2, 3), 4) is None
    assert affinity_key((1, 2, 3, 4), 4) == affinity_key((1, 2, 3, 4, 5), 4)
    assert affinity_key((1, 2, 3, 4), 4) != affinity_key((1, 2, 4, 3), 4)


def test_load_is_the_report_corrected_by_what_happened_since() -> None:
    reported = Candidate(replica_id="e", ready=True, outstanding=5, reported=10, outstanding_at_report=3)
    assert reported.load == 12
    assert replace(reported, outstanding=1).load == 8
    assert replace(reported, reported=0, outstanding_at_report=0).load == 5


@pytest.mark.parametrize("flag", ["stale", "leaving"])
def test_doubtful_engine_is_used_only_when_no_other_is_left(flag: str) -> None:
    doubtful = Candidate(replica_id="e0", ready=True, stale=flag == "stale", leaving=flag == "leaving")
    assert Dispatcher(SETTINGS).choose((1,), [doubtful, replace(ENGINES[1], outstanding=9)]) == "e1"
    assert Dispatcher(SETTINGS).choose((1,), [doubtful, replace(ENGINES[1], ready=False)]) == "e0"


def test_no_engine_says_why() -> None:
    with pytest.raises(EngineUnavailable, match="the directory lists no engine"):
        Dispatcher().choose((1,), [])
    gone = [Candidate(replica_id="e0", ready=False, problem="rebuilding: rank 1 died")]
    with pytest.raises(EngineUnavailable, match="no engine is ready: e0: rebuilding: rank 1 died"):
        Dispatcher().choose((1,), gone)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="affinity_tokens"):
        DispatchSettings(affinity_tokens=0)
    with pytest.raises(ConfigError, match="affinity_slack"):
        DispatchSettings(affinity_slack=-1)
