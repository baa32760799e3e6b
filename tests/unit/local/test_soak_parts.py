"""The judges of a soak test find what they are there to find."""

import asyncio
import math
import sys
from asyncio.subprocess import PIPE

import pytest

from outrider.core.dispatch import DraftLinkStatus, EngineStatus
from outrider.core.errors import ConfigError
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationPreference
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.local.draft_handle import DraftLoad
from outrider.local.soak.cases import make_catalogue
from outrider.local.soak.leaks import draft_leaks, target_leaks
from outrider.local.soak.margin import top_two_margin
from outrider.local.soak.memory import MemoryWatch, trend_of
from outrider.local.soak.solo import TextJudge, first_difference
from outrider.local.soak.streams import Outcome, Tally


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [((1, 2), (1, 2), None), ((), (), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((1, 2, 3), (1,), 1)],
)
def test_first_difference(one: tuple[int, ...], other: tuple[int, ...], index: int | None) -> None:
    assert first_difference(one, other) == index


def test_a_text_that_parts_is_excused_by_a_tiny_margin_only() -> None:
    outcomes = [
        Outcome(case=5, token_ids=(1,), cut=True),
        Outcome(case=0, token_ids=(1, 2, 3)),
        Outcome(case=1, token_ids=(1, 9, 9)),
        Outcome(case=1, token_ids=(1, 9, 9)),  # the same again
        Outcome(case=2, token_ids=(7,), aborted=True),  # the beginning of its text
        Outcome(case=3, token_ids=(7, 8), aborted=True),
        Outcome(case=4, token_ids=(5,)),  # too short
    ]
    judge = TextJudge({0: (1, 2, 3), 1: (1, 2, 3), 2: (7, 8, 9), 3: (7, 7, 7), 4: (5, 6), 5: (1, 2)})
    margins = {1: 1e-4, 3: 0.5, 4: 0.5}
    asked: list[tuple[int, tuple[int, ...]]] = []

    def margin(case: int, output: tuple[int, ...]) -> float:
        asked.append((case, output))
        return margins[case]

    for one in outcomes:
        judge.take(one)
    found = judge.divergences(margin)
    assert [(one.case, one.index, one.excused) for one in found] == [(1, 1, True), (3, 1, False), (4, 1, False)]
    assert asked == [(1, (1,)), (3, (7,)), (4, (5,))]
    assert "WRONG" in str(found[1])


def test_the_margin_is_that_of_the_formula() -> None:
    config = ScriptedConfig(slope=0.5)
    request = SequenceRequest(
        request_id="r",
        prompt_token_ids=(5, 7),
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=8),
        noise_key=1,
    )
    assert top_two_margin(ScriptedEngine(config), request, (), 64) == pytest.approx(0.5)
    sampled = SequenceRequest(
        request_id="r",
        prompt_token_ids=(5, 7),
        sampling=SamplingParams(temperature=1.0),
        stop=StopConditions(max_tokens=8),
        noise_key=1,
    )
    noisy = top_two_margin(ScriptedEngine(config), sampled, (3,), 64)
    assert math.isfinite(noisy)
    assert noisy > 0.0
    assert noisy != pytest.approx(0.5)


def test_leaks_are_named() -> None:
    clean = EngineStatus(engine_id="e", ready=True)
    assert target_leaks(clean) == []
    assert draft_leaks(None) == draft_leaks(DraftLoad(sequences=0, kv_usage=0.0)) == []
    link = DraftLinkStatus(address="a", connected=True, open_sequences=2)
    dirty = EngineStatus(engine_id="e", ready=True, running=1, waiting=3, kv_usage=0.25, draft_links=(link,))
    assert target_leaks(dirty) == [
        "target: 1 sequences running and 3 waiting",
        "target: 25.0% of the KV blocks in use",
        "target: 2 sequences open on the draft",
    ]
    assert draft_leaks(DraftLoad(sequences=4, kv_usage=0.5)) == [
        "draft: 4 sequences held",
        "draft: 50.0% of the KV blocks in use",
    ]


def test_a_catalogue_is_mixed_seeded_and_can_run_alone() -> None:
    catalogue = make_catalogue(["a", "b"], size=32, max_tokens=64, seed=3)
    assert catalogue == make_catalogue(["a", "b"], size=32, max_tokens=64, seed=3)
    assert len({one.max_tokens for one in catalogue.requests}) > 8
    assert len({one.seed for one in catalogue.requests}) == 32
    assert {one.temperature for one in catalogue.requests} == {0.0, 0.7, 1.0}
    assert catalogue.request(3, "id").request_id == "id"
    assert catalogue.alone(3).speculation.preference is SpeculationPreference.OFF
    with pytest.raises(ConfigError, match="must be at least 1"):
        make_catalogue(["a"], size=0, max_tokens=1, seed=1)


@pytest.mark.parametrize(
    ("points", "verdict", "slope"),
    [
        ([(float(at), 100.0) for at in range(0, 900, 10)], "flat", 0.0),
        ([(float(at), 100.0 + at / 60) for at in range(0, 900, 10)], "flat", 1.0),
        ([(float(at), 100.0 + 3 * at / 60) for at in range(0, 900, 10)], "GROWS", 3.0),
        # All of the growth lies in the warm-up.
        ([(float(at), min(100.0 + at, 200.0)) for at in range(0, 900, 10)], "flat", 0.0),
        # Steep, but nobody can tell from half a minute.
        (
            [(float(at), 100.0 + at) for at in range(0, 40, 2)],
            "too short to tell, needs 60 s behind a warm-up of a quarter",
            60.0,
        ),
    ],
)
def test_memory_is_judged_by_its_line_after_the_warm_up(
    points: list[tuple[float, float]], verdict: str, slope: float
) -> None:
    trend = trend_of("p", [(at, size * 2**20) for at, size in points])
    assert trend.grows is (verdict == "GROWS")
    assert trend.slope_mib_per_minute == pytest.approx(slope, abs=1e-6)
    assert str(trend).endswith(f" s: {verdict}")


async def test_every_process_is_watched() -> None:
    watch = MemoryWatch(interval_s=0.01)
    with watch.watching():
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(1, flush=True); input()", stdin=PIPE, stdout=PIPE
        )
        assert child.stdout is not None
        assert child.stdin is not None
        await child.stdout.readline()
        ours = {"this process", f"child {child.pid}"}
        # Other tests' processes may be there as well.
        async with asyncio.timeout(60):
            while not ours <= {one.process for one in watch.trends()}:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        child.stdin.write(b"\n")
        await child.wait()
    assert all(one.level_mib > 1 for one in watch.trends() if one.process in ours)


def test_a_bad_request_that_was_answered_is_told_once() -> None:
    tally = Tally()
    for problem in (None, "n: was answered", "n: was answered"):
        tally.take_bad(problem)
    assert (tally.requests, tally.refused, tally.not_refused) == (3, 1, ["n: was answered"])
