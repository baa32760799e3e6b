"""A whole soak test: load, leak check, solo runs, verdict."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from outrider.core.dispatch import EngineStatus
from outrider.engine.base import ModelEngine
from outrider.engine.factory import build_engine
from outrider.engine.models.prepare import Progress
from outrider.local.codec import Codec, load_codec
from outrider.local.config import LocalSettings
from outrider.local.draft_handle import DraftLoad
from outrider.local.soak.cases import Catalogue
from outrider.local.soak.leaks import draft_leaks, target_leaks
from outrider.local.soak.margin import top_two_margin
from outrider.local.soak.memory import MemoryTrend, MemoryWatch
from outrider.local.soak.solo import Divergence, TextJudge, run_alone
from outrider.local.soak.streams import KeepGoing, Mix, Tally, run_streams
from outrider.local.stack import LocalStack, start_draft
from outrider.router.limits import RouterLimits
from outrider.router.validation import plan_request

__all__ = ["SoakLoad", "SoakReport", "run_soak"]

_DRAIN_S = 30.0
_ASK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakLoad:
    """What runs, and for how long."""

    catalogue: Catalogue
    start: Callable[[], KeepGoing]
    """Called when the load begins."""
    num_streams: int = 64
    seed: int = 1
    mix: Mix = field(default_factory=Mix)
    """What is mixed in."""
    stuck_s: float = 120.0
    """A stream that hears nothing for this long is stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """What happened."""

    tally: Tally
    preemptions: int
    divergences: tuple[Divergence, ...]
    leaks: tuple[str, ...]
    memory: tuple[MemoryTrend, ...]
    """Of every process, over the load."""

    @property
    def passed(self) -> bool:
        """Whether nothing leaked or was seen to grow, no text was wrong and no bad request was answered."""
        return not (
            self.leaks
            or self.tally.not_refused
            or any(not one.excused for one in self.divergences)
            or any(one.grows for one in self.memory)
        )

    @property
    def memory_judged(self) -> bool:
        """Whether it went on for long enough to know of every process whether it grows."""
        return bool(self.memory) and all(one.judged for one in self.memory)


async def run_soak(
    settings: LocalSettings, load: SoakLoad, meter: Callable[[str], None], progress: Progress
) -> SoakReport:
    """Build a stack, soak it, judge it and end it. Raises `OutriderError`s, for a stuck stream among others."""
    codec = await asyncio.to_thread(load_codec, settings.target, progress)
    engine = await asyncio.to_thread(build_engine, settings.target, progress)
    try:
        draft = await start_draft(settings, progress)
        try:
            stack = LocalStack(settings, engine=engine, codec=codec, draft=draft)
            try:
                await stack.start()
                judge = TextJudge(await run_alone(stack, load.catalogue, meter))
                watch = MemoryWatch()
                with watch.watching():
                    tally = await _soak(stack, load, judge, meter)
                status = await _idle_status(stack)
                leaks = (*target_leaks(status), *draft_leaks(await _idle_draft(stack)))
                memory = watch.trends()
            finally:
                await stack.close()
        finally:
            if draft is not None:
                await draft.stop()
        found = judge.divergences(_Margins(load.catalogue, engine, codec, settings.name).margin)
    finally:
        engine.close()
    return SoakReport(tally=tally, preemptions=status.totals.preemptions, divergences=found, leaks=leaks, memory=memory)


async def _soak(stack: LocalStack, load: SoakLoad, judge: TextJudge, meter: Callable[[str], None]) -> Tally:
    return await run_streams(
        stack,
        load.catalogue,
        num_streams=load.num_streams,
        keep_going=load.start(),
        mix=load.mix,
        random=Random(load.seed),
        stuck_s=load.stuck_s,
        take=judge.take,
        meter=meter,
    )


async def _idle_status(stack: LocalStack) -> EngineStatus:
    """The engine once it has nothing left, or when time is up: aborts are still on their way to it."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while target_leaks(await stack.status()):  # noqa: ASYNC110 - the other end is another thread
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        pass  # what is left is reported
    return await stack.status()


async def _idle_draft(stack: LocalStack) -> DraftLoad | None:
    """The draft once it has nothing left, or when time is up."""
    load = await stack.draft_load()
    try:
        async with asyncio.timeout(_DRAIN_S):
            while draft_leaks(load):
                await asyncio.sleep(_ASK_AGAIN_S)
                load = await stack.draft_load()
    except TimeoutError:
        pass  # what is left is reported
    return load


class _Margins:
    """Judges draws of a catalogue on an idle engine."""

    def __init__(self, catalogue: Catalogue, engine: ModelEngine, codec: Codec, model: str) -> None:
        self._catalogue = catalogue
        self._engine = engine
        self._codec = codec
        self._limits = RouterLimits(model=model, max_model_len=engine.limits.max_model_len)

    def margin(self, case: int, output: tuple[int, ...]) -> float:
        """Top-2 margin of the draw behind `output`."""
        request = self._catalogue.alone(case)
        prompt = tuple(self._codec.encode_chat(request.messages or (), continue_final_message=False))
        plan = plan_request(request, prompt, self._limits, self._codec)
        (sequence,) = plan.sequence_requests(timeout_s=1.0, traceparent="")
        return top_two_margin(
            self._engine, sequence, output, min(self._codec.vocab_size, self._engine.limits.vocab_size)
        )
