"""Spans as ports, for router and target, and what stands there when nothing is traced.

One request makes this tree, over three processes:

    outrider.request                   router
    ├─ tokenize
    └─ outrider.engine.sequence        target, one per choice
       ├─ queue
       ├─ prefill
       ├─ decode
       ├─ round                        some of them; each links to the step that it was part of
       └─ outrider.draft.sequence      draft, as long as it holds the sequence
          └─ draft                     some of its blocks and tables

    outrider.engine.step               a trace of its own, with a link to the sequence of each row
"""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from outrider.core.dispatch import SequenceEnd
from outrider.core.generation import GenerationRequest
from outrider.core.request import SequenceRequest

__all__ = [
    "DraftSpans",
    "NullDraftSpans",
    "NullRequestSpan",
    "NullRequestSpans",
    "NullSequenceSpans",
    "RequestSpan",
    "RequestSpans",
    "RoundRecord",
    "SequenceSpans",
    "StepRecord",
    "trace_id_of",
]


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


def trace_id_of(traceparent: str) -> str:
    """The trace that a traceparent names; empty for none, and for what is no traceparent: clients write it."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return "" if match is None else match[1]


class RequestSpan(Protocol):
    """The span of one request, from its arrival to its end."""

    @property
    def traceparent(self) -> str:
        """What engines get, so that their spans become children; empty: no trace."""
        ...

    def asked(self, request: GenerationRequest) -> None:
        """What the client wants. Its text is recorded only where the operator has opted in."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One row's part in a step."""

    traceparent: str
    """Of the sequence's own span."""
    first_token_index: int
    """Of what was committed, counted from the first output token."""
    num_draft_tokens: int
    num_accepted: int
    num_committed: int
    source: str
    """Who proposed the block; empty: nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step that has just ended."""

    rounds: tuple[RoundRecord, ...]
    num_rows: int
    """Token rows of the forward, prefill included."""
    seconds: Mapping[str, float]
    """By phase; their sum is the whole step."""


class SequenceSpans(Protocol):
    """Spans of the engine. Called on its thread; nothing here blocks or raises."""

    def sequence_arrived(self, request: SequenceRequest) -> SequenceRequest:
        """A sequence was submitted. Returns the request under the sequence's own span, which is to be used."""
        ...

    def sequence_ended(self, request: SequenceRequest, end: SequenceEnd) -> None:
        """A sequence has just left the engine; `request` is what `sequence_arrived` returned."""
        ...

    def takes_step(self) -> bool:
        """Whether `step_ended` is wanted for the step that has just ended. Ask once per step."""
        ...

    def step_ended(self, step: StepRecord) -> None:
        """A step in which at least one traced sequence may have taken part."""
        ...


class DraftSpans(Protocol):
    """Spans of the draft. Called on its thread; nothing here blocks or raises."""

    def opened(self, key: int, traceparent: str, *, num_tokens: int) -> None:
        """A sequence is held now, under a key of its own, with a text so long."""
        ...

    def drafted(self, key: int, *, what: str, size: int) -> None:
        """A block of `size` tokens or a table of `size` outcomes was sent for it."""
        ...

    def closed(self, key: int) -> None:
        """It is held no more."""
        ...


@dataclass(frozen=True, slots=True)
class NullRequestSpan:
    """Records nothing and hands the client's trace on, so that it goes on where it is traced."""

    traceparent: str

    def asked(self, request: GenerationRequest) -> None:
        """Ignore it."""

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
    """Traces no sequence, and hands the trace of each on."""

    def sequence_arrived(self, request: SequenceRequest) -> SequenceRequest:
        """The request as it is."""
        return request

    def sequence_ended(self, request: SequenceRequest, end: SequenceEnd) -> None:
        """Ignore it."""

    def takes_step(self) -> bool:
        """Never."""
        return False

    def step_ended(self, step: StepRecord) -> None:
        """Ignore it."""


class NullDraftSpans:
    """Traces nothing of a draft."""

    def opened(self, key: int, traceparent: str, *, num_tokens: int) -> None:
        """Ignore it."""

    def drafted(self, key: int, *, what: str, size: int) -> None:
        """Ignore it."""

    def closed(self, key: int) -> None:
        """Ignore it."""
