"""What the router counts, as a port; the telemetry package implements it."""

from typing import Protocol

from outrider.core.generation import ChoiceEnd

__all__ = ["NoMetrics", "RouterMetrics"]


class RouterMetrics(Protocol):
    """Called on the event loop; must not block. Raw events only, rates are derived where shown."""

    def request_started(self, *, traffic_class: str, prompt_tokens: int) -> None:
        """A request was admitted and dispatched."""
        ...

    def request_refused(self, *, error: str) -> None:
        """A request was refused before it ran. `error`: name of the error class."""
        ...

    def first_token(self, *, traffic_class: str, after_s: float) -> None:
        """The first token of a request, seconds after its arrival at the router."""
        ...

    def tokens_streamed(self, *, traffic_class: str, count: int) -> None:
        """Committed tokens were handed to a client."""
        ...

    def choice_finished(self, *, traffic_class: str, end: ChoiceEnd) -> None:
        """A choice ended without an error."""
        ...

    def request_finished(self, *, traffic_class: str, outcome: str, after_s: float) -> None:
        """A started request ended. `outcome`: "completed", "abandoned", "InternalError" or an error class's name."""
        ...

    def engine_connected(self, *, replica_id: str) -> None:
        """A session was opened."""
        ...

    def engine_lost(self, *, replica_id: str, failed_sequences: int) -> None:
        """A session broke, with that many sequences of this router on it."""
        ...

    def sequences_moved(self, *, count: int) -> None:
        """Sequences of a lost engine go on on another one."""
        ...


class NoMetrics:
    """Counts nothing."""

    def request_started(self, *, traffic_class: str, prompt_tokens: int) -> None:
        """Ignore it."""

    def request_refused(self, *, error: str) -> None:
        """Ignore it."""

    def first_token(self, *, traffic_class: str, after_s: float) -> None:
        """Ignore it."""

    def tokens_streamed(self, *, traffic_class: str, count: int) -> None:
        """Ignore it."""

    def choice_finished(self, *, traffic_class: str, end: ChoiceEnd) -> None:
        """Ignore it."""

    def request_finished(self, *, traffic_class: str, outcome: str, after_s: float) -> None:
        """Ignore it."""

    def engine_connected(self, *, replica_id: str) -> None:
        """Ignore it."""

    def engine_lost(self, *, replica_id: str, failed_sequences: int) -> None:
        """Ignore it."""

    def sequences_moved(self, *, count: int) -> None:
        """Ignore it."""
