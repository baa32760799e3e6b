"""From labelled texts to padded training batches, in an order that a seed fixes."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.distill.objective import Labels
from outrider.distill.records import LabelledText
from outrider.distill.vocabulary import DraftVocabulary

__all__ = ["Batch", "TextBatches", "is_held_out"]

_HELD_OUT_EVERY = 40
# A prompt's tokens are no answer, but the target's opinion of them is worth something.
_KIND_WEIGHT = torch.tensor([0.15, 0.5, 1.0, 0.0])
# Texts of about equal length lie in one batch, so that little is padding; they are sorted within
# a window of this many batches, so that batches still differ from epoch to epoch.
_WINDOW = 24


def is_held_out(index: int) -> bool:
    """Whether the text of that number is kept for validation."""
    return index % _HELD_OUT_EVERY == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Texts behind their common prefix, padded at the end, where causal attention sees no padding."""

    ids: Tensor
    """[batch, length], int64."""
    rows: Tensor
    """[n], int64: positions in the flattened batch that carry a label."""
    labels: Labels
    """Of those n positions."""
    num_tokens: int
    """Without padding."""


class TextBatches:
    """Endless shuffled batches, and the order they come in, which `skip` resumes."""

    def __init__(
        self,
        texts: Sequence[LabelledText],
        prefix: Tensor,
        vocabulary: DraftVocabulary,
        *,
        batch_tokens: int,
        seed: int,
    ) -> None:
        """`batch_tokens`: about how many tokens a batch has."""
        self._texts = texts
        self._prefix = prefix
        self._vocabulary = vocabulary
        mean = sum(len(one) for one in texts) / max(1, len(texts)) + len(prefix)
        self._batch_texts = max(1, round(batch_tokens / mean))
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """Batches that show every text once."""
        return -(-len(self._texts) // self._batch_texts)

    def once(self) -> Iterator[Batch]:
        """Every text once, in the order of their lengths."""
        order = sorted(range(len(self._texts)), key=lambda index: len(self._texts[index]))
        for begin in range(0, len(order), self._batch_texts):
            yield self._batch(order[begin : begin + self._batch_texts])

    def shuffled(self, skip: int) -> Iterator[Batch]:
        """Endless; the first `skip` batches are left out, as a resumed training has seen them."""
        epoch, offset = divmod(skip, self.per_epoch)
        while True:
            for chosen in self._epoch(epoch)[offset:]:
                yield self._batch(chosen)
            epoch, offset = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[list[int]]:
        random_order = random.Random(self._seed * 1_000_003 + epoch)
        order = list(range(len(self._texts)))
        random_order.shuffle(order)
        size = self._batch_texts
        batches = []
        for begin in range(0, len(order), size * _WINDOW):
            window = sorted(order[begin : begin + size * _WINDOW], key=lambda index: len(self._texts[index]))
            batches += [window[place : place + size] for place in range(0, len(window), size)]
        random_order.shuffle(batches)
        return batches

    def _batch(self, chosen: Sequence[int]) -> Batch:
        texts = [self._texts[index] for index in chosen]
        ids = pad_sequence([torch.cat([self._prefix, one.ids]).long() for one in texts], batch_first=True)
        length, begin = ids.shape[1], len(self._prefix)
        rows, parts = [], []
        for row, one in enumerate(texts):
            weight = _KIND_WEIGHT[one.kind.long()]
            labelled = weight.nonzero().squeeze(1)
            rows.append(row * length + begin + labelled)
            parts.append((one.top_ids[labelled], one.top_logp[labelled], one.hidden[labelled], weight[labelled]))
        columns, logp, hidden, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        return Batch(
            ids=ids,
            rows=torch.cat(rows),
            labels=Labels(columns=self._vocabulary.columns(columns), logp=logp.float(), hidden=hidden, weight=weights),
            num_tokens=sum(len(one) + begin for one in texts),
        )
