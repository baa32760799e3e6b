"""Run the forward of a step and judge every row by the target's own law."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.core.proposal import SparseLaw
from outrider.core.verdict import Verdict
from outrider.decoding.verify import VerifyRow, verify
from outrider.engine.base import ModelEngine, wait_of
from outrider.target.scheduler import ScheduledRow, StepBatch

if TYPE_CHECKING:
    from outrider.engine.base import Logits

__all__ = ["Verifier"]


class Verifier:
    """One ragged forward, one verdict per deciding row. Changes nothing but the engine's KV."""

    def __init__(self, engine: ModelEngine, *, num_valid_ids: int) -> None:
        self._engine = engine
        self._wait = wait_of(engine)
        self._num_valid_ids = num_valid_ids
        """Ids at or above this are padding of the logits and can never be drawn."""

    @property
    def queues(self) -> bool:
        """Whether `forward` returns while the device works: what is done before `wait` is then free."""
        return self._wait is not None

    def forward(self, batch: StepBatch) -> "Logits":
        """Return logits [sum of 1 + k over the deciding rows, vocab], to be read after `wait`.

        Raises `EngineUnavailable`.
        """
        return self._engine.forward(batch.forward)

    def wait(self) -> None:
        """Return when the forward is over."""
        if self._wait is not None:
            self._wait()

    def verify(
        self, batch: StepBatch, logits: "Logits", late_laws: Mapping[int, tuple[SparseLaw, ...]]
    ) -> list[Verdict]:
        """Return the verdicts of `batch.deciding`, in order.

        `late_laws`, by handle: of blocks that came without. A block without laws, under the rejection rule, is
        judged as if its tokens had been certain to be proposed, which is exact for any tokens.
        """
        deciding = batch.deciding
        if not deciding:
            return []
        rows = [_verify_row(row, late_laws.get(row.running.handle, ())) for row in deciding]
        return verify(logits, rows, num_valid_ids=self._num_valid_ids)


def _verify_row(row: ScheduledRow, late_laws: tuple[SparseLaw, ...]) -> VerifyRow:
    sequence = row.running.sequence
    request = sequence.request
    return VerifyRow(
        sampling=request.sampling,
        prefix=sequence.token_ids,
        prompt_len=sequence.prompt_len,
        noise_key=request.noise_key,
        draft_token_ids=row.proposal.token_ids if row.proposal is not None else (),
        draft_laws=late_laws or (row.proposal.laws if row.proposal is not None else ()),
        rule=request.speculation.rule,
        num_top_logprobs=request.top_logprobs,
    )
