"""One choice of a request as its client sees it: engine events in, generation events out."""

from collections.abc import Callable

from outrider.core.dispatch import SequenceDelta, SequenceEnd, SequenceErrorCode, SequenceFailure
from outrider.core.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, OutriderError, Overloaded
from outrider.core.generation import ChoiceEnd, TextDelta, Usage
from outrider.core.sequence import Finish, FinishReason
from outrider.router.output_text import OutputText
from outrider.router.plan import RequestPlan

__all__ = ["ENGINE_RETRY_AFTER_S", "ChoiceStream", "failure_error"]

ENGINE_RETRY_AFTER_S = 1.0
"""What a client is told to wait when an engine's own queue was full."""


class ChoiceStream:
    """Text and counts of one choice. Everything it emits comes from committed tokens."""

    def __init__(self, choice_index: int, plan: RequestPlan, text: OutputText) -> None:
        """`text` has already been fed the resumed tokens of the plan."""
        self._choice_index = choice_index
        self._plan = plan
        self._text = text
        self._token_ids = list(plan.resume_token_ids)
        self._num_resumed = len(plan.resume_token_ids)

    @property
    def num_tokens(self) -> int:
        """Output tokens of this stream, without the resumed ones."""
        return self._text.num_tokens - self._num_resumed

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All output tokens so far, resumed ones included."""
        return tuple(self._token_ids)

    def reached_end(self) -> Finish | None:
        """How the tokens so far end the choice, if they do: for an end that an engine could not tell any more."""
        stop = self._plan.stop
        if not self.num_tokens:
            return None
        if self._text.num_tokens >= stop.min_tokens:
            last = self._token_ids[-1]
            if last in stop.eos_token_ids or last in stop.token_ids:
                return Finish(reason=FinishReason.STOP, stop_token_id=last)
            if (string := self._text.found_stop_string) is not None:
                return Finish(reason=FinishReason.STOP, stop_string_index=stop.strings.index(string))
        if self._text.num_tokens >= stop.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None

    def feed(self, delta: SequenceDelta) -> TextDelta:
        """The tokens of one step and the text that they make certain.

        Raises `EngineUnavailable` when the engine skipped or repeated a token: a client could
        resume from what it has, but not from a text with a hole.
        """
        if delta.first_token_index != self._text.num_tokens:
            raise EngineUnavailable(
                f"the engine sent output token {delta.first_token_index}, {self._text.num_tokens} was next"
            )
        self._token_ids.extend(delta.token_ids)
        text = "".join([self._text.feed(token_id) for token_id in delta.token_ids])
        return self._delta(text, delta.first_token_index, delta)

    def finish(self, end: SequenceEnd) -> list[TextDelta | ChoiceEnd]:
        """The end of the choice, after a last delta without tokens if text was held back.

        Raises the error that the engine reports, if it reports one.
        """
        if end.failure is not None:
            raise failure_error(end.failure)
        if end.finish is None:
            raise EngineUnavailable("the engine ended a sequence without a reason")
        index = end.finish.stop_string_index
        if index is not None and index >= len(self._plan.stop.strings):
            raise EngineUnavailable(f"the engine ended a sequence with stop string {index}, which does not exist")
        rest = self._text.finish(index)
        last = ChoiceEnd(
            choice_index=self._choice_index,
            finish=end.finish,
            stop_string=None if index is None else self._plan.stop.strings[index],
            usage=Usage(
                prompt_tokens=len(self._plan.prompt_token_ids),
                completion_tokens=self.num_tokens,
                cached_prompt_tokens=end.cached_prompt_tokens,
            ),
            timings=end.timings,
            speculation=end.speculation,
        )
        return [self._delta(rest, self._text.num_tokens), last] if rest else [last]

    def _delta(self, text: str, first_token_index: int, source: SequenceDelta | None = None) -> TextDelta:
        return TextDelta(
            choice_index=self._choice_index,
            first_token_index=first_token_index,
            text=text,
            token_ids=() if source is None else source.token_ids,
            logprobs=() if source is None else source.logprobs,
            seed=self._plan.seed,
        )


_ERRORS: dict[SequenceErrorCode, Callable[[str], OutriderError]] = {
    SequenceErrorCode.INVALID: lambda message: InvalidRequest(*_field_and_problem(message)),
    SequenceErrorCode.OVERLOADED: lambda message: Overloaded(message, retry_after_s=ENGINE_RETRY_AFTER_S),
    SequenceErrorCode.DEADLINE: DeadlineExceeded,
    SequenceErrorCode.UNAVAILABLE: EngineUnavailable,
}


def failure_error(failure: SequenceFailure) -> OutriderError:
    """The domain error of a failure that the engine reports."""
    return _ERRORS[failure.code](failure.message)


def _field_and_problem(message: str) -> tuple[str, str]:
    """Split "field: problem", the form of every `InvalidRequest`."""
    field, separator, problem = message.partition(": ")
    return (field, problem) if separator else ("request", message)
