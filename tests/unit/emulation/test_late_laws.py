"""Rejection rule on an emulated pair in virtual time: the laws of a launched block are there when its verify ends."""

from dataclasses import replace

import pytest

from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.emulation.harness import EmulationMode, gate_for
from outrider.emulation.pair import EmulatedDraft, EmulatedTarget, PairSettings, emulated_request, greeting
from outrider.emulation.virtual_link import VirtualDraft
from outrider.emulation.virtual_time import VirtualTime

STEPS = 50


@pytest.mark.parametrize(("batch", "hop_s"), [(1, 0.25e-3), (4, 0.25e-3), (1, 2e-3)])
def test_they_travel_while_the_target_verifies(batch: int, hop_s: float) -> None:
    settings = PairSettings(batch=batch, max_tokens=9 * STEPS)
    time = VirtualTime()
    draft = EmulatedDraft(settings, time)
    replica = VirtualDraft(draft.drafter, draft.config, time, hop_s=hop_s)
    target = EmulatedTarget(settings, gate_for(EmulationMode.CACHED, 7), replica.link(greeting(settings)), time)

    def live() -> None:
        while target.loop.proposers.problem() is not None:
            time.run(1e-3)
            target.loop.proposers.poll()
        for index in range(batch):
            one = emulated_request(settings, 1 + index, rule=VerificationRule.REJECTION)
            target.submit(index, replace(one, sampling=SamplingParams()))
        for _ in range(STEPS):
            target.loop.step()

    time.add("draft", replica.live, background=True)
    time.add("target", live)
    time.simulate()
    counters = target.loop.counters.proposers
    assert counters.hits > batch * STEPS // 2
    assert counters.late_laws == counters.invalid == 0
    assert draft.drafter.counters.late_laws == counters.hits
