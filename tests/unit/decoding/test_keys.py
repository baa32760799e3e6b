import itertools
import subprocess
import sys

from scipy import stats

from outrider.decoding.keys import Counter, Purpose, derive_key, hash_word, uniform


def test_samples_of_one_request_and_neighbouring_seeds_never_share_a_key() -> None:
    keys = {derive_key(seed, index) for seed in range(200) for index in range(20)}
    assert len(keys) == 4000
    assert all(0 <= key < 2**64 for key in keys)


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert derive_key(-1, 3) == derive_key(2**64 - 1, 3)
    assert derive_key(2**63, 0) != derive_key(0, 0)


def test_key_values_never_change() -> None:
    """Replicas of different versions must agree, and a seed means the same next year."""
    assert derive_key(42, 0) == 0xB29ED950786F5AE3
    seed = Counter(key=42, position=7, purpose=Purpose.TARGET).seed
    assert (seed, hash_word(seed, 1000)) == (0xAC56891DE634E096, 0x4CE89D3C)


def test_each_part_of_a_counter_selects_another_stream() -> None:
    seeds = {
        Counter(key=key, position=position, purpose=purpose).seed
        for key, position, purpose in itertools.product(range(8), range(64), Purpose)
    }
    assert len(seeds) == 8 * 64 * len(Purpose)


def test_uniform_is_uniform_and_open() -> None:
    values = [uniform(key, position, Purpose.ACCEPT) for key in range(50) for position in range(100)]
    assert all(0.0 < value < 1.0 for value in values)
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_purposes_are_uncorrelated() -> None:
    columns = [[uniform(9, position, purpose) for position in range(4000)] for purpose in Purpose]
    for one, other in itertools.combinations(columns, 2):
        assert abs(stats.pearsonr(one, other).statistic) < 0.06


def test_router_can_make_keys_without_torch() -> None:
    code = "import sys, outrider.decoding.keys, outrider.decoding.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
