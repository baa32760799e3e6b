"""Which attention an engine gets, and how it says why not the other."""

import logging
from typing import Any

import pytest
import torch

from outrider.core.errors import CompatibilityError, ConfigError
from outrider.engine import cuda_path
from outrider.engine.base import EngineLimits
from outrider.engine.config import EngineConfig
from outrider.engine.cuda_path import paged_options, use_device
from outrider.engine.paged_kernels import gathered_kernel, kernel_error
from outrider.engine.paged_steps import PagedOptions
from outrider.engine.rank_group import backend_for
from outrider.engine.shape import ModelShape
from outrider.engine.step_graphs import PlainRecorder

SHAPE = ModelShape(num_layers=1, heads=4, kv_heads=2, head_dim=16, vocab_size=8, max_positions=2048)
LIMITS = EngineLimits(vocab_size=8, max_model_len=2048, num_blocks=8, block_size=256)
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def config(**changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 256, "num_blocks": 8}
    return EngineConfig(model="m", **{**settings, **changes})


def options(settings: EngineConfig, device: torch.device = CUDA) -> PagedOptions | None:
    return paged_options(settings, SHAPE, LIMITS, torch.bfloat16, device)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU that has a kernel, as far as the choice can see: the trial runs on the CPU."""

    def on_cpu(kernel: Any, shape: ModelShape, *, device: torch.device, **rest: Any) -> float:
        return kernel_error(kernel, shape, device=CPU, **{**rest, "dtype": torch.float32})

    monkeypatch.setattr(cuda_path, "unsupported", lambda *_, **__: None)
    monkeypatch.setattr(cuda_path, "load_varlen_kernel", lambda: gathered_kernel)
    monkeypatch.setattr(cuda_path, "kernel_error", on_cpu)
    monkeypatch.setattr(cuda_path, "CudaRecorder", PlainRecorder)
    return monkeypatch


@pytest.mark.usefixtures("pretended")
def test_graphs_cover_every_batch_size_at_every_width() -> None:
    chosen = options(config(graph_batch_sizes=(1, 4), graph_widths=(1, 2, 3), cuda_graphs="startup"))
    assert chosen is not None
    assert (chosen.row_buckets, chosen.max_width, chosen.record_at_start) == ((1, 2, 3, 4, 8, 12), 3, True)


@pytest.mark.usefixtures("pretended")
def test_graphs_can_be_off() -> None:
    chosen = options(config(cuda_graphs="off"))
    assert chosen is not None
    assert chosen.row_buckets == ()


@pytest.mark.usefixtures("pretended")
def test_gather_is_an_order_and_a_cpu_always_gathers() -> None:
    assert options(config(attention="gather")) is None
    assert options(config(device="cpu", block_size=16), CPU) is None


def no_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_path, "load_varlen_kernel", lambda: None)


def wrong_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_path, "kernel_error", lambda *_, **__: 0.4)


def refusing_kernel(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> float:
        raise RuntimeError("Paged KV is not for you")

    patch.setattr(cuda_path, "kernel_error", refuse)


@pytest.mark.parametrize(
    ("breaking", "reason"),
    [(no_kernel, "has no torch.nn"), (wrong_kernel, "off by 0.4"), (refusing_kernel, "Paged KV is not for you")],
)
def test_a_kernel_that_cannot_be_trusted_is_named_and_not_used(
    breaking: Any, reason: str, pretended: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    breaking(pretended)
    with caplog.at_level(logging.WARNING):
        assert options(config()) is None
    assert reason in caplog.text
    with pytest.raises(CompatibilityError, match=reason):
        options(config(attention="varlen"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_size": 16}, "block_size: .* 256, not 16"),
        ({"attention": "varlen", "dtype": "float32"}, "attention: varlen needs cuda and 16 bits"),
        ({"attention": "varlen", "device": "cpu"}, "attention: varlen needs cuda and 16 bits"),
        ({"graph_widths": ()}, "graph_widths"),
        ({"graph_batch_sizes": (0, 1)}, "graph_batch_sizes"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        config(**changes)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"attention": "gather"}, {"device": "cpu"}])
def test_small_blocks_are_fine_where_nothing_is_paged_by_torch(changes: dict[str, Any]) -> None:
    assert config(block_size=16, **changes).block_size == 16


def test_sums_go_where_the_activations_are() -> None:
    assert (backend_for(CUDA), backend_for(CPU)) == ("nccl", "gloo")
    assert use_device("cpu") == CPU
