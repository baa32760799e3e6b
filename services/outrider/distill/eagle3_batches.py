"""From labelled texts to padded batches for a head: the target's features beside the tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.errors import ConfigError
from outrider.distill.batches import KIND_WEIGHT, LengthOrder
from outrider.distill.eagle3_loss import HeadBatch
from outrider.distill.records import LabelledText, TokenKind
from outrider.distill.vocabulary import DraftVocabulary

__all__ = ["CommonPrefix", "HeadBatches"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonPrefix:
    """What stands before every text and is stored with none of them."""

    ids: Tensor
    """[p], int64."""
    features: Tensor
    """[p, 3, hidden_size], as in `LabelledText`."""


class HeadBatches:
    """The batches of some texts for a head, in the orders of `LengthOrder`."""

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
        lengths = [len(prefix.ids) + len(one) for one in texts]
        self._order = LengthOrder(lengths, batch_tokens=batch_tokens, seed=seed)

    def once(self) -> Iterator[HeadBatch]:
        """Every text once."""
        return map(self._batch, self._order.once())

    def shuffled(self, skip: int) -> Iterator[HeadBatch]:
        """Endless, behind the first `skip`."""
        return map(self._batch, self._order.shuffled(skip))

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
            weight=KIND_WEIGHT[kinds.long()].to(device),
            num_tokens=sum(len(one) + begin for one in texts),
        )
