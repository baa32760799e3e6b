"""Emulation in real time: real processes, real gRPC between client, router, target and draft."""

import multiprocessing

import pytest

from outrider.core.errors import EngineUnavailable
from outrider.emulation import wall_run
from outrider.emulation.harness import EmulationMode, EmulationRun, gate_for, run_emulation
from outrider.emulation.pair import Load, PairSettings

pytestmark = pytest.mark.timeout(110)


def test_a_pair_speculates_over_grpc_and_leaves_no_process() -> None:
    run = EmulationRun(mode=EmulationMode.SEQUENTIAL, batch=2, k=4, steps=60, warmup_steps=20)
    row = run_emulation(run, clock="wall")
    assert row.tok_s_stream > 0
    assert row.k_mean > 2
    # How fast it is depends on the machine; that speculation pays in tokens a round does not.
    assert row.mean_acceptance_length > 2
    assert 0 < row.draft_utilisation < 1
    assert multiprocessing.active_children() == []


async def test_streams_that_end_before_they_are_measured_are_an_error() -> None:
    gate = gate_for(EmulationMode.PLAIN, 4)
    with pytest.raises(EngineUnavailable, match="ended before"):
        await wall_run.run_wall(PairSettings(max_tokens=5), gate, Load(steps=10, warmup_steps=10), drafts=False)
    assert multiprocessing.active_children() == []
