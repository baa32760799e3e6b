"""A hung engine thread is told from a busy or an idle one."""

import pytest
from tests.support.loopback import ManualClock

from outrider.core.errors import EngineUnavailable
from outrider.target.stall import StallWatch


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_counter_that_moves_is_well_however_slowly(clock: ManualClock) -> None:
    watch = StallWatch(limit_s=10.0, clock=clock)
    for beat in range(5):
        watch.check(beat)
        clock.advance(10.0)
        watch.check(beat)


def test_a_counter_that_stands_still_is_a_hung_step(clock: ManualClock) -> None:
    watch = StallWatch(limit_s=10.0, clock=clock)
    watch.check(0)
    clock.advance(10.5)
    with pytest.raises(EngineUnavailable, match=r"one step for 10\.5 s"):
        watch.check(0)


def test_nobody_asking_is_no_stall(clock: ManualClock) -> None:
    watch = StallWatch(limit_s=10.0, clock=clock)
    clock.advance(1000.0)
    watch.check(0)
    watch.check(0)
