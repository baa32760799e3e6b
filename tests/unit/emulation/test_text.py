"""The synthetic text: its acceptance and rank curve are what the settings say."""

from collections import Counter
from typing import Any

import pytest

from outrider.core.errors import ConfigError
from outrider.engine.emulated.text import (
    COUPLED_RANK_SHARES,
    HEADER_LEN,
    REJECTION_RANK_SHARES,
    SyntheticText,
    TextSettings,
    header_tokens,
)

VOCAB = 512
POSITIONS = 40_000


def ranks(settings: TextSettings, seed: int = 1, positions: int = POSITIONS) -> Counter[int | None]:
    """How often the target's token is the draft's first, second … guess, or none."""
    text, header = SyntheticText(settings, VOCAB), header_tokens(seed, VOCAB)
    found: Counter[int | None] = Counter()
    for position in range(10, 10 + positions):
        guesses, token = text.guesses(header, position).token_ids, text.token(header, position)
        assert len(set(guesses)) == len(guesses)
        found[guesses.index(token) if token in guesses else None] += 1
    return found


def sigma(chance: float) -> float:
    return float((chance * (1 - chance) / POSITIONS) ** 0.5)


@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.85])
@pytest.mark.parametrize("shares", [COUPLED_RANK_SHARES, REJECTION_RANK_SHARES])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_curve_holds(acceptance: float, shares: tuple[float, ...], spread: float) -> None:
    found = ranks(TextSettings(acceptance=acceptance, rank_shares=shares, confidence_spread=spread))
    expected = (acceptance, *((1 - acceptance) * share for share in shares))
    for rank, chance in enumerate(expected):
        assert abs(found[rank] / POSITIONS - chance) < 4.5 * sigma(chance), rank


def test_the_rejection_curve_holds_what_was_measured() -> None:
    assert sum(REJECTION_RANK_SHARES[:3]) == pytest.approx(0.53)
    assert COUPLED_RANK_SHARES[:6] == (0.44, 0.19, 0.11, 0.06, 0.05, 0.03)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_certainty(acceptance: float) -> None:
    found = ranks(TextSettings(acceptance=acceptance), positions=200)
    assert found[0] == 200 * acceptance


def test_margins_say_how_sure_the_draft_is() -> None:
    text, header = SyntheticText(TextSettings(acceptance=0.7), VOCAB), header_tokens(3, VOCAB)
    right: dict[float, list[bool]] = {}
    for position in range(10, 10 + POSITIONS):
        guesses = text.guesses(header, position)
        right.setdefault(guesses.margin, []).append(guesses.token_ids[0] == text.token(header, position))
    rates = [sum(right[margin]) / len(right[margin]) for margin in sorted(right)]
    assert rates == [pytest.approx(0.55, abs=0.02), pytest.approx(0.85, abs=0.02)]


def test_acceptance_changes_where_the_settings_say() -> None:
    settings = TextSettings(acceptance=0.0, acceptance_changes=((100, 1.0), (200, 0.0)))
    text, header = SyntheticText(settings, VOCAB), header_tokens(1, VOCAB)
    right = [text.guesses(header, at).token_ids[0] == text.token(header, at) for at in range(10, 300)]
    assert right == [False] * 90 + [True] * 100 + [False] * 100


def test_headers_and_keys_make_other_texts() -> None:
    def opening(settings: TextSettings, seed: int) -> list[int]:
        text = SyntheticText(settings, VOCAB)
        return [text.token(header_tokens(seed, VOCAB), at) for at in range(HEADER_LEN, 40)]

    assert opening(TextSettings(), 1) == opening(TextSettings(acceptance=0.1), 1)
    assert opening(TextSettings(), 1) != opening(TextSettings(), 2)
    assert opening(TextSettings(), 1) != opening(TextSettings(noise_key=2), 1)
    assert header_tokens(513, VOCAB) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"acceptance": 1.1}, "acceptance: 1.1"),
        ({"acceptance_changes": ((5, 0.5), (5, 0.6))}, "acceptance_changes"),
        ({"acceptance_changes": ((5, 2.0),)}, "from position 5"),
        ({"rank_shares": (0.9, 0.2)}, "rank_shares"),
        ({"confidence_spread": -0.1}, "confidence_spread"),
    ],
)
def test_settings_that_cannot_be_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TextSettings(**changes)


def test_the_vocabulary_must_hold_the_guesses() -> None:
    with pytest.raises(ConfigError, match="vocab_size: 10"):
        SyntheticText(TextSettings(), 10)
