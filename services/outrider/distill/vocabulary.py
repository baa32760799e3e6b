"""The draft's own, smaller vocabulary: the ids that its softmax ranges over.

A small draft spends more on the output head than on its layers, and nearly all tokens of a text are
among a few thousand (FR-Spec, Zhao et al. 2025; EAGLE-3, Li et al. 2025). A token outside is never
proposed; the target still can draw it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from outrider.distill.records import LabelledText, TokenKind

__all__ = ["DraftVocabulary"]


class DraftVocabulary:
    """Ids in ascending order, and the way back from the full vocabulary."""

    def __init__(self, token_ids: Tensor, full_size: int) -> None:
        """`token_ids` [v]: different ids below `full_size`."""
        self.token_ids = token_ids.long().sort().values
        self.full_size = full_size
        self._columns = torch.full((full_size,), -1)
        self._columns[self.token_ids] = torch.arange(len(self.token_ids))

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @classmethod
    def of_texts(
        cls, texts: Iterable[LabelledText], *, size: int, full_size: int, always: Iterable[int]
    ) -> "DraftVocabulary":
        """The most frequent answer tokens; then low ids, which stand for frequent merges; `always` in any case."""
        counts = torch.zeros(full_size, dtype=torch.float64)
        for one in texts:
            answers = one.ids[1:][one.kind[:-1] == TokenKind.ANSWER].long()
            counts += torch.bincount(answers, minlength=full_size)
            # What nearly was drawn counts too: with few texts it tells much more.
            labelled = one.kind == TokenKind.ANSWER
            weights = one.top_logp[labelled].double().exp().flatten()
            counts += torch.bincount(one.top_ids[labelled].long().flatten(), weights, minlength=full_size)
        counts -= torch.arange(full_size, dtype=torch.float64) * 1e-12
        counts[list(always)] = torch.inf
        return cls(counts.topk(min(size, full_size)).indices, full_size)

    def columns(self, ids: Tensor) -> Tensor:
        """Columns of full ids, the same shape; -1 where the draft does not have the id."""
        return self._columns[ids.long()]
