"""Acceptance of a head on held-out prompts: every position of a block over the head's own outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.speculation import VerificationRule
from outrider.decoding.laws import LawBlock, target_law
from outrider.decoding.propose import ProposeRow, propose
from outrider.distill.eagle3_loss import head_outputs
from outrider.distill.eagle3_stage import rotary_of
from outrider.distill.eagle3_start import features_of_prefix
from outrider.distill.evaluation import ClassAcceptance
from outrider.distill.requests import held_out_requests
from outrider.distill.sample_stage import engine_for
from outrider.distill.sampling import SampledText, Sampler
from outrider.distill.settings import DistillSettings
from outrider.engine.eagle3.checkpoint import load_head
from outrider.engine.eagle3.config import Eagle3Shape, load_head_config
from outrider.engine.models.prepare import Progress
from outrider.engine.tokenizer import Tokenizer

__all__ = ["HeadJudge", "evaluate_head", "round_acceptance_by_depth"]

_NEW_TOKENS = 64
_MAX_PROMPT_TOKENS = 512
_TEMPERATURES = (0.0, 1.0)
_SLOTS = 16


class HeadJudge:
    """A saved head beside its target, a transformers model, over whole texts."""

    def __init__(self, settings: DistillSettings, target: Any, *, k: int, num_valid_ids: int) -> None:
        """`k` drafted tokens a round. Raises as `load_head`."""
        folder = settings.output
        self._target = target
        shape = Eagle3Shape.of_config(load_head_config(folder))
        head, _ = load_head(folder, shape)
        table = target.get_input_embeddings().weight.detach()
        self._table = table.float()
        self._head = head.to(table.device)
        self._rotary = rotary_of(folder, self._table)
        self._k = k
        self._num_valid_ids = num_valid_ids

    @torch.inference_mode()
    def judge(self, text: SampledText) -> tuple[list[list[bool]], Tensor]:
        """matches[d][i]: whether the head's choice at depth d for the i-th new token is the target's token.

        Also the overlap of both laws at depth 0, [n]; empty when greedy.
        """
        ids = torch.tensor(text.ids[:-1], device=self._table.device)
        known = features_of_prefix(self._target, ids)
        features = torch.cat((torch.zeros_like(known.features[:1]), known.features[:-1])).flatten(1).float()
        first = len(text.request.prompt_ids) - 1
        blocks, rows = self._rows(text)
        matches: list[list[bool]] = []
        overlap = torch.zeros(0)
        outputs = head_outputs(
            self._head, self._table[ids][None], features[None], self._rotary(len(ids)), depths=self._k
        )
        for depth, output in enumerate(outputs):
            logits = self._scattered(self._head.logits(output[0, first:]))
            drawn = propose(logits, rows, self._num_valid_ids)
            # At depth d the text itself must hold d tokens that could have been drafted before.
            matches.append([one.token_id == true for one, true in zip(drawn, text.new_ids, strict=True)])
            if depth == 0 and not text.request.sampling.greedy:
                q = target_law(logits, blocks, self._num_valid_ids).softmax(-1)
                true = self._target(input_ids=ids[None], use_cache=False).logits[0, first:].float()
                p = target_law(true, blocks, self._num_valid_ids).softmax(-1)
                overlap = torch.minimum(p, q).sum(-1).cpu()
        return matches, overlap

    def _scattered(self, drafted: Tensor) -> Tensor:
        logits: Tensor = drafted.new_full((drafted.shape[0], self._head.shape.vocab_size), -torch.inf)
        logits[:, self._head.target_ids] = drafted
        return logits

    @staticmethod
    def _rows(text: SampledText) -> tuple[list[LawBlock], list[ProposeRow]]:
        request, start = text.request, len(text.request.prompt_ids)
        prefixes = [text.ids[: start + index] for index in range(len(text.new_ids))]
        blocks = [LawBlock(sampling=request.sampling, prefix=one, prompt_len=start) for one in prefixes]
        rows = [
            ProposeRow(
                sampling=request.sampling,
                prefix=one,
                prompt_len=start,
                noise_key=request.noise_key,
                rule=VerificationRule.COUPLED,
                q_top_k=1,
            )
            for one in prefixes
        ]
        return blocks, rows


def evaluate_head(
    settings: DistillSettings,
    tokenizer: Tokenizer,
    target: Any,
    *,
    k: int,
    tell: Callable[[float], None],
    progress: Progress,
) -> list[ClassAcceptance]:
    """Acceptance by class and temperature of the head in the output folder. Nothing without held-out prompts."""
    cases = [(t, name) for t in _TEMPERATURES for name in settings.held_out]
    if not cases:
        return []
    judge = HeadJudge(settings, target, k=k, num_valid_ids=tokenizer.vocab_size)
    max_len = min(_MAX_PROMPT_TOKENS + _NEW_TOKENS, int(target.config.max_position_embeddings))
    results = []
    with engine_for(settings, settings.target, num_slots=_SLOTS, max_len=max_len, progress=progress) as engine:
        sampler = Sampler(
            engine,
            num_slots=_SLOTS,
            max_len=max_len,
            end_ids=frozenset(tokenizer.eos_token_ids),
            num_valid_ids=tokenizer.vocab_size,
        )
        for done, (temperature, name) in enumerate(cases):
            requests = held_out_requests(
                settings.held_out[name], tokenizer, max_new_tokens=_NEW_TOKENS, temperature=temperature
            )
            judged = [judge.judge(text) for text in sampler.run(requests)]
            results.append(_acceptance(name, temperature, judged, k))
            tell((done + 1) / len(cases))
    return results


def _acceptance(
    name: str, temperature: float, judged: Sequence[tuple[list[list[bool]], Tensor]], k: int
) -> ClassAcceptance:
    shares, mean_length = round_acceptance_by_depth([matches for matches, _ in judged], k=k)
    first = [value for matches, _ in judged for value in matches[0]]
    return ClassAcceptance(
        name=name,
        temperature=temperature,
        positions=len(first),
        first=sum(first) / max(1, len(first)),
        per_position=shares,
        mean_length=mean_length,
        rejection=float(torch.cat([overlap for _, overlap in judged]).mean()) if temperature and judged else None,
    )


def round_acceptance_by_depth(texts: Sequence[Sequence[Sequence[bool]]], *, k: int) -> tuple[tuple[float, ...], float]:
    """As `evaluation.round_acceptance`, with matches[j][position] of the block's j-th token, drafted at depth j."""
    reached, accepted = [0] * k, [0] * k
    rounds = tokens = 0
    for matches in texts:
        begin, end = 0, len(matches[0])
        while begin < end:
            length = 0
            for depth in range(min(k, end - begin)):
                reached[depth] += 1
                if not matches[depth][begin + depth]:
                    break
                accepted[depth] += 1
                length += 1
            rounds += 1
            step = min(length + 1, end - begin)
            tokens += step
            begin += step
    shares = tuple(got / tried for got, tried in zip(accepted, reached, strict=True) if tried)
    return shares, tokens / max(1, rounds)
