import pytest
import torch

from outrider.decoding.draw import DrawRow, first_argmax, perturbed
from outrider.decoding.keys import Counter, Purpose
from outrider.decoding.noise import gumbel


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 127, 128, 200, 4096, 4100])
def test_first_argmax_takes_the_lowest_id_of_a_tie(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randint(0, 3, (50, vocab), generator=generator).float()
    scores[1] = -torch.inf
    scores[2, -1] = 9.0
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert first_argmax(scores).tolist() == expected
    padded = torch.cat([scores, scores + 5], dim=1)[:, :vocab]  # rows with a stride
    assert first_argmax(padded).tolist() == expected


def test_truncated_and_full_rows_get_the_same_noise_and_greedy_rows_none() -> None:
    law = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    law[:, 20:280] = -torch.inf
    counter = Counter(key=3, position=8, purpose=Purpose.TARGET)
    rows = [
        DrawRow(counter=counter, truncated=True),
        DrawRow(counter=None, truncated=True),
        DrawRow(counter=counter, truncated=False),
        DrawRow(counter=None, truncated=False),
    ]
    untouched = law.clone()
    scores = perturbed(law, rows)
    assert torch.equal(law, untouched)
    noise = gumbel(3, 8, Purpose.TARGET, 300)
    assert torch.equal(scores, law + torch.stack([noise, 0 * noise, noise, 0 * noise]))
    assert torch.equal(perturbed(law[2:3], rows[2:3]), scores[2:3])
    assert perturbed(law, [rows[1]] * 4) is law
