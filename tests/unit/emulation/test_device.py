"""The roofline by hand, and the reference costs that it is calibrated to."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.core.errors import ConfigError
from outrider.engine.emulated.device import (
    DeviceProfile,
    HardwareProfile,
    ModelSizes,
    h100_llama_1b,
    h100_tp4_llama_70b,
)

SMALL = DeviceProfile(
    name="small",
    hardware=HardwareProfile(
        num_devices=1,
        memory_bytes_per_s=1e6,
        peak_flops=1e7,
        link_bytes_per_s=1e6,
        memory_efficiency=0.5,
        compute_efficiency=0.5,
        all_reduce_latency_s=0.25,
        launch_s=0.001,
    ),
    # 4 * 4 * (2 * 2 + 2 * 1) = 96 and 3 * 4 * 8 = 96 a layer, 4 * 16 = 64 behind them: 448 weights.
    model=ModelSizes(num_layers=2, hidden_size=4, intermediate_size=8, heads=2, kv_heads=1, head_dim=4, vocab_size=16),
)


def test_a_small_step_reads_the_weights_and_a_large_one_computes() -> None:
    assert SMALL.model.weights == 448
    reading = 448 * 2 / 0.5e6
    assert SMALL.step_s(rows=1) == pytest.approx(reading + 0.001)
    assert SMALL.step_s(rows=10) == pytest.approx(reading + 0.001)
    assert SMALL.step_s(rows=100) == pytest.approx(2 * 448 * 100 / 0.5e7 + 0.001)


def test_kv_is_read_on_top() -> None:
    assert SMALL.model.kv_bytes_per_token == 2 * 2 * 1 * 4 * 2
    assert SMALL.step_s(rows=1, kv_tokens=100) - SMALL.step_s(rows=1) == pytest.approx(3200 / 0.5e6)


def test_several_devices_share_the_work_and_pay_two_all_reduces_a_layer() -> None:
    two = replace(SMALL, hardware=replace(SMALL.hardware, num_devices=2))
    one_all_reduce = 0.25 + 2 * 1 / 2 * 3 * 4 * 2 / 1e6
    assert two.step_s(rows=3) == pytest.approx(448 * 2 / 1e6 + 4 * one_all_reduce + 0.001)


def test_the_reference_costs() -> None:
    target, draft = h100_tp4_llama_70b(), h100_llama_1b()
    assert target.step_s(rows=8) == pytest.approx(13.5e-3, rel=1e-3)
    assert draft.step_s(rows=1) == pytest.approx(1.2e-3, rel=1e-3)


def test_the_models_have_their_published_sizes() -> None:
    # All parameters less the input embedding (70B), which is the output projection too in the 1B.
    assert h100_tp4_llama_70b().model.weights == pytest.approx(70.554e9 - 128256 * 8192, rel=1e-3)
    assert h100_llama_1b().model.weights == pytest.approx(1.2358e9, rel=1e-3)
    assert h100_tp4_llama_70b().model.kv_bytes_per_token == 327_680


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_devices": 0}, "num_devices: 0"),
        ({"memory_bytes_per_s": 0.0}, "memory_bytes_per_s"),
        ({"memory_efficiency": 1.5}, "memory_efficiency: 1.5"),
        ({"launch_s": -1.0}, "launch_s"),
    ],
)
def test_a_constant_that_cannot_be_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(SMALL.hardware, **changes)
