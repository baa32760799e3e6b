import math

import pytest
import torch
from scipy import stats

from outrider.decoding.keys import Counter, Purpose, derive_key, hash_word
from outrider.decoding.noise import gumbel, gumbel_at, gumbel_rows, seed_rows, seed_runs, words_to_gumbel

CPU = torch.device("cpu")


def counters(count: int, *, key: int = 5) -> list[Counter]:
    return [Counter(key=derive_key(key, 0), position=p, purpose=Purpose.TARGET) for p in range(count)]


def textbook_gumbel(word: int) -> float:
    u = (word + 0.5) * 2.0**-32
    return -math.log(-math.log1p(-u))


@pytest.mark.parametrize("count", [1, 3, 7, 8, 17, 1003])
def test_tensors_hold_the_words_that_the_integers_define(count: int) -> None:
    rows = counters(4)
    noise = gumbel_rows(seed_rows(rows, device=CPU), count)
    for row, counter in enumerate(rows):
        expected = [textbook_gumbel(hash_word(counter.seed, token_id)) for token_id in range(count)]
        # Only words so large that u rounds to 1 in float32 differ from the textbook.
        expected = [max(value, textbook_gumbel(2**32 - 257)) for value in expected]
        assert noise[row].tolist() == pytest.approx(expected, abs=1e-4)


def test_noise_is_finite_at_the_ends_of_the_hash() -> None:
    words = torch.tensor([0, 1, 2, 2**31 - 1, -(2**31), -300, -129, -128, -2, -1], dtype=torch.int32)
    noise = words_to_gumbel(words)
    assert noise.isfinite().all()
    assert noise[0].item() == pytest.approx(textbook_gumbel(0), rel=1e-6)  # w = 0: the largest value
    assert noise[-1].item() == pytest.approx(-2.81, abs=0.01)  # w = 2**32 - 1
    assert noise.diff().max() <= 0  # falls as the word grows


def test_any_subset_batch_or_order_gets_bitwise_the_same_values() -> None:
    whole = gumbel(11, 40, Purpose.TARGET, 5000)
    generator = torch.Generator().manual_seed(0)
    for size in [1, 2, 5, 15, 16, 33, 257]:
        ids = torch.randint(0, 5000, (size,), generator=generator)
        assert torch.equal(gumbel(11, 40, Purpose.TARGET, ids), whole[ids])
        assert torch.equal(gumbel(11, 40, Purpose.TARGET, size), whole[:size])
    rows = [Counter(key=11, position=p, purpose=Purpose.TARGET) for p in range(38, 43)]
    seeds = seed_rows(rows, device=CPU)
    assert torch.equal(gumbel_rows(seeds, 5000)[2], whole)
    assert torch.equal(gumbel_at(seeds[[2, 2, 2]], torch.tensor([7, 4999, 0])), whole[[7, 4999, 0]])


def test_shape_of_the_ids_is_kept_and_they_are_not_changed() -> None:
    ids = torch.tensor([[3, 1], [2, 3]], dtype=torch.int32)
    noise = gumbel(1, 2, Purpose.DRAFT, ids)
    assert noise.shape == (2, 2)
    assert noise.dtype is torch.float32
    assert noise[0, 0] == noise[1, 1]
    assert ids.tolist() == [[3, 1], [2, 3]]


def test_large_token_ids_and_positions_work() -> None:
    ids = torch.tensor([2**31 - 1, 2**18])
    assert gumbel(2**64 - 1, 2**40, Purpose.RESIDUAL, ids).isfinite().all()


def test_noise_is_gumbel_along_tokens_positions_and_keys() -> None:
    along_tokens = gumbel(derive_key(1, 0), 10, Purpose.TARGET, 40_000)
    along_positions = gumbel_rows(seed_rows(counters(40_000), device=CPU), 1)[:, 0]
    keys = [Counter(key=derive_key(1, i), position=3, purpose=Purpose.TARGET) for i in range(40_000)]
    along_keys = gumbel_rows(seed_rows(keys, device=CPU), 1)[:, 0]
    for sample in (along_tokens, along_positions, along_keys):
        assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > 1e-3


def test_every_bit_of_the_words_is_fair_and_independent_of_its_neighbours() -> None:
    words = torch.tensor([[hash_word(c.seed, t) for t in range(2000)] for c in counters(20)])
    bits = (words.unsqueeze(2) >> torch.arange(32)) & 1  # [positions, tokens, bits]
    limit = 4.5 * 0.5 / math.sqrt(words.numel())
    assert (bits.double().mean((0, 1)) - 0.5).abs().max() < limit
    for flips in (bits[1:] ^ bits[:-1], bits[:, 1:] ^ bits[:, :-1], bits[..., 1:] ^ bits[..., :-1]):
        assert (flips.double().mean((0, 1)) - 0.5).abs().max() < 1.1 * limit


def test_rows_and_neighbouring_tokens_are_uncorrelated() -> None:
    noise = gumbel_rows(seed_rows(counters(64), device=CPU), 4096).double()
    assert (noise.corrcoef() - torch.eye(64)).abs().max() < 0.085
    by_token = gumbel_rows(seed_rows(counters(4096), device=CPU), 64).double().T
    assert (by_token.corrcoef() - torch.eye(64)).abs().max() < 0.085
    shifted = torch.corrcoef(torch.stack([noise[:, 1:].flatten(), noise[:, :-1].flatten()]))[0, 1]
    assert shifted.abs() < 0.01


def test_argmax_of_log_probability_plus_noise_follows_the_law() -> None:
    p = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.009, 0.001])
    noise = gumbel_rows(seed_rows(counters(60_000), device=CPU), len(p))
    observed = (p.log() + noise).argmax(1).bincount(minlength=len(p))
    assert stats.chisquare(observed.numpy(), p.numpy() * 60_000 / p.sum().item()).pvalue > 1e-3


@pytest.mark.parametrize("counts", [[1], [2, 1, 3], [5, 8, 1, 30], [64] * 5])
def test_runs_of_positions_have_the_seeds_of_their_counters(counts: list[int]) -> None:
    keys = [0, (1 << 64) - 1, 12345678901234567890, 7, 1 << 63][: len(counts)]
    starts = [0, 3, 1 << 20, 100, 5][: len(counts)]
    every = [
        Counter(key=key, position=start + j, purpose=Purpose.TARGET)
        for key, start, count in zip(keys, starts, counts, strict=True)
        for j in range(count)
    ]
    seeds = seed_runs(keys, starts, counts, Purpose.TARGET)
    assert torch.equal(seeds, seed_rows(every, device=CPU))
    unsigned = [int(low) % (1 << 32) | int(high) % (1 << 32) << 32 for low, high in seeds.tolist()]
    assert unsigned == [one.seed for one in every]
