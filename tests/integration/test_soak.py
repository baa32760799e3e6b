"""A short soak: 64 streams, mixed lengths, random aborts; bounded by requests, not by time."""

import pytest

from outrider.local.soak.presets import scripted_soak
from outrider.local.soak.session import SoakLoad, run_soak
from outrider.local.soak.streams import for_requests
from outrider.local.stack import silent

STREAMS = 64
REQUESTS = 1200


def quiet(label: str) -> None:
    """A meter that shows nothing."""


@pytest.mark.timeout(300)
async def test_streams_with_aborts_leak_nothing_and_give_the_texts_of_solo_runs() -> None:
    settings, catalogue = scripted_soak(num_streams=STREAMS)
    load = SoakLoad(catalogue=catalogue, keep_going=for_requests(REQUESTS), num_streams=STREAMS)
    report = await run_soak(settings, load, quiet, silent)
    assert report.leaks == ()
    assert report.divergences == ()  # the formula model computes in float64: no rounding excuses anything
    assert report.requests == REQUESTS
    assert 0.1 * REQUESTS < report.aborted < 0.3 * REQUESTS
    assert report.preemptions > 0
    assert report.speculative_rounds > 0
