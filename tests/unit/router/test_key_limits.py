"""Limits of one API key, and fairness between keys."""

import pytest
from tests.unit.router.fakes import ManualTime, World, settle

from outrider.core.errors import ConfigError, Overloaded
from outrider.router.admission import Admission
from outrider.router.limits import AdmissionLimits, KeyLimits

LIMITS = AdmissionLimits(max_requests=100, max_tokens=1000, max_requests_per_key=100)


def admission_of(*, limits: AdmissionLimits = LIMITS, **key_limits: int) -> tuple[Admission, ManualTime]:
    """Key "k" has the limits, all others have none."""
    time, mine = ManualTime(), KeyLimits(**key_limits)
    return Admission(limits, time, lambda key_id: mine if key_id == "k" else KeyLimits()), time


def test_concurrent_sequences_of_a_key_are_bounded() -> None:
    admission, _ = admission_of(max_concurrent_sequences=5)
    first = admission.admit("k", 3)
    with pytest.raises(Overloaded, match="3 sequences of this key are in flight and 3 more exceed its limit 5"):
        admission.admit("k", 3)
    admission.admit("other", 16)
    admission.admit("k", 2)
    first.release(completed=True)
    admission.admit("k", 3)


async def test_requests_per_minute_say_exactly_when_to_come_back() -> None:
    admission, time = admission_of(requests_per_minute=2)
    for _ in range(2):
        admission.admit("k").release(completed=True)
    with pytest.raises(Overloaded, match="used its 2 requests per minute") as refused:
        admission.admit("k")
    assert refused.value.retry_after_s == pytest.approx(30.0)
    admission.admit("other")
    await time.advance(30.0)
    admission.admit("k")


async def test_tokens_per_minute_count_prompts_and_committed_output() -> None:
    admission, time = admission_of(tokens_per_minute=60)
    permit = admission.admit("k")
    permit.charge(500, prompt_tokens=40)
    admission.admit("k").release(completed=True)
    permit.count_output(50)
    with pytest.raises(Overloaded, match="used its 60 tokens per minute") as refused:
        admission.admit("k")
    assert refused.value.retry_after_s == pytest.approx(31.0)
    permit.count_output(10)
    await time.advance(31.0)
    with pytest.raises(Overloaded) as refused:
        admission.admit("k")
    assert refused.value.retry_after_s == pytest.approx(10.0)


def test_a_refused_request_costs_nothing() -> None:
    admission, _ = admission_of(max_concurrent_sequences=1, requests_per_minute=2)
    held = admission.admit("k")
    for _ in range(5):
        with pytest.raises(Overloaded, match="sequences"):
            admission.admit("k")
    held.release(completed=True)
    admission.admit("k")


def test_the_last_quarter_is_kept_for_keys_that_hold_less_than_an_equal_share() -> None:
    admission = Admission(LIMITS, ManualTime())
    admission.admit("meek")
    for _ in range(74):
        admission.admit("greedy")
    with pytest.raises(Overloaded, match="74 requests of this key are in flight; what is left is for keys"):
        admission.admit("greedy")
    for _ in range(25):
        admission.admit("meek")


def test_a_key_alone_may_take_everything() -> None:
    admission = Admission(LIMITS, ManualTime())
    for _ in range(100):
        admission.admit("only")
    with pytest.raises(Overloaded, match="the limit is 100"):
        admission.admit("only")


def test_tokens_are_shared_in_the_same_way() -> None:
    admission = Admission(LIMITS, ManualTime())
    meek, greedy, more = admission.admit("meek"), admission.admit("greedy"), admission.admit("greedy")
    meek.charge(10)
    greedy.charge(700)
    with pytest.raises(Overloaded, match="700 tokens of this key are in flight"):
        more.charge(100)
    meek.charge(200)


@pytest.mark.parametrize("name", ["max_concurrent_sequences", "requests_per_minute", "tokens_per_minute"])
def test_a_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: 0 is below 1"):
        KeyLimits(**{name: 0})


async def test_the_service_charges_choices_prompt_and_output() -> None:
    limits = KeyLimits(max_concurrent_sequences=2, tokens_per_minute=6)
    async with World(limits_of=lambda key_id: limits) as world:
        client = world.open(key_id="k", n=2)
        submits = [await world.engine.submits.get() for _ in range(2)]
        with pytest.raises(Overloaded, match="its limit 2"):
            await world.open(key_id="k").done()
        world.engine.text(submits[0], "ab")
        world.engine.text(submits[1], "cd")
        await client.done()
        await settle()
        with pytest.raises(Overloaded, match="6 tokens per minute"):
            await world.open(key_id="k").done()
