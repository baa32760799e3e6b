"""What speculation costs when it is configured and gated off: CPU time per step against not configured."""

from dataclasses import dataclass
from statistics import median

from outrider.core.dispatch import SpeculationTotals
from outrider.local.bench.load import requests_of, run_load
from outrider.local.bench.plan import Piece
from outrider.local.stack import LocalStack

__all__ = ["OffCost", "measure_off_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffCost:
    """Alternating runs of the same requests on both stacks."""

    off_ms: tuple[float, ...]
    """CPU time per step of the engine thread, gated off, per run."""
    unconfigured_ms: tuple[float, ...]
    draft_messages: int
    """Messages to or from the draft for requests that asked for no speculation."""
    extra_rows: int
    """Rows that gated-off steps had beyond those of the unconfigured stack."""

    @property
    def ratio(self) -> float:
        """Median over median."""
        return median(self.off_ms) / median(self.unconfigured_ms)


async def measure_off_cost(
    configured: LocalStack, unconfigured: LocalStack, piece: Piece, *, max_tokens: int, runs: int
) -> OffCost:
    """Alternate between two started stacks whose engine threads read `ThreadCpuClock`."""
    costs: dict[bool, list[float]] = {True: [], False: []}
    rows = {True: 0, False: 0}
    messages = 0
    for number in range(-1, runs):
        order = (True, False) if number % 2 else (False, True)
        for is_configured in order:
            stack = configured if is_configured else unconfigured
            before = (await stack.status()).totals
            run = await run_load(stack, piece, requests_of(piece, speculates=False, max_tokens=max_tokens))
            after = (await stack.status()).totals
            if number < 0:
                continue  # what is made once
            costs[is_configured].append(1e3 * sum(run.step_seconds.values()) / run.steps)
            rows[is_configured] += after.forward_rows - before.forward_rows
            messages += _messages(after) - _messages(before) if is_configured else 0
    return OffCost(
        off_ms=tuple(costs[True]),
        unconfigured_ms=tuple(costs[False]),
        draft_messages=messages,
        extra_rows=rows[True] - rows[False],
    )


def _messages(totals: SpeculationTotals) -> int:
    return totals.draft_messages_sent + totals.draft_messages_received
