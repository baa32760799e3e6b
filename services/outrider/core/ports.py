"""Seams: what loops need from the outside, injected so that tests and the emulator can replace it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.dispatch import EngineEvent, EngineHello, EngineStatus, RouterCommand
from outrider.core.generation import Caller, GenerationEvent, GenerationRequest, ModelDescription
from outrider.core.link import DraftEvent, Hello, HelloAck, LinkEvent, TargetEvent

__all__ = [
    "Clock",
    "Directory",
    "DraftService",
    "DraftSession",
    "DraftTransport",
    "Endpoint",
    "EngineService",
    "EngineSession",
    "GenerationService",
]


class Clock(Protocol):
    """Monotonic time."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a replica's data plane listens."""

    replica_id: str
    address: str
    """host:port."""


class Directory(Protocol):
    """Finds the replicas of one kind. Asking is cheap and bounded in time."""

    async def endpoints(self) -> Sequence[Endpoint]:
        """The replicas known now; raises `TimeoutError` when the control plane does not answer."""
        ...


class DraftTransport(Protocol):
    """One link to a draft, as the engine thread uses it. Reconnects by itself."""

    def send(self, events: Sequence[TargetEvent]) -> bool:
        """Queue events as one message; never blocks. False: not connected, or the queue is full."""
        ...

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        """Return everything that has arrived, in order, waiting at most `timeout_s` for the first."""
        ...

    def close(self) -> None:
        """Say goodbye and stop."""
        ...


class DraftSession(Protocol):
    """One link, as the draft's server sees it. Used on the event loop."""

    @property
    def ack(self) -> HelloAck:
        """The answer to Hello."""
        ...

    def send(self, events: Sequence[TargetEvent]) -> None:
        """Hand over the events of one message. Raises `ProtocolError` when the draft is swamped."""
        ...

    async def receive(self) -> list[DraftEvent]:
        """Wait for the draft's next events; empty when the session is closed."""
        ...

    def close(self) -> None:
        """Free everything of this link. Idempotent."""
        ...


class DraftService(Protocol):
    """A draft replica, for its server."""

    def connect(self, hello: Hello) -> DraftSession:
        """Start a link. Raises `CompatibilityError` when the vocabularies differ."""
        ...


class EngineSession(Protocol):
    """One router's connection to one engine, local or remote. Used on the event loop."""

    @property
    def hello(self) -> EngineHello:
        """Who answers."""
        ...

    def send(self, commands: Sequence[RouterCommand]) -> None:
        """Queue all of these commands in order, or none; never blocks.

        Raises `EngineUnavailable` when the engine is gone, `Overloaded` when the queue has no room for all.
        """
        ...

    async def receive(self) -> list[EngineEvent]:
        """Wait for the engine's next events.

        Raises `EngineUnavailable` naming the cause when the engine is gone.
        """
        ...

    def close(self) -> None:
        """Leave: the engine aborts what this router still has running. Idempotent."""
        ...


class EngineService(Protocol):
    """An engine, for its server or for a router in the same process."""

    def connect(self, router_id: str) -> EngineSession:
        """Open a session."""
        ...


class GenerationService(Protocol):
    """The public API behind every door (gRPC, Serve, HTTP). Raises `OutriderError`s only."""

    def stream(self, request: GenerationRequest, caller: Caller) -> AsyncIterator[GenerationEvent]:
        """Run a request. Closing the iterator aborts it."""
        ...

    async def abort(self, request_id: str, caller: Caller) -> bool:
        """End a request of this caller, wherever it runs; False when none is known."""
        ...

    async def model_info(self, model: str) -> ModelDescription:
        """Describe the served model. Raises `ModelNotFound`."""
        ...

    async def speculation_status(self) -> Sequence[EngineStatus]:
        """The state of every engine."""
        ...
