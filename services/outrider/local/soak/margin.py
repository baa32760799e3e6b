"""How close a draw was: rounding may turn a text where its two best tokens are nearly equal, nowhere else."""

from collections.abc import Sequence
from typing import Any

from outrider.core.request import SequenceRequest
from outrider.decoding.draw import DrawRow, perturbed
from outrider.decoding.keys import Counter, Purpose
from outrider.decoding.laws import LawBlock, target_law
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine

__all__ = ["top_two_margin"]


def top_two_margin(engine: ModelEngine, request: SequenceRequest, output: Sequence[int], num_valid_ids: int) -> float:
    """Perturbed log-weight of the best token minus that of the second, behind `output`; infinite for one token.

    The engine must be idle; its KV is overwritten.
    """
    prefix = [*request.prompt_token_ids, *output]
    table = list(range(-(-len(prefix) // engine.limits.block_size)))
    one = ForwardSlice(token_ids=prefix, start=0, block_table=table, num_logits=1)
    logits = engine.forward(ForwardBatch(slices=(one,)))
    sampling = request.sampling
    block = LawBlock(sampling=sampling, prefix=prefix, prompt_len=len(request.prompt_token_ids), draft_token_ids=())
    law = target_law(logits, [block], num_valid_ids)
    counter = Counter(key=request.noise_key, position=len(prefix), purpose=Purpose.TARGET)
    row = DrawRow(counter=None if sampling.greedy else counter, truncated=sampling.truncates)
    scores: Any = perturbed(law, [row])
    best, second = scores[0].topk(2).values.tolist()
    return float(best - second)
