"""The loss against a plain computation of each of its parts."""

import pytest
import torch
from torch import Tensor

from outrider.distill.objective import Labels, LossWeights, blended_loss

HIDDEN, ROWS, COLUMNS = 8, 3, 5


def labels(columns: list[list[int]], weight: list[float]) -> Labels:
    generator = torch.Generator().manual_seed(1)
    return Labels(
        columns=torch.tensor(columns),
        logp=torch.tensor([[0.5, 0.25]] * ROWS).log(),
        hidden=torch.randn(ROWS, HIDDEN, generator=generator),
        weight=torch.tensor(weight),
    )


def states() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)

    # Values that bfloat16 holds exactly: the products then differ by their sums only.
    def make(rows: int) -> Tensor:
        return torch.randint(-3, 4, (rows, HIDDEN), generator=generator).float() / 4

    return make(ROWS), make(COLUMNS)


def only(part: str) -> LossWeights:
    return LossWeights(**{"likeliest": 0.0, "law": 0.0, "hidden": 0.0, part: 1.0})


def test_the_law_part_is_the_cross_entropy_with_the_renormalised_law() -> None:
    hidden, head = states()
    some = labels([[0, 1], [2, 3], [4, 0]], [1.0, 1.0, 2.0])
    loss, _ = blended_loss(hidden, head, some, only("law"))
    log_q = (hidden @ head.T).log_softmax(-1)
    each = [-(2 / 3 * log_q[i, a] + 1 / 3 * log_q[i, b]) for i, (a, b) in enumerate([(0, 1), (2, 3), (4, 0)])]
    assert float(loss) == pytest.approx(float((each[0] + each[1] + 2 * each[2]) / 4), abs=2e-2)


def test_a_token_outside_the_vocabulary_teaches_nothing_of_itself() -> None:
    hidden, head = states()
    inside = labels([[0, 1]] * ROWS, [1.0, 0.0, 0.0])
    outside = labels([[0, -1]] * ROWS, [1.0, 0.0, 0.0])
    log_q = (hidden @ head.T).log_softmax(-1)[0]
    loss, _ = blended_loss(hidden, head, outside, only("law"))
    assert float(loss) == pytest.approx(float(-log_q[0]), abs=2e-2)
    assert float(loss) != pytest.approx(float(blended_loss(hidden, head, inside, only("law"))[0]), abs=1e-3)
    loss, agreement = blended_loss(hidden, head, labels([[-1, 0]] * ROWS, [1.0] * ROWS), only("likeliest"))
    assert (float(loss), float(agreement)) == (0.0, 0.0)


def test_agreement_is_the_weighted_share_of_equal_maxima() -> None:
    hidden, head = states()
    best = (hidden @ head.T).argmax(-1).tolist()
    wrong = (best[1] + 1) % COLUMNS
    some = labels([[best[0], 1], [wrong, 1], [best[2], 1]], [1.0, 2.0, 1.0])
    assert float(blended_loss(hidden, head, some, LossWeights())[1]) == pytest.approx(0.5)


def test_equal_hidden_states_cost_nothing() -> None:
    hidden, head = states()
    some = labels([[0, 1]] * ROWS, [1.0] * ROWS)
    same = Labels(columns=some.columns, logp=some.logp, hidden=hidden, weight=some.weight)
    assert float(blended_loss(hidden, head, same, only("hidden"))[0]) == 0.0
    assert float(blended_loss(hidden, head, some, only("hidden"))[0]) > 0.1
