"""The rejection rule: accept x drawn from q with probability min(1, p(x) / q(x)).

At the first rejection the recovered token comes from norm(max(p - q, 0)); after a full accept the
bonus token comes from p. The committed tokens then follow p exactly (Leviathan et al. 2023,
arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318, theorem 1), provided that the
noise of accept, residual, bonus and of the drafter are independent: each has its own purpose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.proposal import SparseLaw
from outrider.decoding.draw import first_argmax
from outrider.decoding.keys import Counter, Purpose, uniform
from outrider.decoding.noise import gumbel_rows, seed_rows
from outrider.decoding.transfer import device_index, device_tensor, to_device

__all__ = ["RejectionBlock", "judge_by_rejection", "point_mass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionBlock:
    """The drafted tokens of one sequence and the laws they were drawn from."""

    first_row: int
    """Row of the law tensor that judges the first drafted token."""
    position: int
    """Absolute position of the first drafted token."""
    noise_key: int
    token_ids: tuple[int, ...]
    laws: tuple[SparseLaw, ...]
    """One for each token; each gives its token a positive probability."""


def point_mass(token_id: int) -> SparseLaw:
    """The law of a proposer that drew nothing at random, such as an n-gram lookup."""
    return SparseLaw(token_ids=(token_id,), probs=(1.0,))


def judge_by_rejection(law: Tensor, blocks: Sequence[RejectionBlock]) -> tuple[Tensor, Tensor]:
    """Accepted length [blocks] and next token [blocks] of every block.

    `law` [rows, vocab] holds log-weights; block b owns rows first_row … first_row + k. Results stay
    on the device of `law`.
    """
    device = law.device
    accepted = _accepted_lengths(law, blocks)  # [blocks]
    first_rows = device_index([block.first_row for block in blocks], device)
    own = law[first_rows + accepted]  # [blocks, vocab]
    if not any(block.token_ids for block in blocks):
        return accepted, first_argmax(own + _noise(own, blocks, accepted))
    rejected = accepted < device_index([len(block.token_ids) for block in blocks], device)
    residual = own.softmax(1)
    q_ids, q_probs = _draft_laws(blocks, dtype=own.dtype, device=device)  # [blocks, k + 1, support]
    index = accepted.reshape(-1, 1, 1).expand(-1, 1, q_ids.shape[2])
    residual.scatter_add_(1, q_ids.gather(1, index).squeeze(1), -q_probs.gather(1, index).squeeze(1))
    residual.clamp_(min=0)
    # p = q up to rounding leaves nothing; the law itself is then the right one to draw from.
    from_residual = rejected & (residual.amax(1) > 0)
    weights = torch.where(from_residual.unsqueeze(1), residual.log_(), own)
    return accepted, first_argmax(weights + _noise(own, blocks, accepted))


def _accepted_lengths(law: Tensor, blocks: Sequence[RejectionBlock]) -> Tensor:
    """Drafted tokens accepted before the first rejection: [blocks]."""
    width = max(len(block.token_ids) for block in blocks)
    if width == 0:
        return torch.zeros(len(blocks), dtype=torch.int64, device=law.device)
    rows, ids, bars = [], [], []
    for block in blocks:
        for j, (token_id, q) in enumerate(zip(block.token_ids, block.laws, strict=True)):
            rows.append(block.first_row + j)
            ids.append(token_id)
            q_x = q.probs[q.token_ids.index(token_id)] / sum(q.probs)
            bars.append(uniform(block.noise_key, block.position + j, Purpose.ACCEPT) * q_x)
    p_x = (
        law.index_select(0, device_index(rows, law.device))
        .softmax(1)
        .gather(1, device_index(ids, law.device).unsqueeze(1))
        .squeeze(1)
    )
    # u < p / q, written so that nothing is divided.
    passes = device_tensor(bars, dtype=torch.float64, device=law.device) < p_x
    owner = [b for b, block in enumerate(blocks) for _ in block.token_ids]
    place = [j for block in blocks for j in range(len(block.token_ids))]
    table = torch.zeros(len(blocks), width, dtype=torch.int64, device=law.device)
    table[device_index(owner, law.device), device_index(place, law.device)] = passes.long()
    return table.cumprod(1).sum(1)


def _draft_laws(blocks: Sequence[RejectionBlock], *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and probabilities of q, padded with (0, 0.0): two of [blocks, max k + 1, support].

    The entry behind a block's last token stays empty: the bonus token has no q.
    """
    width = 1 + max(len(block.token_ids) for block in blocks)
    support = max((len(q.token_ids) for block in blocks for q in block.laws), default=1)
    empty = SparseLaw(token_ids=(), probs=())
    laws = [q for block in blocks for q in (*block.laws, *[empty] * (width - len(block.laws)))]
    ids = torch.tensor([_padded(q.token_ids, support) for q in laws], dtype=torch.int64).view(
        len(blocks), width, support
    )
    probs = torch.tensor([_padded(q.probs, support) for q in laws], dtype=torch.float64).view(ids.shape)
    probs /= probs.sum(2, keepdim=True).clamp_(min=1e-300)
    return to_device(ids, device), to_device(probs.to(dtype), device)


def _padded(values: Sequence[float], length: int) -> list[float]:
    """The values, then zeros up to `length`."""
    return [*values, *[0] * (length - len(values))]


def _noise(own: Tensor, blocks: Sequence[RejectionBlock], accepted: Tensor) -> Tensor:
    """Noise of the draw behind the accepted tokens, for recovered and bonus tokens: [blocks, vocab]."""
    width = 1 + max(len(block.token_ids) for block in blocks)
    counters = [
        Counter(
            key=block.noise_key,
            position=block.position + j,
            purpose=Purpose.RESIDUAL if j < len(block.token_ids) else Purpose.TARGET,
        )
        for block in blocks
        for j in range(width)
    ]
    seeds = seed_rows(counters, device=own.device).view(len(blocks), width, 2)
    chosen = seeds[torch.arange(len(blocks), device=own.device), accepted]  # [blocks, 2]
    return gumbel_rows(chosen, own.shape[1]).to(own.dtype)
