"""A short soak: 64 streams, mixed lengths, aborts, slow readers, bad requests; bounded by requests, not by time."""

from functools import partial

import pytest

from outrider.local.soak.presets import scripted_soak
from outrider.local.soak.session import SoakLoad, run_soak
from outrider.local.soak.streams import Mix, for_requests
from outrider.local.stack import silent

STREAMS = 64
REQUESTS = 800


def quiet(label: str) -> None:
    """A meter that shows nothing."""


@pytest.mark.timeout(300)
async def test_streams_with_aborts_leak_nothing_and_give_the_texts_of_solo_runs() -> None:
    settings, catalogue = scripted_soak(num_streams=STREAMS)
    load = SoakLoad(
        catalogue=catalogue, start=partial(for_requests, REQUESTS), num_streams=STREAMS, mix=Mix(stall_s=1.0)
    )
    report = await run_soak(settings, load, quiet, silent)
    assert report.leaks == ()
    assert report.divergences == ()  # the formula model computes in float64: no rounding excuses anything
    tally = report.tally
    assert tally.requests == REQUESTS
    assert 0.1 * REQUESTS < tally.aborted < 0.4 * REQUESTS
    assert report.preemptions > 0
    assert tally.speculative_rounds > 0
    assert tally.slow > 10
    assert tally.cut == 0, "these texts are shorter than what may wait for a reader"
    assert tally.not_refused == []
    assert tally.refused > 10
    # Other tests' processes may be there as well.
    assert "this process" in {one.process for one in report.memory}
