"""Whether every text under load is the text of the same request alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.local.soak.cases import Catalogue
from outrider.local.soak.streams import Outcome
from outrider.local.stack import LocalStack

__all__ = ["MAX_MARGIN", "Divergence", "divergences", "first_difference", "run_alone"]

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
    stack: LocalStack, catalogue: Catalogue, cases: Iterable[int], meter: Callable[[str], None]
) -> dict[int, tuple[int, ...]]:
    """The text of each case, run by itself without speculation. Raises `OutriderError`s."""
    texts = {}
    for case in sorted(set(cases)):
        meter(f"alone: case {case}")
        result = await stack.generate(catalogue.alone(case))
        texts[case] = result.choices[0].token_ids
    return texts


def divergences(
    outcomes: Sequence[Outcome], alone: dict[int, tuple[int, ...]], margin: Callable[[int, tuple[int, ...]], float]
) -> list[Divergence]:
    """Texts that differ, each kind once. `margin(case, output)` judges the draw behind that output.

    What an aborted request delivered must be the beginning of its solo text.
    """
    found: dict[tuple[int, int], Divergence] = {}
    for one in outcomes:
        if one.case not in alone:
            continue
        expected = alone[one.case][: len(one.token_ids)] if one.aborted else alone[one.case]
        index = first_difference(one.token_ids, expected)
        if index is not None and (one.case, index) not in found:
            found[one.case, index] = Divergence(
                case=one.case, index=index, margin=margin(one.case, alone[one.case][:index])
            )
    return list(found.values())


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing in one of the two; None if they are equal."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
