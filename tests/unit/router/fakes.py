"""Time that a test turns, engines that say what a test tells them, and a router over both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tests.unit.router.byte_codec import ByteCodec

from outrider.core.dispatch import (
    EngineEvent,
    EngineHello,
    EngineReport,
    EngineStatus,
    ReportRequest,
    RouterCommand,
    SequenceAbort,
    SequenceDelta,
    SequenceEnd,
    SequenceErrorCode,
    SequenceFailure,
    SequenceSubmit,
    UpdateGate,
)
from outrider.core.errors import EngineUnavailable, OutriderError, Overloaded
from outrider.core.generation import Caller, ChoiceEnd, GenerationEvent, GenerationRequest, TextDelta
from outrider.core.policy import GateSettings
from outrider.core.ports import Endpoint, EngineSession
from outrider.core.sequence import Finish, FinishReason
from outrider.router.admission import LimitsOf, unlimited
from outrider.router.codec import TextCodec
from outrider.router.engine_link import LinkSettings
from outrider.router.engine_pool import EnginePool
from outrider.router.limits import RouterLimits
from outrider.router.metrics import RouterMetrics
from outrider.router.service import AbortBroadcast, RouterService, ServiceSettings

LIMITS = RouterLimits(model="toy", max_model_len=1024)
STOP = Finish(reason=FinishReason.STOP)
LENGTH = Finish(reason=FinishReason.LENGTH)
ABORTED = Finish(reason=FinishReason.ABORTED)


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until the condition holds. Takes turns, not time."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")


class ManualAlarm:
    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s = at_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualTime:
    """Stands still until `advance`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._alarms: list[ManualAlarm] = []

    def now(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualAlarm:
        alarm = ManualAlarm(self._now_s + delay_s, callback)
        self._alarms.append(alarm)
        return alarm

    @property
    def pending(self) -> list[float]:
        """When the next calls are due."""
        return sorted(one.at_s for one in self._alarms if not one.cancelled)

    async def advance(self, seconds: float) -> None:
        """Ring every alarm that falls due, in order; let tasks run after each."""
        end_s = self._now_s + seconds
        while due := [one for one in self._alarms if not one.cancelled and one.at_s <= end_s]:
            alarm = min(due, key=lambda one: one.at_s)
            self._alarms.remove(alarm)
            self._now_s = alarm.at_s
            alarm.callback()
            await settle()
        self._now_s = end_s
        await settle()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class FakeSession:
    """The engine's end of a session, moved by the test."""

    def __init__(self, engine: "FakeEngine", epoch: int) -> None:
        self.hello = EngineHello(
            engine_id=engine.engine_id,
            engine_epoch=epoch,
            model=engine.model,
            max_model_len=engine.max_model_len,
            kv_capacity_tokens=engine.kv_capacity_tokens,
        )
        self.sent: list[RouterCommand] = []
        self.closed = False
        self._engine = engine
        self._events: asyncio.Queue[list[EngineEvent] | EngineUnavailable] = asyncio.Queue()

    def send(self, commands: Sequence[RouterCommand]) -> None:
        if self._engine.refusal is not None:
            raise self._engine.refusal
        for one in commands:
            self.sent.append(one)
            if isinstance(one, SequenceSubmit):
                self._engine.submits.put_nowait(one)
            elif isinstance(one, ReportRequest) and self._engine.reports:
                self.emit(EngineReport(status=self._engine.status, nonce=one.nonce))

    async def receive(self) -> list[EngineEvent]:
        got = await self._events.get()
        if isinstance(got, EngineUnavailable):
            raise got
        return got

    def close(self) -> None:
        self.closed = True

    def emit(self, *events: EngineEvent) -> None:
        """One message with these events."""
        self._events.put_nowait(list(events))

    def lose(self, cause: str) -> None:
        self._events.put_nowait(EngineUnavailable(cause))

    @property
    def aborted(self) -> list[int]:
        return [one.stream_key for one in self.sent if isinstance(one, SequenceAbort)]

    @property
    def gates(self) -> list[GateSettings]:
        return [one.settings for one in self.sent if isinstance(one, UpdateGate)]


class FakeEngine:
    """An `EngineService` without a model."""

    def __init__(self, engine_id: str = "e0") -> None:
        self.engine_id = engine_id
        self.model = "toy"
        self.max_model_len = 1024
        self.kv_capacity_tokens = 4096
        self.status = EngineStatus(engine_id=engine_id, ready=True)
        self.reports = True
        """Whether it answers requests for reports."""
        self.unreachable: Exception | None = None
        self.refusal: OutriderError | None = None
        """Raised by `send`."""
        self.attempts = 0
        self.sessions: list[FakeSession] = []
        self.submits: asyncio.Queue[SequenceSubmit] = asyncio.Queue()

    def connect(self, router_id: str) -> EngineSession:
        self.attempts += 1
        if self.unreachable is not None:
            raise self.unreachable
        self.sessions.append(FakeSession(self, len(self.sessions)))
        return self.sessions[-1]

    @property
    def session(self) -> FakeSession:
        return self.sessions[-1]

    def tokens(self, submit: SequenceSubmit, at: int, *token_ids: int) -> None:
        """One step that commits tokens, the first with output index `at`."""
        self.session.emit(delta(submit, at, *token_ids))

    def text(self, submit: SequenceSubmit, text: str, *, per_step: int = 1, finish: Finish | None = LENGTH) -> None:
        """Commit the bytes of a text, so many a step, then end."""
        data, start = text.encode(), len(submit.request.resume_token_ids)
        for at in range(0, len(data), per_step):
            self.tokens(submit, start + at, *data[at : at + per_step])
        if finish is not None:
            self.session.emit(SequenceEnd(stream_key=submit.stream_key, finish=finish))

    def fail(self, submit: SequenceSubmit, code: SequenceErrorCode, message: str) -> None:
        failure = SequenceFailure(code=code, message=message)
        self.session.emit(SequenceEnd(stream_key=submit.stream_key, failure=failure))


def delta(submit: SequenceSubmit, at: int, *token_ids: int) -> SequenceDelta:
    return SequenceDelta(stream_key=submit.stream_key, first_token_index=at, token_ids=token_ids)


class FakeDirectory:
    def __init__(self, replica_ids: Sequence[str]) -> None:
        self.listed = [Endpoint(replica_id=one, address=f"{one}:1") for one in replica_ids]
        self.failure: Exception | None = None

    async def endpoints(self) -> Sequence[Endpoint]:
        if self.failure is not None:
            raise self.failure
        return list(self.listed)


class World:
    """A router over fake engines."""

    def __init__(
        self,
        *engine_ids: str,
        limits: RouterLimits = LIMITS,
        link_settings: LinkSettings | None = None,
        metrics: RouterMetrics | None = None,
        settings: ServiceSettings | None = None,
        broadcast_abort: AbortBroadcast | None = None,
        codec: TextCodec | None = None,
        limits_of: LimitsOf = unlimited,
    ) -> None:
        self.time = ManualTime()
        self.pending: list[str] = []
        """Replicas that the control plane is building."""
        self.engines = {one: FakeEngine(one) for one in engine_ids or ("e0",)}
        self.directory = FakeDirectory(list(self.engines))
        self.pool = EnginePool(
            directory=self.directory,
            connect=self.connect,
            model="toy",
            time=self.time,
            settings=link_settings,
            metrics=metrics,
            jitter=lambda: 0.0,
            pending=lambda: self.pending,
        )
        self.service = RouterService(
            codec=ByteCodec() if codec is None else codec,
            pool=self.pool,
            limits=limits,
            time=self.time,
            metrics=metrics,
            settings=settings,
            broadcast_abort=broadcast_abort,
            limits_of=limits_of,
        )

    async def connect(self, endpoint: Endpoint) -> EngineSession:
        return self.engines[endpoint.replica_id].connect("r0")

    @property
    def engine(self) -> FakeEngine:
        return self.engines["e0"]

    async def __aenter__(self) -> "World":
        await self.service.start()
        await settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.close()

    def open(self, *, key_id: str = "", **fields: Any) -> "Client":
        return Client(self.service.stream(request(**fields), Caller(key_id=key_id)))


def request(**fields: Any) -> GenerationRequest:
    """A request that continues "hi" unless `fields` say otherwise."""
    return GenerationRequest(**({"text": "hi"} | fields))


class Client:
    """Reads a stream in a task and keeps what it got."""

    def __init__(self, events: AsyncIterator[GenerationEvent]) -> None:
        self.events: list[GenerationEvent] = []
        self._task = asyncio.create_task(self._read(events))

    async def _read(self, events: AsyncIterator[GenerationEvent]) -> None:
        async for one in events:
            self.events.append(one)

    async def done(self) -> "Client":
        """Wait for the end; raises the error of the stream."""
        async with asyncio.timeout(10):
            await self._task
        return self

    def leave(self) -> None:
        self._task.cancel()

    @property
    def deltas(self) -> list[TextDelta]:
        return [one for one in self.events if isinstance(one, TextDelta)]

    @property
    def ends(self) -> list[ChoiceEnd]:
        return [one for one in self.events if isinstance(one, ChoiceEnd)]

    def text(self, choice_index: int = 0) -> str:
        return "".join(one.text for one in self.deltas if one.choice_index == choice_index)

    def token_ids(self, choice_index: int = 0) -> tuple[int, ...]:
        return tuple(token for one in self.deltas if one.choice_index == choice_index for token in one.token_ids)


def overloaded() -> Overloaded:
    return Overloaded("the queue is full", retry_after_s=1.0)
