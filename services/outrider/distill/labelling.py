"""Label texts by prefill: the target's law and last hidden state at every position."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.distill.records import LabelledText, TokenKind
from outrider.distill.sampling import SampledText

__all__ = ["Labeller"]

_BATCH_TEXTS = 16


class Labeller:
    """Runs texts through a target. One forward labels every position, several times cheaper than sampling."""

    def __init__(self, target: Any, *, prefix: Sequence[int], top_k: int, feature_layers: Sequence[int] = ()) -> None:
        """`target`: a transformers model; `prefix`: ids before every text, which get no label.

        `feature_layers`: layers whose inputs are kept too, for an EAGLE-3 head.
        """
        self._target = target
        self._prefix = torch.tensor(list(prefix), dtype=torch.int32)
        self._top_k = top_k
        self._feature_layers = tuple(feature_layers)
        self._device = target.get_input_embeddings().weight.device

    @property
    def prefix(self) -> Tensor:
        """[p], int32."""
        return self._prefix

    @torch.inference_mode()
    def label(self, texts: Sequence[SampledText]) -> list[LabelledText]:
        """The texts in order. Each begins with the prefix, behind which at least two ids stand."""
        labelled: dict[int, LabelledText] = {}
        by_length = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
        for begin in range(0, len(by_length), _BATCH_TEXTS):
            chosen = by_length[begin : begin + _BATCH_TEXTS]
            labelled.update(zip(chosen, self._batch([texts[index] for index in chosen]), strict=True))
        return [labelled[index] for index in range(len(texts))]

    def _batch(self, texts: Sequence[SampledText]) -> list[LabelledText]:
        ids = pad_sequence([torch.tensor(one.ids) for one in texts], batch_first=True)
        wants_features = bool(self._feature_layers)
        output = self._target.get_decoder()(
            input_ids=ids.to(self._device), use_cache=False, output_hidden_states=wants_features
        )
        hidden = output.last_hidden_state.cpu()  # [batch, length, hidden_size]
        features = None
        if wants_features:
            # Entry i is what enters layer i.
            features = torch.stack([output.hidden_states[layer] for layer in self._feature_layers], dim=2).cpu()
        return [
            self._one(text, ids[row], hidden[row], None if features is None else features[row])
            for row, text in enumerate(texts)
        ]

    def _one(self, text: SampledText, ids: Tensor, hidden: Tensor, features: Tensor | None) -> LabelledText:
        part = slice(len(self._prefix), len(text.ids))
        logits = self._target.get_output_embeddings()(hidden[part].to(self._device)).float()  # [n, vocab]
        top, top_ids = logits.topk(self._top_k, dim=-1)
        logp = top - logits.logsumexp(-1, keepdim=True)
        return LabelledText(
            ids=ids[part].int(),
            kind=_kinds(text)[part],
            top_ids=top_ids.int().cpu(),
            top_logp=logp.half().cpu(),
            hidden=hidden[part].bfloat16(),
            prompt_class=text.request.prompt_class,
            temperature=text.request.sampling.temperature,
            features=None if features is None else features[part].bfloat16(),
        )


def _kinds(text: SampledText) -> Tensor:
    """The `TokenKind` behind every position of prompt and continuation: [len(text.ids)]."""
    request = text.request
    kinds = torch.full((len(text.ids),), int(TokenKind.PROMPT), dtype=torch.int8)
    if request.user_from is not None:
        kinds[request.user_from - 1 : request.user_until - 1] = TokenKind.USER
    kinds[len(request.prompt_ids) - 1 :] = TokenKind.ANSWER
    kinds[-1] = TokenKind.END
    return kinds
