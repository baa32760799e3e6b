"""The paged path, all but its kernel and its graphs, against plain transformers: on the CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.host_waits import questions
from tests.unit.engine.tiny_models import CONFIGS, plain_logits, random_model, random_tokens
from torch import Tensor

from outrider.engine.attention import IMPLEMENTATION, register_attention
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice
from outrider.engine.packing import pack_model
from outrider.engine.paged_batch import PackedShape, PagedRows, pack_step
from outrider.engine.paged_kernels import gathered_kernel, kernel_error, unsupported
from outrider.engine.paged_steps import PagedOptions
from outrider.engine.runner import ModelRunner
from outrider.engine.shape import ModelShape
from outrider.engine.step_graphs import Run, bucket_of, row_buckets

LIMITS = EngineLimits(vocab_size=128, max_model_len=64, num_blocks=32, block_size=8)
BUCKETS = row_buckets((1, 2, 4), (1, 3))


class CountingRecorder:
    """Repeats a step like a graph: on the tensors of the first time, without running Python code anew."""

    def __init__(self) -> None:
        self.recorded = 0
        self.repeated = 0

    def record(self, run: Run) -> Run:
        self.recorded += 1
        run()

        def repeat() -> Tensor:
            self.repeated += 1
            return run()

        return repeat


def runner_of(recorder: CountingRecorder, name: str = "llama", **changes: Any) -> ModelRunner:
    register_attention()
    model = random_model(CONFIGS[name])
    model.set_attn_implementation(IMPLEMENTATION)
    shape = ModelShape.of_model(model)
    pack_model(model)
    options: dict[str, Any] = {"row_buckets": BUCKETS, "max_width": 3, "kernel": gathered_kernel, **changes}
    return ModelRunner(model, shape, LIMITS, PagedOptions(recorder=recorder, **options))


def run(runner: ModelRunner, *slices: ForwardSlice) -> Tensor:
    return runner.logits(runner.hidden(runner.lay_out(ForwardBatch(slices=slices))))


def rows(tokens: Sequence[int], start: int, end: int, first_block: int, *, num_logits: int) -> ForwardSlice:
    table = list(range(first_block, first_block + 8))[::-1]
    return ForwardSlice(token_ids=tokens[start:end], start=start, block_table=table, num_logits=num_logits)


@pytest.mark.parametrize("buckets", [BUCKETS, ()], ids=["recorded", "eager"])
def test_prefill_and_verify_rows_equal_plain_transformers(buckets: tuple[int, ...]) -> None:
    recorder = CountingRecorder()
    runner = runner_of(recorder, row_buckets=buckets)
    plain = random_model(CONFIGS["llama"])
    first, second = random_tokens(30), random_tokens(21, seed=1)

    run(runner, rows(first, 0, 20, 0, num_logits=0), rows(second, 0, 11, 8, num_logits=0))
    narrow = run(runner, rows(first, 20, 23, 0, num_logits=3), rows(second, 11, 12, 8, num_logits=1))
    mixed = run(runner, rows(first, 23, 24, 0, num_logits=1), rows(second, 12, 21, 8, num_logits=2))

    expected_first, expected_second = plain_logits(plain, first), plain_logits(plain, second)
    expected = [torch.cat([expected_first[20:23], expected_second[11:12]])]
    expected.append(torch.cat([expected_first[23:24], expected_second[19:21]]))
    for actual, wanted in zip((narrow, mixed), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-4)
    assert recorder.repeated == (1 if buckets else 0)


def test_a_recorded_step_serves_later_steps_of_its_size_and_padding_touches_nobody() -> None:
    recorder = CountingRecorder()
    runner = runner_of(recorder)
    plain = random_model(CONFIGS["llama"])
    tokens = [random_tokens(24, seed=seed) for seed in range(3)]
    for index, one in enumerate(tokens):
        run(runner, rows(one, 0, 8, 8 * index, num_logits=0))

    # Five rows, then six, both as six; a rejected row is overwritten by the next step.
    for start in (8, 9, 10):
        widths = (1, 2, 2) if start == 9 else (2, 2, 2)
        slices = [
            rows(one, start, start + w, 8 * i, num_logits=w)
            for i, (one, w) in enumerate(zip(tokens, widths, strict=True))
        ]
        logits = run(runner, *slices)

        expected = [plain_logits(plain, one)[start : start + w] for one, w in zip(tokens, widths, strict=True)]
        torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-4)
    assert (recorder.recorded, recorder.repeated) == (1, 3)


def test_everything_is_recorded_at_start_if_asked() -> None:
    recorder = CountingRecorder()
    runner_of(recorder, record_at_start=True)
    assert recorder.recorded == len(BUCKETS)


def test_no_bucket_holds_too_many_rows_or_too_wide_slices() -> None:
    recorder = CountingRecorder()
    runner = runner_of(recorder)
    one = random_tokens(8)
    run(runner, rows(one, 0, 4, 0, num_logits=1))
    run(runner, *(rows(one, 0, 3, 8 * (i % 4), num_logits=1) for i in range(5)))
    assert recorder.recorded == 0


def test_a_batch_outside_the_limits_is_refused_before_anything_runs() -> None:
    runner = runner_of(CountingRecorder())
    with pytest.raises(ValueError, match="block id"):
        run(runner, ForwardSlice(token_ids=[1], start=0, block_table=[32], num_logits=1))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_is_recorded_asks_nothing_of_the_device(name: str) -> None:
    def no_attention(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float) -> Tensor:
        return query

    assert questions(lambda: runner_of(CountingRecorder(), name, record_at_start=True, kernel=no_attention)) == []


def test_buckets_are_the_products_of_batch_sizes_and_widths() -> None:
    assert BUCKETS == (1, 2, 3, 4, 6, 12)
    assert [bucket_of(rows, BUCKETS) for rows in (1, 3, 5, 7, 12, 13)] == [1, 3, 6, 12, 12, None]


def test_packing_by_row_gives_every_row_its_own_keys_and_padding_the_spare_block() -> None:
    batch = ForwardBatch(
        slices=(
            ForwardSlice(token_ids=[7, 8], start=3, block_table=[5, 2], num_logits=2),
            ForwardSlice(token_ids=[9], start=0, block_table=[6], num_logits=1),
        )
    )
    shape = PackedShape.by_row(rows=4, pages=3)
    packed = np.full(shape.size, -7, dtype=np.int32)

    wanted = pack_step(packed, batch, shape, block_size=4, spare_block=9)

    fields = shape.fields(packed)
    assert wanted == 3
    assert fields.input_ids.tolist() == [7, 8, 9, 0]
    assert fields.position_ids.tolist() == [3, 4, 0, 0]
    assert fields.slots.tolist() == [5 * 4 + 3, 2 * 4, 6 * 4, 9 * 4]
    assert fields.logit_rows.tolist() == [0, 1, 2, 0]
    assert fields.cu_seq_q.tolist() == [0, 1, 2, 3, 4]
    assert fields.seqused_k.tolist() == [4, 5, 1, 1]
    assert fields.cu_seq_k.tolist() == [0, 4, 9, 10, 11]
    assert fields.block_table.tolist() == [[5, 2, 9], [5, 2, 9], [6, 9, 9], [9, 9, 9]]


def test_packing_by_slice_gives_every_slice_one_row_of_the_table() -> None:
    batch = ForwardBatch(
        slices=(
            ForwardSlice(token_ids=[1, 2, 3], start=2, block_table=[5, 2, 8], num_logits=1),
            ForwardSlice(token_ids=[4, 5], start=0, block_table=[6], num_logits=0),
        )
    )
    shape = PackedShape.by_slice(batch, 4)
    packed = np.full(shape.size, -7, dtype=np.int32)

    wanted = pack_step(packed, batch, shape, block_size=4, spare_block=9)

    fields = shape.fields(packed)
    assert wanted == 1
    assert fields.logit_rows.tolist()[:1] == [2]
    assert fields.cu_seq_q.tolist() == [0, 3, 5]
    assert fields.seqused_k.tolist() == [5, 2]
    assert fields.block_table.tolist() == [[5, 2], [6, 9]]


SHAPE = ModelShape(num_layers=1, heads=4, kv_heads=2, head_dim=16, vocab_size=8, max_positions=2048)
CPU = torch.device("cpu")


def test_a_kernel_that_is_right_passes_its_trial_and_a_wrong_one_does_not() -> None:
    def blind(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float) -> Tensor:
        """Sees one key too few of the longest sequence."""
        fewer = rows.seqused_k.clone()
        fewer[-1] -= 1
        changed = PagedRows(
            cu_seq_q=rows.cu_seq_q,
            cu_seq_k=rows.cu_seq_k,
            seqused_k=fewer,
            block_table=rows.block_table,
            max_rows=rows.max_rows,
            max_keys=rows.max_keys,
        )
        return gathered_kernel(query, keys, values, changed, scaling)

    def undefined(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float) -> Tensor:
        output = gathered_kernel(query, keys, values, rows, scaling)
        output[-1] = torch.nan
        return output

    def error(kernel: Any) -> float:
        return kernel_error(kernel, SHAPE, dtype=torch.float32, block_size=256, max_keys=2048, device=CPU)

    assert error(gathered_kernel) == 0.0
    assert error(blind) > 0.001
    assert error(undefined) == float("inf")


def test_what_the_kernel_cannot_run_is_named() -> None:
    def reason(**changes: Any) -> str | None:
        settings: dict[str, Any] = {"dtype": torch.bfloat16, "block_size": 256, "device": torch.device("cuda")}
        return unsupported(SHAPE, **{**settings, **changes})

    assert reason(device=CPU) == "the device is cpu, not cuda"
    assert reason(dtype=torch.float32) == "dtype is float32, not bfloat16 or float16"
    assert reason(block_size=16) == "block_size is 16, not a multiple of 256"
