"""Admission: bounds, fairness per key, the time a refused client is told to wait."""

from dataclasses import replace

import pytest
from tests.unit.router.fakes import ManualTime

from outrider.core.errors import Overloaded
from outrider.router.admission import Admission
from outrider.router.limits import AdmissionLimits

LIMITS = AdmissionLimits(max_requests=4, max_tokens=100, max_requests_per_key=2)


def test_requests_in_flight_are_bounded() -> None:
    admission = Admission(LIMITS, ManualTime())
    permits = [admission.admit(f"k{index}") for index in range(4)]
    with pytest.raises(Overloaded, match="4 requests are in flight; the limit is 4"):
        admission.admit("k9")
    permits[0].release(completed=True)
    admission.admit("k9")


def test_one_key_cannot_take_everything() -> None:
    admission = Admission(LIMITS, ManualTime())
    greedy = [admission.admit("a"), admission.admit("a")]
    with pytest.raises(Overloaded, match="2 requests of this key are in flight; the limit is 2"):
        admission.admit("a")
    admission.admit("b")
    greedy[0].release(completed=True)
    admission.admit("a")


def test_callers_without_a_key_share_the_router() -> None:
    admission = Admission(LIMITS, ManualTime())
    for _ in range(4):
        admission.admit("")
    with pytest.raises(Overloaded, match="the limit is 4"):
        admission.admit("")


def test_tokens_in_flight_are_bounded() -> None:
    admission = Admission(LIMITS, ManualTime())
    first, second = admission.admit("a"), admission.admit("b")
    first.charge(60)
    with pytest.raises(Overloaded, match="60 tokens are in flight and 41 more exceed the limit 100"):
        second.charge(41)
    second.charge(40)
    first.release(completed=True)
    second.release(completed=True)
    assert (admission.requests, admission.tokens) == (0, 0)


def test_request_larger_than_the_token_limit_runs_alone() -> None:
    admission = Admission(LIMITS, ManualTime())
    large = admission.admit("a")
    large.charge(500)
    with pytest.raises(Overloaded):
        admission.admit("b").charge(1)


def test_refused_charge_leaves_no_trace_after_release() -> None:
    admission = Admission(LIMITS, ManualTime())
    first, second = admission.admit("a"), admission.admit("a")
    first.charge(100)
    with pytest.raises(Overloaded):
        second.charge(1)
    second.release(completed=False)
    assert (admission.requests, admission.tokens) == (1, 100)
    second.release(completed=False)  # once is enough
    assert admission.requests == 1


async def test_wait_follows_the_recent_completion_rate() -> None:
    time = ManualTime()
    admission = Admission(replace(LIMITS, max_requests_per_key=4), time)

    def refused_for_s() -> float:
        with pytest.raises(Overloaded) as caught:
            admission.admit("a")
        return caught.value.retry_after_s

    permits = [admission.admit("a") for _ in range(4)]
    assert refused_for_s() == LIMITS.max_retry_after_s  # nothing has completed so far
    for index in range(2):  # one completion every 2 s
        permits[index].release(completed=True)
        admission.admit("a")
        await time.advance(2.0)
    assert refused_for_s() == 2.0
    assert refused_for_s() == 4.0  # the one refused before is first
    await time.advance(1000.0)
    assert refused_for_s() == LIMITS.max_retry_after_s


async def test_refusals_at_a_keys_own_limit_concern_nobody_else() -> None:
    time = ManualTime()
    admission = Admission(replace(LIMITS, max_requests=3, max_requests_per_key=2), time)
    slow = [admission.admit("greedy") for _ in range(2)]
    admission.admit("b").release(completed=True)
    await time.advance(1.0)  # the router completes one request a second
    for _ in range(100):
        with pytest.raises(Overloaded, match="requests of this key") as refused:
            admission.admit("greedy")
        # Nothing of its own has completed; what others complete frees no place of it.
        assert refused.value.retry_after_s == LIMITS.max_retry_after_s
    admission.admit("b")
    with pytest.raises(Overloaded, match="the limit is 3") as refused:
        admission.admit("c")
    assert refused.value.retry_after_s == 1.0
    slow[0].release(completed=True)  # now one of its own has, after a second
    await time.advance(2.0)
    with pytest.raises(Overloaded, match="what is left is for keys that hold less") as refused:
        admission.admit("greedy")
    assert refused.value.retry_after_s == 2.0


async def test_a_pause_is_no_time_that_a_completion_took() -> None:
    time = ManualTime()
    admission = Admission(replace(LIMITS, max_requests=2, max_requests_per_key=1), time)

    async def told_s(refused: str) -> float:
        """One request of a second; what another one is told meanwhile."""
        permit = admission.admit("a")
        await time.advance(1.0)
        with pytest.raises(Overloaded) as caught:
            admission.admit(refused)
        permit.release(completed=True)
        return caught.value.retry_after_s

    assert await told_s("a") == LIMITS.max_retry_after_s  # nothing has completed so far
    await time.advance(600.0)
    assert [await told_s("a") for _ in range(3)] == [1.0, 1.0, 1.0]
    # The same at the limit of the router, whatever key it was that paused.
    admission.update(replace(LIMITS, max_requests=1))
    await time.advance(600.0)
    assert await told_s("b") == 1.0


async def test_time_in_which_others_run_is_no_pause_of_the_router() -> None:
    time = ManualTime()
    admission = Admission(replace(LIMITS, max_requests=2), time)
    admission.admit("a").release(completed=True)
    admission.admit("slow")
    await time.advance(3.0)
    admission.admit("a")
    with pytest.raises(Overloaded, match="the limit is 2") as refused:
        admission.admit("b")
    assert refused.value.retry_after_s == 3.0


async def test_a_key_that_asks_again_and_again_waits_longer_and_nobody_else_does() -> None:
    time = ManualTime()
    admission = Admission(replace(LIMITS, max_requests=1), time)
    admission.admit("a").release(completed=True)
    admission.admit("a")
    await time.advance(1.0)

    def told_s(key_id: str) -> float:
        with pytest.raises(Overloaded, match="the limit is 1") as refused:
            admission.admit(key_id)
        return refused.value.retry_after_s

    assert [told_s("greedy") for _ in range(3)] == [1.0, 2.0, 3.0]
    assert told_s("b") == 2.0  # two keys wait, and each gets a place in turn
    assert told_s("c") == 3.0
    assert told_s("b") == 6.0


def test_new_limits_apply_to_what_comes_next() -> None:
    admission = Admission(LIMITS, ManualTime())
    admission.admit("a")
    admission.admit("b")
    admission.update(replace(LIMITS, max_requests=1))
    with pytest.raises(Overloaded, match="the limit is 1"):
        admission.admit("c")
