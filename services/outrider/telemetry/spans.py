"""Spans as ports, for router and target, and what stands there when nothing is traced.

One request makes this tree; the router makes the first two, the engine the rest:

    outrider.request
    ├─ tokenize
    └─ outrider.engine.sequence        one per choice
       ├─ queue
       ├─ prefill
       └─ decode
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from outrider.core.dispatch import SequenceEnd
from outrider.core.request import SequenceRequest

__all__ = [
    "NullRequestSpan",
    "NullRequestSpans",
    "NullSequenceSpans",
    "RequestSpan",
    "RequestSpans",
    "SequenceSpans",
]


class RequestSpan(Protocol):
    """The span of one request, from its arrival to its end."""

    @property
    def traceparent(self) -> str:
        """What engines get, so that their spans become children; empty: no trace."""
        ...

    def tokenizing(self) -> AbstractContextManager[None]:
        """Covers tokenization. An error inside marks the stage as failed and passes on."""
        ...

    def end(self, *, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """The request has ended: "completed", "abandoned" or an error's class. Once; later calls do nothing."""
        ...


class RequestSpans(Protocol):
    """Starts the span of each request."""

    def start(self, *, request_id: str, model: str, traceparent: str) -> RequestSpan:
        """A request has arrived, with the client's traceparent (may be empty or not valid)."""
        ...


class SequenceSpans(Protocol):
    """Spans of the engine: all of a sequence's at once, after its end. Nothing happens before."""

    def sequence_ended(self, request: SequenceRequest, end: SequenceEnd) -> None:
        """A sequence has just left the engine. Never blocks and never raises."""
        ...


@dataclass(frozen=True, slots=True)
class NullRequestSpan:
    """Records nothing and hands the client's trace on, so that it goes on where it is traced."""

    traceparent: str

    def tokenizing(self) -> AbstractContextManager[None]:
        """Cover nothing."""
        return nullcontext()

    def end(self, *, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """Ignore it."""


class NullRequestSpans:
    """Traces no request."""

    def start(self, *, request_id: str, model: str, traceparent: str) -> RequestSpan:
        """A span that records nothing."""
        return NullRequestSpan(traceparent)


class NullSequenceSpans:
    """Traces no sequence."""

    def sequence_ended(self, request: SequenceRequest, end: SequenceEnd) -> None:
        """Ignore it."""
