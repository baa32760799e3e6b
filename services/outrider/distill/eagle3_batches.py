"""From labelled texts to padded batches for a head: the target's features beside the tokens."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.errors import ConfigError
from outrider.distill.eagle3_loss import HeadBatch
from outrider.distill.records import LabelledText, TokenKind
from outrider.distill.vocabulary import DraftVocabulary

__all__ = ["CommonPrefix", "HeadBatches"]

# Prompt tokens teach the head to read, and cost little beside the answers; nothing stands behind the end.
_KIND_WEIGHT = torch.tensor([0.15, 0.5, 1.0, 0.0])
_WINDOW = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonPrefix:
    """What stands before every text and is stored with none of them."""

    ids: Tensor
    """[p], int64."""
    features: Tensor
    """[p, 3, hidden_size], as in `LabelledText`."""


class HeadBatches:
    """Endless shuffled batches, and the order they come in, which `skip` resumes."""

    def __init__(
        self,
        texts: Sequence[LabelledText],
        prefix: CommonPrefix,
        vocabulary: DraftVocabulary,
        embedding: Tensor,
        *,
        batch_tokens: int,
        seed: int,
    ) -> None:
        """`embedding` [vocab, hidden] is the target's. Raises `ConfigError` for texts without features."""
        if any(one.features is None for one in texts):
            raise ConfigError("method eagle3: the sampled texts have no features; sample them for this method")
        self._texts = texts
        # Beside the texts, which are on the host until a batch is made of them.
        self._prefix = CommonPrefix(ids=prefix.ids.cpu(), features=prefix.features.cpu())
        self._vocabulary = vocabulary
        self._embedding = embedding
        mean = sum(len(one) for one in texts) / max(1, len(texts)) + len(prefix.ids)
        self._batch_texts = max(1, round(batch_tokens / mean))
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """Batches that show every text once."""
        return -(-len(self._texts) // self._batch_texts)

    def once(self) -> Iterator[HeadBatch]:
        """Every text once, in the order of their lengths."""
        order = sorted(range(len(self._texts)), key=lambda index: len(self._texts[index]))
        for begin in range(0, len(order), self._batch_texts):
            yield self._batch(order[begin : begin + self._batch_texts])

    def shuffled(self, skip: int) -> Iterator[HeadBatch]:
        """Endless; the first `skip` batches are left out, as a resumed training has seen them."""
        epoch, offset = divmod(skip, self.per_epoch)
        while True:
            for chosen in self._epoch(epoch)[offset:]:
                yield self._batch(chosen)
            epoch, offset = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Texts of about equal length together, so that little is padding; batches differ every time."""
        source = random.Random(self._seed * 1_000_003 + epoch)
        order = list(range(len(self._texts)))
        source.shuffle(order)
        size = self._batch_texts
        batches = []
        for begin in range(0, len(order), size * _WINDOW):
            window = sorted(order[begin : begin + size * _WINDOW], key=lambda index: len(self._texts[index]))
            batches += [window[place : place + size] for place in range(0, len(window), size)]
        source.shuffle(batches)
        return batches

    def _batch(self, chosen: Sequence[int]) -> HeadBatch:
        texts = [self._texts[index] for index in chosen]
        begin = len(self._prefix.ids)
        ids = pad_sequence([torch.cat((self._prefix.ids, one.ids.long())) for one in texts], batch_first=True)
        features = pad_sequence(
            [torch.cat((self._prefix.features, one.features)) for one in texts if one.features is not None],
            batch_first=True,
        )

        def behind_prefix(rows: list[Tensor], fill: float) -> Tensor:
            padded = pad_sequence(rows, batch_first=True, padding_value=fill)
            before = padded.new_full((len(rows), begin, *padded.shape[2:]), fill)
            return torch.cat((before, padded), dim=1)

        columns = behind_prefix([self._vocabulary.columns(one.top_ids) for one in texts], -1)
        probs = behind_prefix([one.top_logp.float().exp() for one in texts], 0.0)
        kinds = behind_prefix([one.kind for one in texts], TokenKind.END)
        device = self._embedding.device
        return HeadBatch(
            embeddings=self._embedding[ids.to(device)],
            # The row of a token reads what the target said one position before.
            features=torch.cat((torch.zeros_like(features[:, :1]), features[:, :-1]), 1).flatten(2).to(device),
            teacher_ids=columns.clamp_min(0).to(device),
            teacher_probs=probs.where(columns >= 0, 0.0).to(device),
            teacher_hidden=behind_prefix([one.hidden for one in texts], 0.0).to(device),
            weight=_KIND_WEIGHT[kinds.long()].to(device),
            num_tokens=sum(len(one) + begin for one in texts),
        )
