"""Raw log-probabilities: log-softmax before every sampling transform, as plain decoding reports them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.verdict import TokenLogprobs
from outrider.decoding.transfer import device_index

__all__ = ["LogprobRequest", "raw_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """One committed token whose log-probability is wanted."""

    row: int
    """Row of the logits that the token was drawn from."""
    token_id: int
    num_top: int
    """How many of the most likely tokens to report as well; 0 for none."""


def raw_logprobs(logits: Tensor, requests: Sequence[LogprobRequest]) -> list[TokenLogprobs]:
    """Log-probabilities of `requests`, in order, from raw logits [rows, vocab].

    The most likely tokens come best first; equal ones by token id. Copies to the host once.
    """
    if not requests:
        return []
    device = logits.device
    rows = logits.index_select(0, device_index([one.row for one in requests], device))
    norm = rows.logsumexp(1, keepdim=True)  # [requests, 1]
    ids = device_index([one.token_id for one in requests], device).unsqueeze(1)
    num_top = min(max(one.num_top for one in requests), rows.shape[1])
    top_ids = _top_ids(rows, num_top)  # [requests, num_top]
    ids = torch.cat([ids, top_ids], dim=1)
    values = rows.gather(1, ids) - norm
    packed = torch.stack([ids.double(), values.double()]).tolist()
    results = []
    for one, one_ids, one_values in zip(requests, packed[0], packed[1], strict=True):
        pairs = zip(one_ids[1 : 1 + one.num_top], one_values[1:], strict=False)
        top = tuple((int(token_id), value) for token_id, value in pairs)
        results.append(TokenLogprobs(logprob=one_values[0], top=top))
    return results


def _top_ids(rows: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values, best first, equal ones by id: [rows, count]."""
    if count == 0:
        return torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
    values, ids = rows.topk(min(count + 1, rows.shape[1]), dim=1)
    ids = ids[:, :count].sort(dim=1).values
    order = rows.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    if values.shape[1] > count:
        # topk picks any of the tokens that tie at its end.
        for row in (values[:, count] == values[:, count - 1]).nonzero().squeeze(1).tolist():
            ids[row] = rows[row].sort(descending=True, stable=True).indices[:count]
    return ids
