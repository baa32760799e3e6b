"""What the engine logs about its sequences: a line for each that failed, and for the others on demand."""

import logging

from outrider.core.dispatch import SequenceEnd
from outrider.core.request import SequenceRequest
from outrider.telemetry.spans import SequenceSpans, StepRecord

__all__ = ["SequenceLog"]

_log = logging.getLogger(__name__)


class SequenceLog:
    """Implements `SequenceSpans` around another one: both hear of the same events."""

    def __init__(self, spans: SequenceSpans, engine_id: str) -> None:
        self._spans = spans
        self._engine_id = engine_id

    def sequence_arrived(self, request: SequenceRequest) -> SequenceRequest:
        """Nothing to log yet."""
        return self._spans.sequence_arrived(request)

    def sequence_ended(self, request: SequenceRequest, end: SequenceEnd) -> None:
        """Log a failure as information, since the router decides what it means, and the rest for debugging."""
        self._spans.sequence_ended(request, end)
        level = logging.DEBUG if end.failure is None else logging.INFO
        if not _log.isEnabledFor(level):
            return
        # The failure's message may quote the request; its code cannot.
        how = end.failure.code.value if end.failure is not None else "finished"
        fields = {
            "request_id": request.request_id,
            "choice_index": request.choice_index,
            "engine_id": self._engine_id,
            "outcome": how,
            "seconds": round(end.timings.total_s, 4),
            "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": end.speculation.stats.committed,
        }
        _log.log(level, "sequence ended", extra=fields)

    def takes_step(self) -> bool:
        """Steps are not logged."""
        return self._spans.takes_step()

    def step_ended(self, step: StepRecord) -> None:
        """Steps are not logged."""
        self._spans.step_ended(step)
