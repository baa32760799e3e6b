"""Runs an emulated pair under a constant load and says what came out, beside what could have."""

import asyncio
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationMode, SpeculationPreference
from outrider.emulation.bound import BoundModel
from outrider.emulation.pair import MAX_K, Load, PairProfile, PairSettings
from outrider.emulation.sample import Sample
from outrider.emulation.virtual_run import run_virtual
from outrider.emulation.wall_run import run_wall
from outrider.engine.emulated.text import TextSettings

__all__ = ["EmulationClock", "EmulationMode", "EmulationRun", "Row", "gate_for", "run_emulation"]

EmulationClock = Literal["virtual", "wall"]
"""virtual: software is free and noise absent; wall: real time, real gRPC, real waits."""


class EmulationMode(Enum):
    """What is compared."""

    PLAIN = "plain"
    SEQUENTIAL = "sequential"
    CACHED = "cached"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationRun:
    """One point of a sweep."""

    mode: EmulationMode
    batch: int = 1
    acceptance: float = 0.85
    k: int = 7
    """Draft tokens a round; `auto` chooses its own, whatever this says."""
    branches: int = 24
    """Most outcomes of a sequence that are drafted for; `auto` leaves that to the draft."""
    steps: int = 256
    """Engine steps that are measured."""
    warmup_steps: int = 32
    """Engine steps before them, in which the draft opens the texts and estimates settle."""
    profile: PairProfile = field(default_factory=PairProfile)
    text: TextSettings = field(default_factory=TextSettings)
    """Its acceptance gives way to `acceptance`."""
    prompt_len: int = 32
    first_seed: int = 1
    """The streams run the texts with this number and those that follow."""
    gate: GateSettings | None = None
    """In place of the mode's own settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one run gave. Emulated, all of it."""

    batch: int
    alpha: float
    mode: str
    tok_s_stream: float
    tok_s_total: float
    bound_tok_s_stream: float
    """Of the same schedule, by formula."""
    bound_ratio: float
    mean_acceptance_length: float
    """Committed tokens a round."""
    hit_rate: float | None
    """Hits over look-ups in outcome tables; None without look-ups."""
    zero_round_trip_hits: int
    """Rounds whose block came out of a table, without asking the draft."""
    k_mean: float
    """Verified draft tokens a round."""
    draft_utilisation: float
    """Share of the time that the draft's device was busy."""


def gate_for(mode: EmulationMode, k: int, branches: int = 24) -> GateSettings:
    """Settings under which an engine runs in one mode, whatever the load.

    `auto` is left to the gate's own estimates: no threshold of load or acceptance gets in their way.
    """
    settings = GateSettings(
        preference=SpeculationPreference.ON, max_num_draft_tokens=k, batch_size_threshold=None, min_acceptance_rate=0.0
    )
    match mode:
        case EmulationMode.PLAIN:
            return replace(settings, preference=SpeculationPreference.OFF)
        case EmulationMode.SEQUENTIAL:
            return replace(settings, mode=SpeculationMode.SEQUENTIAL)
        case EmulationMode.CACHED:
            return replace(settings, mode=SpeculationMode.CACHED, max_branches=branches)
        case EmulationMode.AUTO:
            return replace(settings, preference=SpeculationPreference.AUTO, mode=None, max_num_draft_tokens=MAX_K)


def run_emulation(run: EmulationRun, *, clock: EmulationClock = "virtual") -> Row:
    """Run one point, with the mode's own gate settings or those of the run.

    In virtual time in this process; in real time over processes of its own, as long as the steps take.
    Raises what a part of the run raises.
    """
    settings = _pair(run)
    gate = run.gate or gate_for(run.mode, run.k, run.branches)
    drafts = run.mode is not EmulationMode.PLAIN
    load = Load(warmup_steps=run.warmup_steps, steps=run.steps, first_seed=run.first_seed)
    if clock == "wall":
        span = asyncio.run(run_wall(settings, gate, load, drafts=drafts))
    else:
        span = run_virtual(settings, gate, load, drafts=drafts).span
    return _row(run, settings, span)


def _pair(run: EmulationRun) -> PairSettings:
    return PairSettings(
        profile=run.profile,
        text=replace(run.text, acceptance=run.acceptance),
        batch=run.batch,
        prompt_len=run.prompt_len,
        max_tokens=(run.warmup_steps + run.steps + 1) * (_longest(run) + 1),
    )


def _longest(run: EmulationRun) -> int:
    """Most draft tokens of a round."""
    return MAX_K if run.mode is EmulationMode.AUTO else run.k


def _row(run: EmulationRun, settings: PairSettings, span: Sample) -> Row:
    rate = span.committed / span.seconds
    bound = _bound(run, settings, span)
    return Row(
        batch=run.batch,
        alpha=run.acceptance,
        mode=run.mode.value,
        tok_s_stream=rate / run.batch,
        tok_s_total=rate,
        bound_tok_s_stream=bound,
        bound_ratio=rate / run.batch / bound,
        mean_acceptance_length=span.committed / span.rounds,
        hit_rate=span.hits / span.lookups if span.lookups else None,
        zero_round_trip_hits=span.hits,
        k_mean=span.verified / span.rounds,
        draft_utilisation=span.draft_busy_s / span.seconds,
    )


def _bound(run: EmulationRun, settings: PairSettings, span: Sample) -> float:
    # Texts grow while they are measured: the warm-up and half of the span lie before the mean row.
    written = span.committed / run.batch * (run.warmup_steps / run.steps + 0.5)
    model = BoundModel(
        target=run.profile.target,
        draft=run.profile.draft,
        hop_s=run.profile.hop_s,
        acceptance=run.acceptance,
        rank_shares=settings.text.rank_shares,
        context_len=settings.prompt_len + round(written),
    )
    match run.mode:
        case EmulationMode.PLAIN:
            return model.plain(run.batch)
        case EmulationMode.SEQUENTIAL:
            return model.sequential(run.batch, run.k)
        case EmulationMode.CACHED:
            return model.cached(run.batch, run.k, run.branches)
        case EmulationMode.AUTO:
            return model.best(run.batch, MAX_K, GateSettings().max_branches)
