"""What runs, in which order, and the loads on a local stack."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.dispatch import EngineStatus
from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.core.generation import GenerationEvent, GenerationRequest
from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationMode, SpeculationPreference
from outrider.local.bench.accounting import OVERHEAD_PHASES, account_steps
from outrider.local.bench.generators import Generators
from outrider.local.bench.load import requests_of, run_load
from outrider.local.bench.paired import run_paired
from outrider.local.bench.plan import BenchPlan, Mode, Piece
from outrider.local.bench.prompts import Prompt, PromptSet
from outrider.local.bench.records import Record, Run
from outrider.local.bench.session import LocalExtras, run_accounting, run_local
from outrider.local.bench.widths import measure_widths
from outrider.local.config import LocalSettings, scripted_settings
from outrider.local.stack import local_stack, silent

WORDS = PromptSet(name="words", prompts=tuple(Prompt(text=f"word {i}") for i in range(5)))
BOTH = (Mode.PLAIN, Mode.SPECULATIVE)


def quiet(label: str) -> None:
    """A meter that shows nothing."""


def settings(num_seqs: int = 4) -> LocalSettings:
    gate = GateSettings(mode=SpeculationMode.SEQUENTIAL, batch_size_threshold=None)
    return scripted_settings(draft_agreement=0.9, num_seqs=num_seqs, max_model_len=128, gate=gate)


async def test_modes_alternate_and_see_the_same_pieces() -> None:
    seen: list[tuple[Mode, Piece]] = []

    async def generate(mode: Mode, piece: Piece) -> Run:
        seen.append((mode, piece))
        return Run(seconds=1.0, records=(Record(started_s=0.0, messages=((1.0, 1),)),))

    plan = BenchPlan(prompt_sets=(WORDS,), modes=(*BOTH, Mode.HF_PLAIN), concurrency=(1, 2), num_prompts=2, repeats=2)
    metered: list[str] = []
    cells = await run_paired(plan, generate, metered.append)
    assert len(seen) == len(metered) == plan.num_pieces == 2 * (2 * 3 + 1 * 2)
    one_stream = seen[:12]
    assert [mode for mode, _ in one_stream[:3]] == [Mode.PLAIN, Mode.SPECULATIVE, Mode.HF_PLAIN]
    assert [mode for mode, _ in one_stream[3:6]] == [Mode.SPECULATIVE, Mode.HF_PLAIN, Mode.PLAIN]
    for turn in range(0, 12, 3):
        assert len({piece for _, piece in one_stream[turn : turn + 3]}) == 1
    assert {mode for mode, _ in seen[12:]} == set(BOTH)  # the peer takes one request at a time
    assert [len(runs) for one in cells for runs in one.runs.values()] == [2] * 5
    assert cells[0].runs[Mode.PLAIN][0].seconds == 2.0  # two prompts, one after the other


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"repeats": 0}, "repeats: 0"),
        ({"concurrency": ()}, "concurrency"),
        ({"concurrency": (0,)}, "concurrency"),
        ({"request_rate": 0.0}, "request_rate: 0"),
        ({"modes": ()}, "modes"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        BenchPlan(**({"prompt_sets": (WORDS,), "modes": BOTH} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [{"concurrency": (1, 3)}, {"request_rate": 1000.0}])
async def test_closed_and_open_loops_on_a_local_stack(load: dict[str, object]) -> None:
    plan = BenchPlan(prompt_sets=(WORDS,), modes=BOTH, num_prompts=3, max_tokens=6, repeats=1, **load)  # type: ignore[arg-type]
    async with local_stack(settings()) as stack:
        with Generators(stack, max_tokens=plan.max_tokens) as generators:
            cells = await run_paired(plan, generators.generate, quiet)
    for one in cells:
        plain, speculative = (one.runs[mode][0] for mode in BOTH)
        assert plain.num_tokens == speculative.num_tokens == 18
        assert [record.stats.verified for record in plain.records if record.stats] == [0, 0, 0]
        assert plain.steps > 0
        assert set(plain.step_seconds) >= {"plan", "forward", "emit"}


class LostDoor:
    """A deployment that goes away while requests run."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        nothing: list[GenerationEvent] = []
        for event in nothing:
            yield event
        raise EngineUnavailable("gone")

    async def speculation_status(self) -> tuple[EngineStatus, ...]:
        return ()


@pytest.mark.parametrize("load", [{"concurrency": 2, "request_rate": None}, {"concurrency": None, "request_rate": 1e4}])
async def test_a_lost_deployment_ends_a_run_with_its_own_error(load: dict[str, Any]) -> None:
    piece = Piece(prompts=WORDS.prompts[:3], seed=3, **load)
    requests = requests_of(piece, speculates=False, max_tokens=4)
    with pytest.raises(EngineUnavailable, match="gone"):
        await run_load(LostDoor(), piece, requests)


class FakeText:
    started_s, messages, ended_s = 1.0, ((2.0, 1), (2.5, 1)), 3.0


class FakePeer:
    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], bool]] = []

    def generate(self, prompt, *, max_tokens, temperature, seed, assisted):  # type: ignore[no-untyped-def]
        self.calls.append((tuple(prompt), assisted))
        return FakeText()


async def test_a_peer_gets_the_same_chat_prompt() -> None:
    peer = FakePeer()
    piece = Piece(prompts=WORDS.prompts[:2], concurrency=1, request_rate=None, seed=3)
    async with local_stack(settings()) as stack:
        with Generators(stack, max_tokens=2, peer=peer, codec=stack.codec) as generators:
            run = await generators.generate(Mode.HF_ASSISTED, piece)
        with Generators(stack, max_tokens=2) as generators, pytest.raises(ConfigError, match="hf_plain needs a peer"):
            await generators.generate(Mode.HF_PLAIN, piece)
        expected = tuple(stack.codec.encode("user:word 0\nassistant:"))
    assert peer.calls[0] == (expected, True)
    assert (run.seconds, run.num_tokens) == (4.0, 4)


async def test_a_local_run_from_start_to_end_leaves_no_thread() -> None:
    plan = BenchPlan(prompt_sets=(WORDS,), modes=BOTH, num_prompts=1, max_tokens=8, repeats=1)
    result = await run_local(plan, settings(), LocalExtras(off_runs=1), quiet, silent)
    assert set(result.ratios) == {"speculative_over_plain", "off_over_unconfigured"}
    assert result.widths is None  # the formula model has no weights to read
    assert result.off_cost is not None
    assert (result.off_cost.draft_messages, result.off_cost.extra_rows) == (0, 0)


@pytest.mark.parametrize("num_seqs", [1, 3])
async def test_the_loops_own_cost_is_counted_with_and_without_a_draft(num_seqs: int) -> None:
    plain = await account_steps(num_seqs=num_seqs, speculates=False, max_tokens=32, runs=1)
    speculative = await account_steps(num_seqs=num_seqs, speculates=True, max_tokens=32, runs=1)
    assert plain.steps == 32
    assert speculative.steps < 0.6 * plain.steps
    for cost in (plain, speculative):
        assert all(cost.phase_ms[phase] > 0 for phase in OVERHEAD_PHASES)


async def test_accounting_reports_both_loads() -> None:
    result = await run_accounting(max_tokens=8, off_runs=1)
    assert [(cost.num_seqs, cost.temperature, cost.speculates) for cost in result.accounting] == [
        (1, 0.0, False), (1, 0.0, True), (1, 1.0, False), (1, 1.0, True),
        (64, 0.0, False), (64, 0.0, True), (64, 1.0, False), (64, 1.0, True),
    ]  # fmt: skip
    assert result.off_cost is not None
    assert result.off_cost.draft_messages == 0


def test_widths_alternate_with_reads_of_the_weights() -> None:
    from outrider.engine.scripted import ScriptedConfig, ScriptedEngine

    engine = ScriptedEngine(ScriptedConfig())
    times: Iterator[float] = iter([9.0, 1.0, 3.0, 2.0])
    shares = measure_widths(engine, lambda: next(times), rounds=3)
    assert shares.read_s == 2.0
    assert set(shares.step_s) == {1, 6}
    assert engine.num_rows == 200 + 4 * (1 + 6)


def test_modes_differ_in_their_wish_alone() -> None:
    piece = Piece(prompts=WORDS.prompts, concurrency=2, request_rate=None, seed=3)
    off = requests_of(piece, speculates=False, max_tokens=7)
    on = requests_of(piece, speculates=True, max_tokens=7)
    assert {one.speculation.preference for one in off} == {SpeculationPreference.OFF}
    assert {one.speculation.preference for one in on} == {SpeculationPreference.ON}
    assert [replace(one, speculation=off[0].speculation) for one in on] == off
    assert len({one.seed for one in off}) == len(off)
