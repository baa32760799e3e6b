"""From a submitted request to a sequence of this engine, or to the reason why not.

Routers have validated everything already; the engine checks again what could hurt other sequences,
because it trusts no peer with its batch.
"""

from collections.abc import Callable
from itertools import count

from outrider.core.dispatch import SequenceErrorCode, SequenceFailure, SequenceSubmit
from outrider.core.ports import Clock
from outrider.core.request import SequenceRequest
from outrider.core.sequence import Sequence, StopStringScan
from outrider.core.text import DetokenizerFactory, StopStringFinder
from outrider.engine.base import EngineLimits
from outrider.target.config import TargetConfig
from outrider.target.running import RunningSequence, StreamId

__all__ = ["SequenceFactory"]


class SequenceFactory:
    """Makes `RunningSequence`s with handles that are never reused."""

    def __init__(
        self,
        *,
        config: TargetConfig,
        limits: EngineLimits,
        num_valid_ids: int,
        detokenizers: DetokenizerFactory,
        clock: Clock,
        fits_alone: Callable[[int], bool],
    ) -> None:
        self._config = config
        self._limits = limits
        self._num_valid_ids = num_valid_ids
        self._detokenizers = detokenizers
        self._clock = clock
        self._fits_alone = fits_alone
        self._handles = count(1)

    def make(self, submit: SequenceSubmit, session_id: int) -> RunningSequence | SequenceFailure:
        """Return the sequence, or why it cannot run on this engine whatever the load."""
        request = submit.request
        problem = self._problem(request)
        if problem is not None:
            return SequenceFailure(code=SequenceErrorCode.INVALID, message=problem)
        if request.timeout_s is not None and request.timeout_s <= 0:
            message = "timeout_ms: the time limit had passed when the engine received the request"
            return SequenceFailure(code=SequenceErrorCode.DEADLINE, message=message)
        now = self._clock.now()
        return RunningSequence(
            sequence=Sequence(request, next(self._handles), self._stop_string_scan(request)),
            stream=StreamId(session_id, submit.stream_key),
            arrived_at=now,
            deadline=None if request.timeout_s is None else now + request.timeout_s,
        )

    def _problem(self, request: SequenceRequest) -> str | None:
        prompt_len, max_tokens = len(request.prompt_token_ids), request.stop.max_tokens
        if prompt_len < 1:
            return "input: the prompt is empty"
        if max_tokens <= len(request.resume_token_ids):
            return f"resume_token_ids: {len(request.resume_token_ids)} tokens leave nothing of max_tokens {max_tokens}"
        total = prompt_len + max_tokens
        if total > self._limits.max_model_len:
            return f"max_tokens: prompt {prompt_len} + max_tokens {max_tokens} > {self._limits.max_model_len}"
        if not self._fits_alone(total):
            return f"max_tokens: prompt {prompt_len} + max_tokens {max_tokens} exceed the engine's KV memory"
        wanted = request.speculation.max_tokens
        if wanted is not None and wanted > self._config.max_draft_tokens_limit:
            return f"speculation.max_tokens: {wanted} is above {self._config.max_draft_tokens_limit}"
        for field, ids in (("input", request.prompt_token_ids), ("resume_token_ids", request.resume_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < self._num_valid_ids):
                return f"{field}: token ids must be in [0, {self._num_valid_ids})"
        for token_id, _ in request.sampling.logit_bias:
            if token_id >= self._num_valid_ids:
                return f"logit_bias: token id {token_id} is not below {self._num_valid_ids}"
        return None

    def _stop_string_scan(self, request: SequenceRequest) -> StopStringScan | None:
        """Match stop strings over the output text, the resumed part included."""
        if not request.stop.strings:
            return None
        detokenizer = self._detokenizers(
            context=request.prompt_token_ids, skip_special_tokens=request.stop.skip_special_tokens
        )
        finder = StopStringFinder(request.stop.strings, include=False)
        for token_id in request.resume_token_ids:
            finder.feed(detokenizer.feed(token_id))
        return lambda token_id: finder.feed(detokenizer.feed(token_id)).stop_string_index
