"""Puts one engine together from its parts. The only place that knows them all."""

import time
from collections.abc import Callable

from outrider.core.dispatch import EngineHello
from outrider.core.policy import GateSettings
from outrider.core.ports import Clock, DraftTransport
from outrider.core.text import DetokenizerFactory
from outrider.engine.base import ModelEngine
from outrider.engine.features import HasFeatures
from outrider.engine.sequence_kv import KVCache
from outrider.target.admission import SequenceFactory
from outrider.target.config import TargetConfig
from outrider.target.counters import EngineCounters
from outrider.target.draft_proposer import DraftProposer
from outrider.target.draft_wait import DraftWait
from outrider.target.feature_feed import FeatureFeed
from outrider.target.gate import SpeculationGate
from outrider.target.host import EngineHost
from outrider.target.loop import Emit, EngineLoop
from outrider.target.ngram_proposer import NgramProposer
from outrider.target.proposers import Proposer, ProposerSet
from outrider.target.scheduler import Scheduler
from outrider.target.sessions import SessionBoard
from outrider.target.source_choice import SourceChoice
from outrider.target.tuner import SpeculationTuner
from outrider.target.verifier import Verifier
from outrider.telemetry.spans import NullSequenceSpans, SequenceSpans

__all__ = ["MonotonicClock", "build_host", "build_loop"]


class MonotonicClock:
    """The machine's own monotonic time."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()


def build_loop(
    *,
    engine: ModelEngine,
    config: TargetConfig,
    gate_settings: GateSettings,
    num_valid_ids: int,
    transport: DraftTransport | None,
    clock: Clock,
    emit: Emit,
    spans: SequenceSpans | None = None,
) -> EngineLoop:
    """Wire scheduler, gate, proposers and verifier around an engine."""
    limits = engine.limits
    counters = EngineCounters()
    kv = KVCache(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        enable_prefix_cache=config.enable_prefix_cache,
    )
    features = engine.features if isinstance(engine, HasFeatures) else None
    proposers: list[Proposer] = []
    if transport is not None:
        proposers.append(
            DraftProposer(
                transport,
                clock,
                vocab_size=num_valid_ids,
                wait=DraftWait(limit_s=config.max_draft_wait_s),
                counters=counters.proposers,
                feed=None if features is None else FeatureFeed(features, kv),
            )
        )
    choice: SourceChoice | None = None
    if config.prompt_lookup_max:
        ngram = NgramProposer(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max)
        choice = SourceChoice(ngram) if proposers else None
        proposers.append(ngram)
    scheduler = Scheduler(config, kv)
    return EngineLoop(
        scheduler=scheduler,
        gate=SpeculationGate(
            gate_settings,
            max_draft_tokens_limit=config.max_draft_tokens_limit,
            tuner=SpeculationTuner(counters.verify_times, counters.proposers),
        ),
        proposers=ProposerSet(proposers, choice),
        verifier=Verifier(engine, num_valid_ids=num_valid_ids),
        counters=counters,
        spans=spans or NullSequenceSpans(),
        clock=clock,
        emit=emit,
    )


def build_host(
    *,
    engine: ModelEngine,
    hello: EngineHello,
    config: TargetConfig,
    gate_settings: GateSettings,
    num_valid_ids: int,
    detokenizers: DetokenizerFactory,
    transport: DraftTransport | None,
    on_failure: Callable[[str], None],
    spans: SequenceSpans | None = None,
    clock: Clock | None = None,
) -> EngineHost:
    """An engine ready to `start`. `transport` None: no draft is configured."""
    clock = clock or MonotonicClock()
    board = SessionBoard()
    loop = build_loop(
        engine=engine,
        config=config,
        gate_settings=gate_settings,
        num_valid_ids=num_valid_ids,
        transport=transport,
        clock=clock,
        emit=board.emit,
        spans=spans,
    )
    sequences = SequenceFactory(
        config=config,
        limits=engine.limits,
        num_valid_ids=num_valid_ids,
        detokenizers=detokenizers,
        clock=clock,
        fits_alone=loop.scheduler.fits_alone,
    )
    return EngineHost(hello=hello, loop=loop, board=board, sequences=sequences, on_failure=on_failure)
