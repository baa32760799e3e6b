"""What the scheduler promises in every step, checked while random load runs through tiny pools."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.local_engine import LocalEngine, request

from outrider.core.dispatch import SequenceErrorCode
from outrider.core.policy import GateSettings
from outrider.core.proposal import Proposal
from outrider.core.request import SequenceRequest
from outrider.core.speculation import SpeculationPreference
from outrider.engine.scripted import ScriptedConfig
from outrider.engine.sequence_kv import KVCache
from outrider.target.config import TargetConfig
from outrider.target.running import RunningSequence
from outrider.target.scheduler import Scheduler, StepBatch

TARGET = ScriptedConfig(vocab_size=32, slope=0.7)
SYSTEM_PROMPT = tuple(range(1, 13))


def gate(k: int) -> GateSettings:
    return GateSettings(preference=SpeculationPreference.ON, max_num_draft_tokens=k, batch_size_threshold=None)


class AuditedEngine(LocalEngine):
    """A `LocalEngine` whose every step is checked against the scheduler's promises."""

    def __init__(self, **parts: object) -> None:
        super().__init__(**parts)  # type: ignore[arg-type]
        scheduler = self.loop.scheduler
        self.kv: KVCache = scheduler._kv
        self.batches: list[StepBatch] = []
        self.prefill_rows: list[int] = []
        """Rows of every step that compute prompts, or text whose KV was lost."""
        plan = scheduler.schedule

        def audited(proposals: Mapping[int, Proposal]) -> StepBatch:
            running, decoding = list(scheduler.running), scheduler.decoding()
            batch = plan(proposals)
            self.batches.append(batch)
            self._check_order(scheduler, running, decoding, batch)
            self._check_budget(batch, {one.handle for one in decoding}, proposals)
            self._check_owners(batch)
            return batch

        setattr(scheduler, "schedule", audited)  # noqa: B010

    def drain(self) -> None:
        while self.loop.scheduler.has_work:
            self.loop.step()
        assert self.loop.scheduler.kv_usage == 0.0
        assert len(self.kv) == 0

    @staticmethod
    def _check_order(
        scheduler: Scheduler, running: list[RunningSequence], decoding: list[RunningSequence], batch: StepBatch
    ) -> None:
        left = list(scheduler.running)
        assert left == running[: len(left)], "the youngest are preempted first"
        assert not running or left, "the oldest keeps running"
        assert [one.handle for one in left] == sorted(one.handle for one in left)
        planned = {row.running.handle for row in batch.rows}
        assert len(planned) == len(batch.rows)
        assert planned <= {one.handle for one in left}
        for one in decoding:
            assert one.handle in planned or one not in left, "every stream goes on in every step"
        assert batch.rows or not running, "no step is empty while somebody runs"

    def _check_budget(self, batch: StepBatch, decoding: set[int], proposals: Mapping[int, Proposal]) -> None:
        config = self.config
        assert batch.forward.num_rows <= config.max_num_batched_tokens
        for row in batch.rows:
            if row.proposal is not None:
                assert len(row.forward.token_ids) == 1 + len(row.proposal) == row.forward.num_logits
                assert len(row.proposal) <= len(proposals[row.running.handle])
        chunks = [row for row in batch.rows if row.running.handle not in decoding]
        prefill = sum(len(row.forward.token_ids) for row in chunks)
        if len(chunks) < len(batch.rows):
            assert prefill <= config.prefill_chunk_tokens, "running streams wait for one chunk at most"
        assert batch.decodes_only is (not chunks and bool(batch.rows))
        self.prefill_rows.append(prefill)

    def _check_owners(self, batch: StepBatch) -> None:
        """Nobody else sees a block that this step writes, and published content stays."""
        pool, size = self.kv._pool, self.kv.block_size
        for row in batch.rows:
            one = row.forward
            end = one.start + len(one.token_ids)
            for index in range(one.start // size, -(-end // size)):
                assert pool._references[one.block_table[index]] == 1
                assert not pool.published(one.block_table[index])


@lru_cache(maxsize=4096)
def solo(one: SequenceRequest) -> tuple[int, ...]:
    """The request's text when it runs alone, without a draft, in a pool with room to spare."""
    (result,) = LocalEngine(target=TARGET).run(one)
    return tuple(result.token_ids)


@dataclass(frozen=True)
class Load:
    """A random run: who comes when, and who is aborted when."""

    target: ScriptedConfig
    config: TargetConfig
    draft_agreement: float | None
    k: int
    arrivals: tuple[tuple[int, SequenceRequest], ...]
    """(step, request)."""
    aborts: tuple[tuple[int, int], ...]
    """(step, index of a sequence that is there then)."""

    def engine(self) -> AuditedEngine:
        draft = None if self.draft_agreement is None else replace(TARGET, agreement=self.draft_agreement)
        return AuditedEngine(target=self.target, draft=draft, config=self.config, gate=gate(self.k))


@st.composite
def requests(draw: st.DrawFn) -> SequenceRequest:
    head = SYSTEM_PROMPT[: draw(st.sampled_from([0, 4, 12]))]
    tail = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    return replace(
        request(
            (*head, *tail),
            max_tokens=draw(st.integers(1, 16)),
            noise_key=draw(st.integers(0, 3)),
            eos_token_ids=(draw(st.integers(0, 31)),),
        ),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
    )


@st.composite
def loads(draw: st.DrawFn) -> Load:
    seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    # Room for the longest request alone, and little more: everything beyond that is contention.
    slots = 12 + 6 + 16 + draw(st.integers(0, 40))
    return Load(
        target=replace(TARGET, block_size=block_size, num_blocks=-(-slots // block_size)),
        config=TargetConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=draw(st.integers(seqs, 24)),
            prefill_chunk_tokens=draw(st.integers(1, 12)),
            enable_prefix_cache=draw(st.booleans()),
        ),
        draft_agreement=draw(st.sampled_from([None, 0.0, 0.7, 1.0])),
        k=draw(st.integers(1, 6)),
        arrivals=tuple(draw(st.lists(st.tuples(st.integers(0, 12), requests()), min_size=1, max_size=8))),
        aborts=tuple(draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), max_size=4))),
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(load=loads())
def test_whatever_comes_and_goes_texts_are_solo_texts_and_no_block_is_lost(load: Load) -> None:
    engine = load.engine()
    scheduler = engine.loop.scheduler
    keys: dict[int, SequenceRequest] = {}
    arrivals, aborts = sorted(load.arrivals, key=lambda one: one[0]), sorted(load.aborts)
    aborted: set[int] = set()
    step = 0
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0][0] <= step:
            one = arrivals.pop(0)[1]
            keys[engine.submit(one)] = one
        while aborts and aborts[0][0] <= step:
            there = list(scheduler.all())
            index = aborts.pop(0)[1]
            if index < len(there):
                there[index].sequence.abort()
                aborted.add(there[index].stream.stream_key)
                engine.loop.end(there[index])
        engine.step()
        step += 1
        assert step < 2000, "stuck"
    engine.drain()
    for key, one in keys.items():
        result, text = engine.results[key], solo(one)
        assert result.end is not None
        if key in aborted:
            assert tuple(result.token_ids) == text[: len(result.token_ids)]
        else:
            assert tuple(result.token_ids) == text
            assert result.end.finish is not None
    counters = scheduler.prefix_cache
    assert 0 <= counters.hit_tokens <= counters.queried_tokens
    assert load.config.enable_prefix_cache or counters.queried_tokens == 0


@pytest.mark.parametrize("k", [0, 4])
def test_long_prompts_add_one_chunk_a_step_and_every_stream_goes_on(k: int) -> None:
    chunk, length = 512, 8192
    target = replace(TARGET, max_model_len=9000, num_blocks=1100, block_size=16)
    draft = replace(target, agreement=0.8) if k else None
    config = TargetConfig(prefill_chunk_tokens=chunk, max_num_batched_tokens=2048)
    engine = AuditedEngine(target=target, draft=draft, config=config, gate=gate(k))
    streams = [engine.submit(request((1, 2, key), max_tokens=200, noise_key=key)) for key in range(4)]
    engine.step(3)
    before_the_long_ones = sum(engine.prefill_rows)
    longs = [engine.submit(request([1 + key] * length, max_tokens=4)) for key in range(2)]
    for _ in range(2 * length // chunk):
        before = [len(engine.results[key].token_ids) for key in streams]
        engine.step()
        assert engine.prefill_rows[-1] <= chunk
        for key, old in zip(streams, before, strict=True):
            assert len(engine.results[key].token_ids) > old or engine.results[key].end is not None
    assert sum(engine.prefill_rows) - before_the_long_ones == 2 * length, "nor did the prompts wait for the streams"
    engine.drain()
    assert [len(engine.results[key].token_ids) for key in longs] == [4, 4]


def test_without_streams_prompts_use_the_whole_step() -> None:
    config = TargetConfig(prefill_chunk_tokens=16, max_num_batched_tokens=64)
    engine = AuditedEngine(target=TARGET, config=config)
    for key in range(4):
        engine.submit(request([key] * 40, max_tokens=1))
    engine.step()
    assert [len(row.forward.token_ids) for row in engine.batches[0].rows] == [16] * 4
    engine.drain()


def test_a_running_sequence_costs_one_row_and_its_draft_tokens() -> None:
    """Six sequences of 1 + 5 rows want 36 rows and may have 20: everybody keeps one."""
    config = TargetConfig(max_num_seqs=6, max_num_batched_tokens=20)
    engine = AuditedEngine(target=TARGET, draft=TARGET, config=config, gate=gate(5))
    keys = [engine.submit(request((1, 2, key), max_tokens=40, noise_key=key)) for key in range(6)]
    engine.drain()
    widths = [[len(row.forward.token_ids) for row in batch.rows] for batch in engine.batches]
    assert [6, 6, 5, 1, 1, 1] in widths
    assert all(engine.results[key].end is not None for key in keys)


def test_of_equal_prompts_that_arrive_together_one_is_computed() -> None:
    prompt = [5, 6, 7, 8] * 12
    config = TargetConfig(max_num_seqs=8, prefill_chunk_tokens=16)
    engine = AuditedEngine(target=TARGET, config=config)
    together = [replace(request(prompt, max_tokens=8), noise_key=key) for key in range(8)]
    results = engine.run(*together)
    assert [tuple(one.token_ids) for one in results] == [solo(one) for one in together]
    assert sum(engine.prefill_rows) <= len(prompt) + 7 * 4, "each of the others computes its last block at most"
    cached = [one.end.cached_prompt_tokens for one in results if one.end is not None]
    assert cached == [0, *[len(prompt) - 4] * 7]
    assert engine.loop.scheduler.prefix_cache.hit_tokens == sum(cached)


def test_prompts_that_hardly_overlap_do_not_wait_for_each_other() -> None:
    engine = AuditedEngine(target=TARGET)
    for key in range(4):
        engine.submit(request([9, 9, 9, 9, *[key] * 20], max_tokens=1))
    engine.step()
    assert len(engine.batches[0].rows) == 4
    engine.drain()


def test_a_replay_after_other_text_gives_the_same_text_and_hits() -> None:
    a, b = request([1] * 30, max_tokens=20), request([2] * 30, max_tokens=20)
    engine = AuditedEngine(target=TARGET, draft=replace(TARGET, agreement=0.6), gate=gate(4))
    texts = [engine.run(one)[0] for one in (a, b, a)]
    assert texts[0].token_ids == texts[2].token_ids
    assert texts[0].end is not None
    assert texts[2].end is not None
    assert (texts[0].end.cached_prompt_tokens, texts[2].end.cached_prompt_tokens) == (0, 28)
    resumed = engine.run(request([1] * 30, max_tokens=20, resume=texts[0].token_ids[:15]))[0]
    assert texts[0].token_ids[:15] + resumed.token_ids == texts[0].token_ids
    assert engine.loop.scheduler.prefix_cache.hit_tokens == 28 + 44, "committed output is found too"


def test_draft_tokens_never_preempt_anybody() -> None:
    """A pool that holds the two texts to the last slot, and a draft that wants more."""
    target = replace(TARGET, block_size=4, num_blocks=2 * 6)
    pair = [request((1, 2, 3, key), max_tokens=20, noise_key=key) for key in range(2)]
    engine = AuditedEngine(target=target, draft=TARGET, gate=gate(8))
    results = engine.run(*pair)
    assert [tuple(one.token_ids) for one in results] == [solo(one) for one in pair]
    assert engine.loop.scheduler.num_preemptions == 0
    assert engine.loop.counters.verified > 0


def test_preemption_spares_the_oldest_and_recomputes_the_rest() -> None:
    target = replace(TARGET, block_size=4, num_blocks=14)
    crowd = [request((1, 2, 3, key), max_tokens=36, noise_key=key) for key in range(4)]
    engine = AuditedEngine(target=target)
    keys = [engine.submit(one) for one in crowd]
    order: list[int] = []
    while engine.loop.scheduler.has_work:
        engine.step()
        order += [key for key in keys if engine.results[key].end is not None and key not in order]
    assert engine.loop.scheduler.num_preemptions > 0
    assert order == keys, "who came first ends first"
    assert [tuple(engine.results[key].token_ids) for key in keys] == [solo(one) for one in crowd]


def test_higher_priority_is_admitted_first_and_waits_for_nobody_preempted() -> None:
    config = TargetConfig(max_num_seqs=1)
    engine = AuditedEngine(target=TARGET, config=config)
    keys = {}
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 7)):
        keys[name] = engine.submit(replace(request((1, 2, 3), max_tokens=2), priority=priority))
    admitted: list[int] = []
    while engine.loop.scheduler.has_work:
        engine.step()
        admitted += [key for key in keys.values() if engine.results[key].token_ids and key not in admitted]
    assert admitted == [keys[name] for name in ("high", "first", "second", "low")]


def test_a_preempted_sequence_lines_up_by_its_priority() -> None:
    target = replace(TARGET, block_size=4, num_blocks=12)
    engine = AuditedEngine(target=target, config=TargetConfig(max_num_seqs=2))
    for key in range(2):
        engine.submit(replace(request((1, 2, 3, key), max_tokens=36, noise_key=key), priority=0))
    while not engine.loop.scheduler.num_preemptions:
        engine.step()
        if len(engine.results) == 2:
            high = engine.submit(replace(request((9,) * 40, max_tokens=2), priority=3))
    line = [one.stream.stream_key for one in engine.loop.scheduler.all() if one not in engine.loop.scheduler.running]
    assert line == [high, 2]
    engine.drain()


def test_a_blocked_line_costs_and_counts_nothing() -> None:
    target = replace(TARGET, block_size=4, num_blocks=12)
    engine = AuditedEngine(target=target)
    engine.submit(request([1] * 24, max_tokens=20))
    engine.step()
    queried = engine.loop.scheduler.prefix_cache.queried_tokens
    engine.submit(request([2] * 40, max_tokens=4))
    engine.step(8)
    assert engine.loop.scheduler.num_waiting == 1
    assert engine.loop.scheduler.prefix_cache.queried_tokens == queried == 24
    engine.drain()
    assert engine.loop.scheduler.prefix_cache.queried_tokens == 24 + 40


@pytest.mark.parametrize("k", [0, 6])
def test_the_longest_sequence_that_fits_runs_and_a_longer_one_is_refused(k: int) -> None:
    target = replace(TARGET, block_size=4, num_blocks=8)
    engine = AuditedEngine(target=target, draft=TARGET if k else None, gate=gate(k))
    longest, longer = request([1] * 12, max_tokens=20), request([1] * 12, max_tokens=21)
    refused, result = engine.run(longer, longest)
    assert tuple(result.token_ids) == solo(longest)
    assert refused.end is not None
    assert refused.end.failure is not None
    assert refused.end.failure.code is SequenceErrorCode.INVALID
    assert "33" not in refused.end.failure.message
    assert refused.end.failure.message == "max_tokens: prompt 12 + max_tokens 21 exceed the engine's KV memory"


def test_an_abort_in_the_middle_of_a_prefill_frees_its_blocks_and_hurts_nobody() -> None:
    prompt = [3] * 40
    engine = AuditedEngine(target=TARGET, config=TargetConfig(prefill_chunk_tokens=8))
    first, second = (engine.submit(replace(request(prompt, max_tokens=6), noise_key=key)) for key in range(2))
    engine.step(2)
    engine.running(first).sequence.abort()
    engine.loop.end(engine.running(first))
    engine.drain()
    assert tuple(engine.results[second].token_ids) == solo(replace(request(prompt, max_tokens=6), noise_key=1))
