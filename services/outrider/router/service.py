"""The router as a `GenerationService`: refuse or run, stream, abort, drain."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider import __version__
from outrider.core.dispatch import EngineStatus
from outrider.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineUnavailable,
    ModelNotFound,
    OutriderError,
    RequestAborted,
)
from outrider.core.generation import (
    Caller,
    GenerationAccepted,
    GenerationEvent,
    GenerationRequest,
    ModelDescription,
)
from outrider.core.policy import GateSettings
from outrider.router.admission import Admission, LimitsOf, unlimited
from outrider.router.codec import TextCodec, encode_prompt
from outrider.router.dispatch import Dispatcher
from outrider.router.engine_pool import EnginePool
from outrider.router.inbox import RequestInbox
from outrider.router.limits import UNSUPPORTED_FIELDS, RouterLimits
from outrider.router.metrics import NoMetrics, RouterMetrics
from outrider.router.plan import RequestPlan
from outrider.router.registry import RequestRegistry, RunningRequest
from outrider.router.run import FailoverSettings, RequestRun
from outrider.router.stream import ChoiceStream
from outrider.router.timing import TimeSource
from outrider.router.validation import check_fields, plan_request, resume_text
from outrider.telemetry.spans import NullRequestSpans, RequestSpans, trace_id_of

__all__ = ["AbortBroadcast", "RouterService", "ServiceSettings"]

_logger = logging.getLogger(__name__)

AbortBroadcast = Callable[[str, Caller], Awaitable[bool]]
"""Asks the other routers' `abort_local`; True if one of them had the request."""

_INTERNAL = "InternalError"
"""Outcome of a request that met an error which nobody expected: a fault of ours."""
_OFF_LOOP_TOKENS = 512
"""Resumed outputs of at least this many tokens are detokenized in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What is fixed for the life of a router."""

    max_buffered_events: int = 4096
    """Engine events of one choice that may wait for its client; one step makes one."""
    backstop_grace_s: float = 5.0
    """The router ends a request this long after its time limit, should the engine not have."""
    failover: FailoverSettings = field(default_factory=FailoverSettings)
    """What happens to requests whose engine is lost."""

    def __post_init__(self) -> None:
        if self.max_buffered_events < 1:
            raise ConfigError(f"max_buffered_events: {self.max_buffered_events} is below 1")
        if self.backstop_grace_s < 0:
            raise ConfigError(f"backstop_grace_s: {self.backstop_grace_s} is below 0")


class RouterService:
    """Implements `core.ports.GenerationService` over a pool of engines. Used on one event loop."""

    def __init__(
        self,
        *,
        codec: TextCodec,
        pool: EnginePool,
        limits: RouterLimits,
        time: TimeSource,
        dispatcher: Dispatcher | None = None,
        metrics: RouterMetrics | None = None,
        spans: RequestSpans | None = None,
        broadcast_abort: AbortBroadcast | None = None,
        settings: ServiceSettings | None = None,
        limits_of: LimitsOf = unlimited,
    ) -> None:
        """`limits_of`: what each API key may use."""
        self._codec = codec
        self._pool = pool
        self._limits = limits
        self._time = time
        self._dispatcher = Dispatcher() if dispatcher is None else dispatcher
        self._metrics: RouterMetrics = NoMetrics() if metrics is None else metrics
        self._spans: RequestSpans = NullRequestSpans() if spans is None else spans
        self._broadcast_abort = broadcast_abort
        self._settings = ServiceSettings() if settings is None else settings
        self._admission = Admission(limits.admission, time, limits_of)
        self._registry = RequestRegistry()
        self._draining = False

    @property
    def running_requests(self) -> int:
        """Requests in flight."""
        return len(self._registry)

    async def start(self) -> None:
        """Connect to the engines."""
        await self._pool.start()

    async def drain(self) -> None:
        """Refuse new requests and wait until the running ones have ended; the caller bounds the wait."""
        self._draining = True
        await self._registry.wait_empty()

    async def close(self) -> None:
        """Fail what still runs and leave the engines. Idempotent."""
        self._draining = True
        for running in self._registry:
            running.fail(EngineUnavailable("this router is shutting down"))
        await self._pool.close()

    async def stream(self, request: GenerationRequest, caller: Caller) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request. Closing the iterator aborts it. Raises `OutriderError`s only."""
        try:
            running = self._enter(request, caller)
        except OutriderError as error:
            self._metrics.request_refused(error=type(error).__name__)
            # Its message names a field, and may quote it; the id may be what is wrong.
            shown_id = request.request_id[: self._limits.max_request_id_chars]
            _logger.info("request refused", extra={"request_id": shown_id, "outcome": type(error).__name__})
            raise
        try:
            plan, choices = await self._prepare(replace(request, request_id=running.request_id), running)
            with contextlib.closing(self._launch(running, plan, choices)) as run:
                yield GenerationAccepted(
                    request_id=plan.request_id,
                    model=plan.model,
                    seed=plan.seed,
                    prompt_tokens=len(plan.prompt_token_ids),
                )
                while run.unfinished:
                    for event in await running.inbox.take():
                        for made in run.client_events(event):
                            yield made
                    for made in run.move_lost():
                        yield made
            running.outcome = "completed"
        except OutriderError as error:
            running.outcome = type(error).__name__
            raise
        except Exception as error:
            running.outcome = _INTERNAL
            # The door logs what nobody expected, and cannot know yet whose request it was.
            error.add_note(f"request_id: {running.request_id}")
            raise
        finally:
            self._leave(running)

    async def abort(self, request_id: str, caller: Caller) -> bool:
        """End a request of this caller here or, by the broadcast hook, on another router."""
        if self.abort_local(request_id, caller):
            return True
        return self._broadcast_abort is not None and await self._broadcast_abort(request_id, caller)

    def abort_local(self, request_id: str, caller: Caller) -> bool:
        """End a request of this caller if it runs here; what a broadcast calls on every router."""
        running = self._registry.find(caller.key_id, request_id)
        if running is None:
            return False
        running.abort()
        return True

    async def model_info(self, model: str) -> ModelDescription:
        """Describe the served model. Raises `ModelNotFound`."""
        limits = self._current_limits()
        if model not in ("", limits.model):
            raise ModelNotFound(model, limits.model)
        return ModelDescription(
            model=limits.model,
            max_model_len=limits.max_model_len,
            vocab_size=self._codec.vocab_size,
            eos_token_ids=tuple(self._codec.eos_token_ids),
            max_num_speculative_tokens=limits.max_num_speculative_tokens,
            max_choices=limits.max_choices,
            max_top_logprobs=limits.max_top_logprobs,
            unsupported_fields=UNSUPPORTED_FIELDS,
            server_version=__version__,
        )

    async def speculation_status(self) -> Sequence[EngineStatus]:
        """The state of every engine; engines that are gone or rebuilt say why."""
        return self._pool.statuses()

    def update_settings(self, gate: GateSettings, limits: RouterLimits) -> None:
        """Apply new settings: the gate within one engine step, limits to what comes next.

        Raises `ConfigError` when the model differs: that takes another router.
        """
        if limits.model != self._limits.model:
            raise ConfigError(f"model: {limits.model!r} cannot replace {self._limits.model!r} while running")
        self._limits = limits
        self._admission.update(limits.admission)
        self._pool.set_gate(gate)

    def _enter(self, request: GenerationRequest, caller: Caller) -> RunningRequest:
        """All that can be refused before tokenization; then the request is registered and admitted."""
        if self._draining:
            raise EngineUnavailable("this router is shutting down")
        check_fields(request, self._limits)
        request_id = request.request_id or secrets.token_hex(16)
        self._registry.check_free(caller.key_id, request_id)
        running = RunningRequest(
            key_id=caller.key_id,
            request_id=request_id,
            traffic_class=request.traffic_class,
            arrived_s=self._time.now(),
            permit=self._admission.admit(caller.key_id, request.n or 1),
            inbox=RequestInbox(self._settings.max_buffered_events * (request.n or 1)),
            span=self._spans.start(request_id=request_id, model=self._limits.model, traceparent=caller.traceparent),
        )
        self._registry.add(running)
        return running

    async def _prepare(
        self, request: GenerationRequest, running: RunningRequest
    ) -> tuple[RequestPlan, list[ChoiceStream]]:
        """Tokenize, finish validation, and set up the text side of every choice."""
        running.span.asked(request)
        with running.span.tokenizing():
            prompt_token_ids = await encode_prompt(request, self._codec)
        running.prompt_tokens = len(prompt_token_ids)
        plan = plan_request(request, prompt_token_ids, self._current_limits(), self._codec)
        plan = replace(plan, key_id=running.key_id)
        if len(plan.resume_token_ids) >= _OFF_LOOP_TOKENS:
            texts = [await asyncio.to_thread(resume_text, plan, self._codec)]
        else:
            texts = [resume_text(plan, self._codec) for _ in range(plan.n)]
        return plan, [ChoiceStream(index, plan, text) for index, text in enumerate(texts)]

    def _launch(self, running: RunningRequest, plan: RequestPlan, choices: Sequence[ChoiceStream]) -> RequestRun:
        """Charge the tokens and hand all choices to an engine."""
        if running.aborted:
            raise RequestAborted(f"request_id: {running.request_id!r} was aborted before it ran")
        running.permit.charge(
            plan.in_flight_tokens(self._limits.admission.max_charged_output_tokens),
            prompt_tokens=len(plan.prompt_token_ids),
        )
        run = RequestRun(
            plan=plan,
            choices=choices,
            running=running,
            pool=self._pool,
            dispatcher=self._dispatcher,
            time=self._time,
            metrics=self._metrics,
            settings=self._settings.failover,
        )
        run.start()
        late = DeadlineExceeded(f"timeout_ms: {plan.timeout_s * 1000:g} passed and the engine did not end the request")
        left_s = plan.timeout_s - (self._time.now() - running.arrived_s)
        running.hold(
            self._time.call_later(left_s + self._settings.backstop_grace_s, lambda: running.fail(late)),
        )
        self._metrics.request_started(traffic_class=plan.traffic_class, prompt_tokens=len(plan.prompt_token_ids))
        return run

    def _leave(self, running: RunningRequest) -> None:
        """Free all that the request holds, on every way out."""
        running.release()
        self._registry.remove(running)
        _logger.info(
            "request ended",
            extra={
                "request_id": running.request_id,
                "trace_id": trace_id_of(running.span.traceparent),
                "outcome": running.outcome,
                "seconds": round(self._time.now() - running.arrived_s, 4),
                "prompt_tokens": running.prompt_tokens,
                "output_tokens": running.output_tokens,
            },
        )
        if running.started:
            self._metrics.request_finished(
                traffic_class=running.traffic_class,
                outcome=running.outcome,
                after_s=self._time.now() - running.arrived_s,
            )
        elif running.outcome != "abandoned":
            self._metrics.request_refused(error=running.outcome)

    def _current_limits(self) -> RouterLimits:
        """The limits, with the length that the connected engines can hold."""
        longest = self._pool.max_text_len(self._limits.max_model_len)
        return self._limits if longest == self._limits.max_model_len else replace(self._limits, max_model_len=longest)
