"""Whether every text under load is the text of the same request alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.local.soak.cases import Catalogue
from outrider.local.soak.streams import Outcome
from outrider.local.stack import LocalStack

__all__ = ["MAX_MARGIN", "Divergence", "TextJudge", "first_difference", "run_alone"]

MAX_MARGIN = 1e-3
"""Two texts may part where the two best tokens are nearer than this (design: exactness in fp32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A text that parts from its solo run."""

    case: int
    index: int
    """Output index of the first token that differs, or that one of the two lacks."""
    margin: float
    """Of the draw there, between its two best tokens."""

    @property
    def excused(self) -> bool:
        """Whether rounding explains it."""
        return self.margin < MAX_MARGIN

    def __str__(self) -> str:
        verdict = "excused by rounding" if self.excused else "WRONG"
        return f"case {self.case} parts at token {self.index}, top-2 margin {self.margin:.2e}: {verdict}"


async def run_alone(
    stack: LocalStack, catalogue: Catalogue, meter: Callable[[str], None]
) -> dict[int, tuple[int, ...]]:
    """The text of each case, run by itself without speculation. Raises `OutriderError`s."""
    texts = {}
    for case in range(len(catalogue.requests)):
        meter(f"alone: case {case}")
        result = await stack.generate(catalogue.alone(case))
        texts[case] = result.choices[0].token_ids
    return texts


class TextJudge:
    """Compares each text as it comes and keeps only where texts part: a long run must not grow by its record."""

    def __init__(self, alone: dict[int, tuple[int, ...]]) -> None:
        """`alone`: the right text of every case."""
        self._alone = alone
        self._parted: set[tuple[int, int]] = set()

    def take(self, one: Outcome) -> None:
        """What a request that has not reached its end delivered must be the beginning of its solo text."""
        expected = self._alone[one.case]
        index = first_difference(one.token_ids, expected if one.complete else expected[: len(one.token_ids)])
        if index is not None:
            self._parted.add((one.case, index))

    def divergences(self, margin: Callable[[int, tuple[int, ...]], float]) -> tuple[Divergence, ...]:
        """Each kind once, by case. `margin(case, output)` judges the draw behind that output."""
        return tuple(
            Divergence(case=case, index=index, margin=margin(case, self._alone[case][:index]))
            for case, index in sorted(self._parted)
        )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing in one of the two; None if they are equal."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
