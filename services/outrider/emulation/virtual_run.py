"""A constant load on one pair in virtual time: a step of either device is an event, software is free."""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.core.policy import GateSettings
from outrider.emulation.pair import EmulatedDraft, EmulatedTarget, Load, PairSettings, emulated_request, greeting
from outrider.emulation.sample import Sample, sample_of
from outrider.emulation.virtual_link import VirtualDraft
from outrider.emulation.virtual_time import VirtualTime

__all__ = ["Observe", "VirtualResult", "run_virtual"]

Observe = Callable[[Sample], None]

_LOOK_S = 1e-3  # how often an engine without work looks at its link


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualResult:
    """What a run in virtual time gave."""

    span: Sample
    """Between the end of the warm-up and the end."""
    texts: tuple[tuple[int, ...], ...]
    """Output of every stream, in order."""


def run_virtual(
    settings: PairSettings, gate: GateSettings, load: Load, *, drafts: bool, observe: Observe | None = None
) -> VirtualResult:
    """Run `settings.batch` streams for some steps; without `drafts` the engine has no draft at all.

    `observe` sees the counters since the start after every measured step. `settings.max_tokens` must last
    for the steps. Raises what any of the actors raises.
    """
    time = VirtualTime()
    draft = EmulatedDraft(settings, time) if drafts else None
    link = None
    if draft is not None:
        replica = VirtualDraft(draft.drafter, draft.config, time, hop_s=settings.profile.hop_s)
        link = replica.link(greeting(settings))
        time.add("draft", replica.live, background=True)
    target = EmulatedTarget(settings, gate, link, time)
    spans: list[Sample] = []

    def sample() -> Sample:
        totals = target.loop.counters.totals(target.loop.scheduler)
        busy_s = draft.engine.busy_s if draft is not None else 0.0
        return sample_of(totals, seconds=time.now(), draft_busy_s=busy_s)

    def live() -> None:
        proposers = target.loop.proposers
        while draft is not None and proposers.problem() is not None:
            time.run(_LOOK_S)
            proposers.poll()
        for index in range(settings.batch):
            target.submit(index, emulated_request(settings, load.first_seed + index))
        for _ in range(load.warmup_steps):
            target.loop.step()
        before = sample()
        for _ in range(load.steps):
            target.loop.step()
            if observe is not None:
                observe(sample())
        spans.append(sample().since(before))

    time.add("target", live)
    time.simulate()
    return VirtualResult(span=spans[0], texts=tuple(tuple(text) for text in target.texts.values()))
