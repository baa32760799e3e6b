"""From records to rows, ratios, JSON and advice."""

import json

import pytest
from tests.unit.local.bench_runs import cell, run, stats

from outrider.local.bench.accounting import StepCost
from outrider.local.bench.advice import advise
from outrider.local.bench.off_cost import OffCost
from outrider.local.bench.plan import Mode
from outrider.local.bench.records import Record, merged, percentile, summarised
from outrider.local.bench.report import report_as_json
from outrider.local.bench.result import BenchResult
from outrider.local.bench.widths import WidthShares


def result(*cells: object, **others: object) -> BenchResult:
    return BenchResult(dtype="float32", threads=2, cells=cells, **others)  # type: ignore[arg-type]


def test_latencies_follow_the_glossary() -> None:
    record = Record(started_s=1.0, messages=((3.0, 2), (4.0, 1), (6.0, 3)))
    assert (record.num_tokens, record.ttft_s, record.tpot_s) == (6, 2.0, 3.0 / 5)
    assert record.gaps_s == [1.0, 2.0]
    assert Record(started_s=0.0, messages=((1.0, 1),)).tpot_s is None


def test_percentiles_are_observed_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5.0], 99) == 5.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_pieces_merge_into_one_run() -> None:
    both = merged([run(10, steps=2), run(5, steps=1)])
    assert (both.seconds, both.num_tokens, both.steps) == (3.0, 20, 3)
    assert both.step_seconds == {"plan": 1.5}


def test_a_row_takes_the_median_repeat_and_pools_acceptance() -> None:
    numbers = summarised([run(10, stats([4, 4], [3, 1])), run(30, stats([4, 2], [4, 1])), run(20)])
    assert (numbers.tok_s, numbers.tok_s_low, numbers.tok_s_high) == (20, 10, 30)
    assert numbers.acceptance_rate == 9 / 14
    assert numbers.mean_acceptance_length == 1 + 9 / 8
    assert numbers.acceptance_per_position == (7 / 8, 2 / 6)
    assert numbers.ttft_p50_s == 1.0
    assert summarised([run(1)]).acceptance_rate is None


def test_ratios_compare_repeats_side_by_side() -> None:
    one = cell({Mode.PLAIN: [run(10), run(20), run(10)], Mode.SPECULATIVE: [run(20), run(20), run(30)]})
    other = cell({Mode.PLAIN: [run(10)], Mode.SPECULATIVE: [run(80)]}, name="chat")
    assert result(one, other).ratios == {"speculative_over_plain": pytest.approx(4.0)}  # of 2 and 8


def test_every_ratio_is_there_once_it_was_measured() -> None:
    modes = {mode: [run(10)] for mode in Mode}
    full = result(
        cell(modes),
        cell({Mode.PLAIN: [run(60)], Mode.SPECULATIVE: [run(30)]}, concurrency=16),
        widths=WidthShares(read_s=1.0, step_s={1: 2.0, 6: 4.0}),
        off_cost=OffCost(off_ms=(1.0, 3.0, 2.0), unconfigured_ms=(2.0, 4.0, 1.0), draft_messages=0, extra_rows=0),
    )
    assert full.ratios == {
        "speculative_over_plain": pytest.approx(1.0),
        "plain_over_hf_plain": pytest.approx(1.0),
        "speculative_over_hf_assisted": pytest.approx(1.0),
        "concurrent16_over_1": pytest.approx(6.0),
        "off_over_unconfigured": pytest.approx(1.0),
        "width1_share_of_bound": 0.5,
        "width6_share_of_bound": 0.25,
    }
    assert result(cell({Mode.PLAIN: [run(60)]}, concurrency=16)).ratios == {}


def test_the_report_has_the_fixed_shape() -> None:
    report = json.loads(
        json.dumps(report_as_json(result(cell({Mode.PLAIN: [run(10)], Mode.SPECULATIVE: [run(20, steps=2)]}))))
    )
    assert set(report) == {"dtype", "threads", "rows", "ratios", "step_ms", "details"}
    row_keys = ("prompt_set concurrency mode tok_s ttft_p50_s tpot_p50_s itl_p99_s "
                "acceptance_rate mean_acceptance_length")  # fmt: skip
    assert all(list(row) == row_keys.split() for row in report["rows"])
    assert [row["mode"] for row in report["rows"]] == ["plain", "speculative"]
    assert list(report["step_ms"]) == ["plan", "wait", "forward", "verify", "commit", "emit"]
    assert report["step_ms"]["plan"] == 500.0
    assert report["details"]["speedups"][0] | {} == {
        "prompt_set": "code", "concurrency": 1, "over": "plain", "of": "speculative",
        "median": 2.0, "low": 2.0, "high": 2.0,
    }  # fmt: skip


def test_accounting_shows_speculation_of_one_sequence() -> None:
    costs = [
        StepCost(
            num_seqs=num_seqs, speculates=speculates, temperature=0.0, steps=9, phase_ms={"plan": plan, "forward": 7.0}
        )
        for num_seqs, speculates, plan in ((1, False, 1.0), (1, True, 2.0), (64, False, 3.0), (64, True, 4.0))
    ]
    shown = result(accounting=tuple(costs)).step_ms
    assert (shown["plan"], shown["forward"], shown["emit"]) == (2.0, 7.0, 0.0)
    assert [cost.overhead_ms for cost in costs] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("plain", "speculative", "accepted", "draft", "begins"),
    [
        (10, 9, [2, 1], "self", "Leave speculation off with this draft and try another draft, or n-grams"),
        (10, 9, [2, 1], "ngram", "Leave speculation off with this draft and try another draft: "),
        (10, 9, [9, 8], "self", "Leave speculation off, or take a cheaper draft"),
        (10, 20, [9, 8], "self", "Enable speculation: measured speed-up 2.00x at acceptance 0.85; try a longer K"),
        (10, 20, [9, 1], "self", "Enable speculation: measured speed-up 2.00x at acceptance 0.50; try a shorter K"),
        (10, 20, [8, 4], "self", "Enable speculation: measured speed-up 2.00x at acceptance 0.60; K = 2 fits"),
    ],
)
def test_advice_follows_its_rule(plain: int, speculative: int, accepted: list[int], draft: str, begins: str) -> None:
    measured = cell({Mode.PLAIN: [run(plain)], Mode.SPECULATIVE: [run(speculative, stats([10, 10], accepted))]})
    advice = str(advise(result(measured, draft=draft)))
    assert advice.startswith(begins)
    assert "(rule: " in advice


def test_advice_names_the_loads_where_speculation_does_not_pay() -> None:
    good = cell({Mode.PLAIN: [run(10)], Mode.SPECULATIVE: [run(30, stats([10, 10], [8, 4]))]})
    bad = cell({Mode.PLAIN: [run(10)], Mode.SPECULATIVE: [run(9, stats([10, 10], [8, 4]))]}, concurrency=16)
    assert "Enable speculation, except for code at concurrency 16: " in str(advise(result(good, bad)))


def test_no_advice_without_a_comparison() -> None:
    assert advise(result(cell({Mode.PLAIN: [run(10)]}))) is None
    unverified = cell({Mode.PLAIN: [run(10)], Mode.SPECULATIVE: [run(10)]})
    assert "no draft token was verified" in str(advise(result(unverified)))
