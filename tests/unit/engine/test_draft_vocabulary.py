"""A folder that names its draft vocabulary is read with care, and its head answers in full columns."""

from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.core.errors import ConfigError
from outrider.engine.draft_vocabulary import DRAFT_VOCABULARY, ScatteredHead, read_draft_vocabulary


def test_a_folder_without_the_file_has_the_full_vocabulary(tmp_path: Path) -> None:
    assert read_draft_vocabulary(tmp_path, 8) is None


def test_ids_are_read(tmp_path: Path) -> None:
    (tmp_path / DRAFT_VOCABULARY).write_text('{"token_ids": [0, 3, 7]}')
    ids = read_draft_vocabulary(tmp_path, 8)
    assert ids is not None
    assert ids.tolist() == [0, 3, 7]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1, 2]", "is no list of token ids"),
        ('{"token_ids": ["a"]}', "is no list of token ids"),
        ("{", "is no list of token ids"),
        ('{"token_ids": []}', "ascending order"),
        ('{"token_ids": [1, 1]}', "ascending order"),
        ('{"token_ids": [2, 1]}', "ascending order"),
        ('{"token_ids": [-1, 1]}', "outside the model's 8"),
        ('{"token_ids": [1, 8]}', "outside the model's 8"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / DRAFT_VOCABULARY).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_draft_vocabulary(tmp_path, 8)


def test_logits_stand_at_their_full_ids() -> None:
    head = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    with torch.inference_mode():
        logits = ScatteredHead(head, torch.tensor([1, 3]), 5)(torch.tensor([[4.0, 6.0]]))
    assert logits.tolist() == [[-torch.inf, 4.0, -torch.inf, 6.0, -torch.inf]]
