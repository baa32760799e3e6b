"""How near a step comes to reading the weights once, for one row and for a verify block."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine

__all__ = ["WidthShares", "measure_widths"]

_CONTEXT = 200
_WIDTHS = (1, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthShares:
    """Share of the bound = seconds of reading the weights' bytes once / seconds of a forward."""

    read_s: float
    step_s: dict[int, float]
    """Median seconds by width, in rows."""

    def share(self, width: int) -> float:
        """Of a forward of that many rows."""
        return self.read_s / self.step_s[width]


def measure_widths(engine: ModelEngine, read_weights: Callable[[], float], *, rounds: int) -> WidthShares:
    """Alternate reads and forwards on a context of 200 tokens, and take medians.

    The engine must be idle; its KV is overwritten. `read_weights` reads as many bytes as the weights
    have, with the engine's threads, and returns the seconds that it took.
    """
    limits = engine.limits
    context = min(_CONTEXT, limits.max_model_len - max(_WIDTHS))
    tokens = [(7919 * position + 11) % limits.vocab_size for position in range(context + max(_WIDTHS))]
    table = list(range(-(-len(tokens) // limits.block_size)))

    def forward(start: int, end: int, num_logits: int) -> float:
        one = ForwardSlice(token_ids=tokens[start:end], start=start, block_table=table, num_logits=num_logits)
        began = time.perf_counter()
        engine.forward(ForwardBatch(slices=(one,)))
        return time.perf_counter() - began

    forward(0, context, 0)
    for width in _WIDTHS:
        forward(context, context + width, width)  # pays for what is made once
    read_weights()
    reads: list[float] = []
    steps: dict[int, list[float]] = {width: [] for width in _WIDTHS}
    for _ in range(rounds):
        reads.append(read_weights())
        for width in _WIDTHS:
            steps[width].append(forward(context, context + width, width))
    return WidthShares(read_s=median(reads), step_s={width: median(times) for width, times in steps.items()})
