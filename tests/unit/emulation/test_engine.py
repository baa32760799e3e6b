"""The emulated engine as a `ModelEngine`: logits, KV checks, device time, ordinary configuration."""

import pytest
import torch

from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.propose import ProposeRow, propose
from outrider.decoding.verify import VerifyRow, verify
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.config import EngineConfig
from outrider.engine.emulated.clock import WallClock
from outrider.engine.emulated.device import h100_llama_1b, h100_tp4_llama_70b
from outrider.engine.emulated.engine import EmulatedConfig, EmulatedEngine
from outrider.engine.emulated.text import SyntheticText, TextSettings
from outrider.engine.factory import build_engine

TEXT = TextSettings(acceptance=0.6)
PROMPT = [7, 8, 9, 10, 11]
HEADER = (7, 8, 9, 10)
GREEDY = SamplingParams(temperature=0.0)


class CountingClock:
    """Adds up what devices spend."""

    def __init__(self, *, counts_software: bool = False) -> None:
        self.spent = 0.0
        self.counts_software = counts_software

    def now(self) -> float:
        return self.spent

    def run(self, seconds: float) -> None:
        self.spent += seconds


def target(clock: CountingClock | None = None) -> EmulatedEngine:
    config = EmulatedConfig(role="target", device=h100_tp4_llama_70b(), text=TEXT, num_blocks=32)
    return EmulatedEngine(config, clock or CountingClock())


def draft(clock: CountingClock | None = None) -> EmulatedEngine:
    config = EmulatedConfig(role="draft", device=h100_llama_1b(), text=TEXT, num_blocks=32)
    return EmulatedEngine(config, clock or CountingClock())


def piece(ids: list[int], start: int = 0, table: tuple[int, ...] = (3, 1), num_logits: int = 1) -> ForwardSlice:
    return ForwardSlice(token_ids=ids, start=start, block_table=table, num_logits=num_logits)


def launch(engine: EmulatedEngine, *slices: ForwardSlice) -> torch.Tensor:
    return engine.forward(ForwardBatch(slices=slices))


def run(engine: EmulatedEngine, *slices: ForwardSlice) -> torch.Tensor:
    logits = launch(engine, *slices)
    engine.wait()
    return logits


def test_the_targets_greedy_draws_are_the_text() -> None:
    logits = run(target(), piece([*PROMPT, 1, 2], num_logits=3))
    text = SyntheticText(TEXT, 512)
    right = [text.token(HEADER, 5 + i) for i in range(3)]
    row = VerifyRow(
        sampling=GREEDY,
        prefix=PROMPT,
        prompt_len=5,
        noise_key=1,
        draft_token_ids=(right[0], right[1]),
        rule=VerificationRule.COUPLED,
    )
    assert verify(logits, [row])[0].token_ids == tuple(right)


def test_the_drafts_ranking_is_that_of_the_text() -> None:
    logits = run(draft(), piece(PROMPT))
    row = ProposeRow(
        sampling=GREEDY,
        prefix=PROMPT,
        prompt_len=5,
        noise_key=1,
        rule=VerificationRule.COUPLED,
        q_top_k=8,
        num_ranked=8,
    )
    guesses = SyntheticText(TEXT, 512).guesses(HEADER, 5)
    proposed = propose(logits, [row])[0]
    assert proposed.token_id == guesses.token_ids[0]
    assert proposed.ranked_token_ids == guesses.token_ids[:8]
    assert 0 < proposed.margin < 8


def test_margins_keep_the_order_of_confidence() -> None:
    engine, text = draft(), SyntheticText(TEXT, 512)
    logits = run(engine, piece([*PROMPT, *range(20)], num_logits=20))
    best = logits.topk(2, dim=1).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    confidence = [text.guesses(HEADER, 6 + i).margin for i in range(20)]
    assert len({round(one, 4) for one in margins}) == 2
    assert sorted(range(20), key=lambda i: margins[i]) == sorted(range(20), key=lambda i: confidence[i])


def test_a_short_text_has_a_next_token_too() -> None:
    assert run(target(), piece([5])).argmax().item() == SyntheticText(TEXT, 512).token((5,), 1)


def test_the_text_goes_on_from_kv() -> None:
    whole, parts = target(), target()
    expected = run(whole, piece([*PROMPT, 4]))
    run(parts, piece(PROMPT, num_logits=0))
    assert torch.equal(run(parts, piece([4], start=5)), expected)


def test_copied_blocks_carry_the_text() -> None:
    engine = target()
    run(engine, piece(PROMPT))
    engine.copy_blocks([(3, 7)])
    assert torch.equal(run(engine, piece([4], start=5, table=(7,))), run(engine, piece([4], start=5)))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (piece([4], start=6), "position 5 was never written"),
        (piece([4], start=5, table=(2,)), "position 4 was never written"),
        (piece([4], start=40, table=(3, 1)), "beyond a block table of 2"),
        (piece([512]), "token id 512"),
    ],
)
def test_kv_mistakes_raise(bad: ForwardSlice, problem: str) -> None:
    engine = target()
    run(engine, piece(PROMPT))
    with pytest.raises(ValueError, match=problem):
        run(engine, bad)


def test_a_forward_takes_the_time_of_its_device() -> None:
    clock = CountingClock()
    engine = target(clock)
    launch(engine, piece(PROMPT, num_logits=0), piece(PROMPT, table=(5,)))
    assert clock.spent == 0.0, "the device works, the host goes on"
    engine.wait()
    assert clock.spent == pytest.approx(engine.busy_s)
    assert engine.busy_s == h100_tp4_llama_70b().step_s(rows=10, kv_tokens=10)
    assert (engine.num_forwards, engine.num_rows) == (1, 10)


def test_work_of_the_host_beside_the_device_is_free() -> None:
    clock = CountingClock()
    engine = target(clock)
    step_s = h100_tp4_llama_70b().step_s(rows=5, kv_tokens=5)
    launch(engine, piece(PROMPT))
    clock.run(0.6 * step_s)
    launch(engine, piece(PROMPT))  # queued behind the first
    engine.wait()
    assert clock.spent == pytest.approx(2 * step_s)
    clock.run(step_s)
    engine.wait()
    assert clock.spent == pytest.approx(3 * step_s), "it was done long ago"


def after_host_work(host_s: float, *, counts_software: bool) -> float:
    """Time from the end of one forward to the end of the next, called so much later."""
    clock = CountingClock(counts_software=counts_software)
    engine = target(clock)
    run(engine, piece(PROMPT))
    ended = clock.spent
    clock.run(host_s)
    run(engine, piece(PROMPT))
    return clock.spent - ended


def test_the_hosts_share_of_a_step_is_not_counted_twice() -> None:
    step_s = h100_tp4_llama_70b().step_s(rows=5, kv_tokens=5)
    launch_s = h100_tp4_llama_70b().hardware.launch_s
    assert after_host_work(0.5 * launch_s, counts_software=True) == pytest.approx(step_s)
    assert after_host_work(3 * launch_s, counts_software=True) == pytest.approx(step_s + 2 * launch_s)
    assert after_host_work(step_s, counts_software=True) == pytest.approx(2 * step_s), "it was idle"
    assert after_host_work(3 * launch_s, counts_software=False) == pytest.approx(step_s + 3 * launch_s)


def test_a_forward_that_nobody_waited_for_is_not_lost() -> None:
    engine = draft()
    first = launch(engine, piece(PROMPT))
    assert torch.isnan(first).all(), "not to be read before the device is done"
    run(engine, piece([1], start=5))
    assert torch.equal(first, run(draft(), piece(PROMPT)))


def test_branches_of_one_text_read_their_prefix_once() -> None:
    clock = CountingClock()
    engine = draft(clock)
    run(engine, piece([*PROMPT, *range(20)]))
    engine.copy_blocks([(1, 9)])
    engine.wait()
    before = clock.spent
    run(engine, piece([1], start=25), piece([2], start=25, table=(3, 9)))
    engine.wait()
    assert clock.spent - before == pytest.approx(h100_llama_1b().step_s(rows=2, kv_tokens=27), rel=1e-9)


def test_wall_time_is_really_spent() -> None:
    clock = WallClock()
    started = clock.now()
    clock.run(0.002)
    assert clock.now() - started >= 0.002


def test_it_is_chosen_by_ordinary_settings() -> None:
    config = EmulatedConfig(role="draft", device=h100_llama_1b(), vocab_size=64)
    engine = build_engine(EngineConfig(model="emulated", kind="emulated", emulated=config), lambda _: None)
    assert isinstance(engine, EmulatedEngine)
    assert engine.limits.vocab_size == 64


def test_its_section_belongs_to_its_kind() -> None:
    with pytest.raises(ConfigError, match="emulated"):
        EngineConfig(model="m", kind="emulated")
    with pytest.raises(ConfigError, match="block_size: 2"):
        EmulatedConfig(role="draft", device=h100_llama_1b(), block_size=2)
