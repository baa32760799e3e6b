"""A constant load on one pair in virtual time: a step of either device is an event, software is free."""

from dataclasses import dataclass

from outrider.core.policy import GateSettings
from outrider.emulation.pair import EmulatedDraft, EmulatedTarget, PairSettings, emulated_request, greeting
from outrider.emulation.sample import Sample, take_sample
from outrider.emulation.virtual_link import VirtualDraft
from outrider.emulation.virtual_time import VirtualTime

__all__ = ["VirtualResult", "run_virtual"]

_LOOK_S = 1e-3  # how often an engine without work looks at its link


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualResult:
    """What a run in virtual time gave."""

    span: Sample
    """Between the end of the warm-up and the end."""
    texts: tuple[tuple[int, ...], ...]
    """Output of every stream, in order."""


def run_virtual(
    settings: PairSettings,
    gate: GateSettings,
    *,
    drafts: bool,
    warmup_steps: int,
    steps: int,
    first_seed: int = 1,
) -> VirtualResult:
    """Run `settings.batch` streams for some steps; without `drafts` the engine has no draft at all.

    `settings.max_tokens` must last for the steps. Raises what any of the actors raises.
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

    def live() -> None:
        proposers = target.loop.proposers
        while draft is not None and proposers.problem() is not None:
            time.run(_LOOK_S)
            proposers.poll()
        for index in range(settings.batch):
            target.submit(index, emulated_request(settings, first_seed + index))
        for _ in range(warmup_steps):
            target.loop.step()
        before = take_sample(target, draft, time.now())
        for _ in range(steps):
            target.loop.step()
        spans.append(take_sample(target, draft, time.now()).since(before))

    time.add("target", live)
    time.simulate()
    return VirtualResult(span=spans[0], texts=tuple(tuple(text) for text in target.texts.values()))
