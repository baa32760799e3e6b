"""A draft's smaller vocabulary: its folder names the ids that it may propose, and only they are computed.

The output head of a small model over a full vocabulary costs more than its layers. A folder with
`draft_vocabulary.json` is a draft by declaration: here its head has the rows of those ids alone.
Everything else reads the folder as the standard model that it is, with the full head.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.errors import ConfigError

__all__ = ["DRAFT_VOCABULARY", "ScatteredHead", "read_draft_vocabulary", "reduce_head", "scatter_head"]

DRAFT_VOCABULARY = "draft_vocabulary.json"
"""In a model folder: {"token_ids": [...]}, ascending."""


def read_draft_vocabulary(folder: Path, vocab_size: int) -> Tensor | None:
    """The ids that the folder names: [v], int64, ascending; None when it names none.

    Raises `ConfigError` when the file is damaged or names ids that the model does not have.
    """
    path = folder / DRAFT_VOCABULARY
    if not path.is_file():
        return None
    try:
        token_ids = json.loads(path.read_text(encoding="utf-8"))["token_ids"]
        ids = torch.tensor(token_ids, dtype=torch.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model: {path} is no list of token ids: {error!r}") from error
    if ids.ndim != 1 or len(ids) == 0 or bool((ids[1:] <= ids[:-1]).any()):
        raise ConfigError(f"model: {path} does not list different token ids in ascending order")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ConfigError(f"model: {path} names token ids outside the model's {vocab_size}")
    return ids


def reduce_head(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Give the model an output head of the rows `token_ids` alone. Before the weights are packed."""
    head = model.get_output_embeddings()
    reduced = nn.Linear(1, 1, bias=head.bias is not None, device="meta")
    reduced.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    if head.bias is not None:
        reduced.bias = nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    model.set_output_embeddings(reduced)


def scatter_head(model: PreTrainedModel, token_ids: Tensor, vocab_size: int) -> None:
    """Let the reduced head, now packed, answer with columns for the whole vocabulary."""
    model.set_output_embeddings(ScatteredHead(model.get_output_embeddings(), token_ids, vocab_size))


class ScatteredHead(nn.Module):
    """A reduced head whose logits stand at their full ids; everywhere else they are -inf."""

    def __init__(self, head: nn.Module, token_ids: Tensor, vocab_size: int) -> None:
        """`token_ids` [v]: where the head's v columns belong."""
        super().__init__()
        self.head = head
        self._token_ids = token_ids
        self._vocab_size = vocab_size

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [n, hidden_size] to float32 [n, vocab_size]."""
        known: Tensor = self.head(rows).float()
        full = known.new_full((rows.shape[0], self._vocab_size), -torch.inf)
        full.index_copy_(1, self._token_ids, known)
        return full
