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

__all__ = ["KIND_WEIGHT", "Batch", "LengthOrder", "TextBatches", "is_held_out"]

_HELD_OUT_EVERY = 40
KIND_WEIGHT = torch.tensor([0.15, 0.5, 1.0, 0.0])
"""Weight of a position by its `TokenKind`. A prompt's tokens are no answer, but the target's opinion of
them is worth something; nothing stands behind the end."""
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


class LengthOrder:
    """Which texts form a batch, and the order of the batches: fixed by a seed, and resumable."""

    def __init__(self, lengths: Sequence[int], *, batch_tokens: int, seed: int) -> None:
        """`lengths` of the texts in tokens, what stands before each of them included."""
        self._lengths = lengths
        mean = sum(lengths) / max(1, len(lengths))
        self._size = max(1, round(batch_tokens / max(1.0, mean)))
        self._seed = seed

    def once(self) -> Iterator[list[int]]:
        """Every text once, in the order of their lengths."""
        order = self._by_length(range(len(self._lengths)))
        for begin in range(0, len(order), self._size):
            yield order[begin : begin + self._size]

    def shuffled(self, skip: int) -> Iterator[list[int]]:
        """Endless; the first `skip` batches are left out, as a resumed training has seen them."""
        epoch, offset = divmod(skip, -(-len(self._lengths) // self._size))
        while True:
            yield from self._epoch(epoch)[offset:]
            epoch, offset = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[list[int]]:
        source = random.Random(self._seed * 1_000_003 + epoch)
        order = list(range(len(self._lengths)))
        source.shuffle(order)
        batches = []
        for begin in range(0, len(order), self._size * _WINDOW):
            window = self._by_length(order[begin : begin + self._size * _WINDOW])
            batches += [window[place : place + self._size] for place in range(0, len(window), self._size)]
        source.shuffle(batches)
        return batches

    def _by_length(self, chosen: Sequence[int]) -> list[int]:
        return sorted(chosen, key=lambda index: self._lengths[index])


class TextBatches:
    """The batches of some texts, in the orders of `LengthOrder`."""

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
        lengths = [len(prefix) + len(one) for one in texts]
        self._order = LengthOrder(lengths, batch_tokens=batch_tokens, seed=seed)

    def once(self) -> Iterator[Batch]:
        """Every text once."""
        return map(self._batch, self._order.once())

    def shuffled(self, skip: int) -> Iterator[Batch]:
        """Endless, behind the first `skip`."""
        return map(self._batch, self._order.shuffled(skip))

    def _batch(self, chosen: Sequence[int]) -> Batch:
        texts = [self._texts[index] for index in chosen]
        ids = pad_sequence([torch.cat([self._prefix, one.ids]).long() for one in texts], batch_first=True)
        length, begin = ids.shape[1], len(self._prefix)
        rows, parts = [], []
        for row, one in enumerate(texts):
            weight = KIND_WEIGHT[one.kind.long()]
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
