"""What a client has received of a stream, and the request for the rest of it."""

from dataclasses import replace

from outrider.core.errors import ProtocolError
from outrider.core.generation import ChoiceEnd, GenerationAccepted, GenerationEvent, GenerationRequest, TextDelta

__all__ = ["Resumption"]


class Resumption:
    """Joins the attempts at one request of one choice into one stream.

    The first attempt fixes request id and seed; a later one continues behind the last token. Its own
    acceptance is not shown, and the usage at the end counts the tokens of every attempt.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._accepted: GenerationAccepted | None = None
        self._token_ids: list[int] = []
        self._at_attempt = 0
        self._attempts = 0

    @property
    def started(self) -> bool:
        """Whether an attempt was admitted."""
        return self._accepted is not None

    @property
    def received(self) -> int:
        """Tokens of all attempts."""
        return len(self._token_ids)

    def next_attempt(self) -> GenerationRequest:
        """The request for what is still missing."""
        self._attempts += 1
        self._at_attempt = len(self._token_ids)
        if self._accepted is None:
            return self._request
        return replace(
            self._request,
            request_id=self._accepted.request_id,
            seed=self._accepted.seed,
            resume_token_ids=(*self._request.resume_token_ids, *self._token_ids),
        )

    def see(self, event: GenerationEvent) -> GenerationEvent | None:
        """Take an event; return what the caller sees of it. Raises `ProtocolError` at a gap or an overlap."""
        if isinstance(event, GenerationAccepted):
            shown = event if self._accepted is None else None
            self._accepted = self._accepted or event
            return shown
        if isinstance(event, TextDelta):
            expected = len(self._request.resume_token_ids) + len(self._token_ids)
            if self._attempts > 1 and event.token_ids and event.first_token_index != expected:
                raise ProtocolError(f"delta.first_token_index: {event.first_token_index} where {expected} is next")
            self._token_ids.extend(event.token_ids)
            return event
        return self._whole(event)

    def _whole(self, end: ChoiceEnd) -> ChoiceEnd:
        completion = end.usage.completion_tokens + self._at_attempt
        return replace(end, usage=replace(end.usage, completion_tokens=completion))
