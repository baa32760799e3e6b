"""The ragged, paged forward gives what plain transformers gives, in every mix of slices."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.unit.engine.tiny_models import CONFIGS, plain_logits, random_tokens, save_random_model
from torch import Tensor
from transformers.utils.logging import is_progress_bar_enabled

from outrider.core.errors import EngineUnavailable
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice, ModelEngine
from outrider.engine.loading import load_causal_lm
from outrider.engine.shape import ModelShape
from outrider.engine.torch_engine import TorchEngine

BLOCK_SIZE = 4
NUM_BLOCKS = 64
TOLERANCE = 1e-4


def load_engine(folder: Path) -> TorchEngine:
    model = load_causal_lm(folder, torch.float32)
    shape = ModelShape.of_model(model)
    limits = EngineLimits(
        vocab_size=shape.vocab_size, max_model_len=shape.max_positions, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )
    return TorchEngine(model, shape, limits)


def shuffled_table(positions: int, *, seed: int) -> list[int]:
    """Blocks for `positions`, in no order, from a pool split by `seed` (0 … 3) so that two never meet."""
    generator = torch.Generator().manual_seed(seed)
    own = [seed + 4 * int(i) for i in torch.randperm(NUM_BLOCKS // 4, generator=generator)]
    return own[: -(-positions // BLOCK_SIZE)]


def rows(tokens: Sequence[int], start: int, end: int, table: Sequence[int], *, num_logits: int) -> ForwardSlice:
    return ForwardSlice(token_ids=tokens[start:end], start=start, block_table=table, num_logits=num_logits)


def run(engine: ModelEngine, *slices: ForwardSlice) -> Tensor:
    return engine.forward(ForwardBatch(slices=slices))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_loading_draws_no_bar_and_leaves_those_of_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_random_model(tmp_path, CONFIGS["llama"])
    capfd.readouterr()
    load_causal_lm(tmp_path, torch.float32)
    assert capfd.readouterr().err == ""
    assert is_progress_bar_enabled()


@pytest.mark.parametrize("name", CONFIGS)
def test_one_prompt_equals_plain_transformers(tmp_path: Path, name: str) -> None:
    plain = save_random_model(tmp_path, CONFIGS[name])
    engine = load_engine(tmp_path)
    tokens = random_tokens(19)

    logits = run(engine, rows(tokens, 0, 19, shuffled_table(19, seed=0), num_logits=19))

    assert logits.dtype == torch.float32
    assert logits.std() > 0.5, "the model is too flat to tell rows apart"
    assert_close(logits, plain_logits(plain, tokens))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, CONFIGS["llama"])
    return folder


@pytest.fixture
def engine(saved: Path) -> TorchEngine:
    return load_engine(saved)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> "Reference":
    return Reference(tmp_path_factory.mktemp("reference"))


class Reference:
    """Logits of plain transformers, by token sequence."""

    def __init__(self, folder: Path) -> None:
        self._model = save_random_model(folder, CONFIGS["llama"])

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return plain_logits(self._model, tokens)


def test_chunked_prefill_equals_one_prompt(engine: TorchEngine, reference: Reference) -> None:
    tokens, table = random_tokens(23), shuffled_table(23, seed=1)

    nothing = run(engine, rows(tokens, 0, 9, table, num_logits=0))
    run(engine, rows(tokens, 9, 10, table, num_logits=0))
    last = run(engine, rows(tokens, 10, 23, table, num_logits=3))

    assert nothing.shape == (0, 128)
    assert_close(last, reference.logits(tokens)[-3:])


def test_mixed_batch_of_prefill_plain_and_verify_rows(engine: TorchEngine, reference: Reference) -> None:
    sequences = [random_tokens(n, seed=n) for n in (40, 17, 30, 8)]
    tables = [shuffled_table(len(tokens), seed=i) for i, tokens in enumerate(sequences)]
    for tokens, table, cached in zip(sequences[:3], tables[:3], (20, 16, 24), strict=True):
        run(engine, rows(tokens, 0, cached, table, num_logits=0))

    logits = run(
        engine,
        rows(sequences[0], 20, 40, tables[0], num_logits=1),  # the last chunk of a prefill
        rows(sequences[1], 16, 17, tables[1], num_logits=1),  # a plain row
        rows(sequences[2], 24, 30, tables[2], num_logits=6),  # verify rows
        rows(sequences[3], 0, 8, tables[3], num_logits=0),  # the first chunk of another
    )

    expected = [reference.logits(tokens)[-n:] for tokens, n in zip(sequences[:3], (1, 1, 6), strict=True)]
    assert_close(logits, torch.cat(expected))


def test_rollback_is_overwriting(engine: TorchEngine, reference: Reference) -> None:
    committed, rejected, table = random_tokens(14), random_tokens(6, seed=9), shuffled_table(40, seed=2)
    run(engine, rows(committed, 0, 14, table, num_logits=0))
    run(engine, rows([*committed, *rejected], 14, 20, table, num_logits=6))

    after = [*committed, *random_tokens(4, seed=10)]
    logits = run(engine, rows(after, 14, 18, table, num_logits=4))

    assert_close(logits, reference.logits(after)[-4:])


def test_blocks_reused_by_another_sequence_leave_no_trace(engine: TorchEngine, reference: Reference) -> None:
    first, second, table = random_tokens(21, seed=3), random_tokens(10, seed=4), shuffled_table(21, seed=3)
    run(engine, rows(first, 0, 21, table, num_logits=0))

    logits = run(engine, rows(second, 0, 10, table[::-1], num_logits=10))

    assert_close(logits, reference.logits(second))


def test_a_prefill_longer_than_a_tile_beside_others(engine: TorchEngine, reference: Reference) -> None:
    long, short = random_tokens(200, seed=1), random_tokens(7, seed=2)
    table = [block for block in range(NUM_BLOCKS) if block % 8 != 1][:50][::-1]
    run(engine, rows(long, 0, 30, table, num_logits=0))

    logits = run(
        engine,
        rows(short, 0, 7, [1, 9], num_logits=2),
        rows(long, 30, 200, table, num_logits=170),  # tiles of 128 and 42 rows
        rows(short, 0, 7, [17, 25], num_logits=1),
    )

    expected = [reference.logits(short)[-2:], reference.logits(long)[30:], reference.logits(short)[-1:]]
    assert_close(logits, torch.cat(expected))


@pytest.mark.parametrize("num_rows", [1, 2, 6, 8])
def test_many_sequences_in_one_batch(engine: TorchEngine, reference: Reference, num_rows: int) -> None:
    sequences = [random_tokens(n, seed=n) for n in (60, 9, 31, 12)]
    tables = [shuffled_table(len(tokens), seed=i) for i, tokens in enumerate(sequences)]
    ends = [len(tokens) for tokens in sequences]
    for tokens, table, end in zip(sequences, tables, ends, strict=True):
        run(engine, rows(tokens, 0, end - num_rows, table, num_logits=0))

    logits = run(
        engine,
        *(
            rows(tokens, end - num_rows, end, table, num_logits=num_rows)
            for tokens, table, end in zip(sequences, tables, ends, strict=True)
        ),
    )

    assert_close(logits, torch.cat([reference.logits(tokens)[-num_rows:] for tokens in sequences]))


def test_copied_blocks_fork_a_sequence(engine: TorchEngine, reference: Reference) -> None:
    prefix, table = random_tokens(11, seed=6), [20, 31, 12]
    run(engine, rows(prefix, 0, 11, table, num_logits=0))

    # Block 12 goes to 7 and, as that is copied on, to 9; then 12 itself is overwritten.
    engine.copy_blocks([(12, 7), (7, 9), (20, 12)])

    for fork, last in enumerate((7, 9)):
        tokens = [*prefix, 40 + fork]
        logits = run(engine, rows(tokens, 11, 12, [20, 31, last], num_logits=1))
        assert_close(logits, reference.logits(tokens)[-1:])


def test_a_copy_outside_the_pool_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(ValueError, match="block id"):
        engine.copy_blocks([(0, NUM_BLOCKS)])
    engine.copy_blocks([])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (ForwardSlice(token_ids=[1] * 9, start=0, block_table=[0, 1], num_logits=1), "2 blocks do not hold 9"),
        (ForwardSlice(token_ids=[1], start=256, block_table=[0] * 65, num_logits=1), "positions 256..256"),
        (ForwardSlice(token_ids=[1], start=-1, block_table=[0], num_logits=1), "positions -1..-1"),
        (ForwardSlice(token_ids=[1], start=0, block_table=[NUM_BLOCKS], num_logits=1), "block id"),
        (ForwardSlice(token_ids=[1], start=0, block_table=[-1], num_logits=1), "block id"),
        (ForwardSlice(token_ids=[128], start=0, block_table=[0], num_logits=1), "token id"),
        (ForwardSlice(token_ids=[-1], start=0, block_table=[0], num_logits=1), "token id"),
        (ForwardSlice(token_ids=[], start=0, block_table=[0], num_logits=0), "no rows"),
    ],
)
def test_a_slice_outside_the_limits_is_refused_whole(
    engine: TorchEngine, reference: Reference, bad: ForwardSlice, problem: str
) -> None:
    tokens = random_tokens(4)
    run(engine, rows(tokens, 0, 3, [0], num_logits=0))

    with pytest.raises(ValueError, match=problem):
        run(engine, rows([5, 5, 5], 0, 3, [0], num_logits=0), bad)

    assert_close(run(engine, rows(tokens, 3, 4, [0], num_logits=1)), reference.logits(tokens)[-1:])


def test_an_empty_batch_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        run(engine)


def test_a_closed_engine_says_so(engine: TorchEngine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        run(engine, rows([1], 0, 1, [0], num_logits=1))
