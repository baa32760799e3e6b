"""Acceptance on held-out prompts, from the engines that serve: per position, per class of prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from outrider.core.speculation import VerificationRule
from outrider.decoding.laws import LawBlock, target_law
from outrider.decoding.propose import ProposeRow, propose
from outrider.distill.sampling import SampledText, Sampler, SampleRequest
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine

__all__ = ["ClassAcceptance", "acceptance_of", "agreement", "round_acceptance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAcceptance:
    """What a draft's tokens are worth on one class of prompts at one temperature."""

    name: str
    temperature: float
    positions: int
    """Tokens of the target that the draft was asked for."""
    first: float
    """Share of them that the draft names, given the target's own text before: first-position agreement."""
    per_position: tuple[float, ...]
    """Chance that a block's j-th token is accepted once those before it are, in rounds of K tokens; as far as any
    block got."""
    mean_length: float
    """Tokens a round, the extra one included."""
    rejection: float | None
    """Expected acceptance of the ratio test, the overlap of both laws; None when greedy, where it is `first`, and
    without any text."""

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def acceptance_of(
    target: ModelEngine,
    draft: ModelEngine,
    sampler: Sampler,
    prompts: Mapping[str, Sequence[SampleRequest]],
    *,
    k: int,
    num_valid_ids: int,
    tell: Callable[[float], None],
) -> list[ClassAcceptance]:
    """Sample the target's answers, and ask the draft for every token of them.

    `sampler` draws from `target`, with noise that the draft shares. A class has one request at least, and all of them
    one temperature. `tell` hears the share that is done.
    """
    results = []
    total = sum(len(requests) for requests in prompts.values())
    done = 0
    for name, requests in prompts.items():
        matches, overlaps = [], []
        # All texts first: what comes next runs over the KV that texts in the making would need.
        for text in list(sampler.run(requests)):
            match, overlap = agreement(target, draft, text, num_valid_ids=num_valid_ids)
            matches.append(match)
            overlaps.append(overlap)
            done += 1
            tell(done / total)
        temperature = requests[0].sampling.temperature
        shares, mean_length = round_acceptance(matches, k=k)
        everything = [value for match in matches for value in match]
        results.append(
            ClassAcceptance(
                name=name,
                temperature=temperature,
                positions=len(everything),
                first=sum(everything) / max(1, len(everything)),
                per_position=shares,
                mean_length=mean_length,
                rejection=float(torch.cat(overlaps).mean()) if temperature and overlaps else None,
            )
        )
    return results


@torch.inference_mode()
def agreement(
    target: ModelEngine, draft: ModelEngine, text: SampledText, *, num_valid_ids: int
) -> tuple[list[bool], Tensor]:
    """Of one text: whether the draft names each new token, and the overlap of both laws there: [n].

    The overlap is computed only where there is a temperature; it is empty otherwise.
    """
    request = text.request
    logits = _teacher_forced(draft, text)  # [n, vocab]
    rows = [
        ProposeRow(
            sampling=request.sampling,
            prefix=text.ids[: len(request.prompt_ids) + index],
            prompt_len=len(request.prompt_ids),
            noise_key=request.noise_key,
            rule=VerificationRule.COUPLED,
            q_top_k=1,
        )
        for index in range(len(text.new_ids))
    ]
    drawn = propose(logits, rows, num_valid_ids)
    matches = [token.token_id == truth for token, truth in zip(drawn, text.new_ids, strict=True)]
    if request.sampling.greedy:
        return matches, torch.zeros(0)
    blocks = [
        LawBlock(sampling=request.sampling, prefix=row.prefix, prompt_len=len(request.prompt_ids)) for row in rows
    ]
    q = target_law(logits, blocks, num_valid_ids).softmax(-1)
    p = target_law(_teacher_forced(target, text), blocks, num_valid_ids).softmax(-1)
    return matches, torch.minimum(p, q).sum(-1).cpu()


def round_acceptance(matches: Sequence[Sequence[bool]], *, k: int) -> tuple[tuple[float, ...], float]:
    """Walk texts in rounds of `k` draft tokens.

    Returns the chance of each position given those before it, and the mean tokens a round. Along an
    accepted block the draft's prefix is the target's text, so matches on that text tell everything.
    """
    reached, accepted = [0] * k, [0] * k
    rounds = tokens = 0
    for match in matches:
        begin = 0
        while begin < len(match):
            length = 0
            for index in range(min(k, len(match) - begin)):
                reached[index] += 1
                if not match[begin + index]:
                    break
                accepted[index] += 1
                length += 1
            rounds += 1
            step = min(length + 1, len(match) - begin)
            tokens += step
            begin += step
    shares = tuple(got / tried for got, tried in zip(accepted, reached, strict=True) if tried)
    return shares, tokens / max(1, rounds)


def _teacher_forced(engine: ModelEngine, text: SampledText) -> Tensor:
    """Logits for every new token, the text before it given: [n, vocab]. Uses the engine's first blocks."""
    ids = text.ids[:-1]
    blocks = -(-len(ids) // engine.limits.block_size)
    whole = ForwardSlice(token_ids=ids, start=0, block_table=range(blocks), num_logits=len(text.new_ids))
    return engine.forward(ForwardBatch(slices=(whole,)))
