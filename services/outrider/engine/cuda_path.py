"""How an engine runs its steps on its device: with a paged kernel and graphs, or by gathering."""

import logging

import torch

from outrider.core.errors import CompatibilityError
from outrider.engine.base import EngineLimits
from outrider.engine.config import EngineConfig
from outrider.engine.paged_batch import PagedKernel
from outrider.engine.paged_kernels import kernel_error, load_varlen_kernel, unsupported
from outrider.engine.paged_steps import PagedOptions
from outrider.engine.shape import ModelShape
from outrider.engine.step_graphs import CudaRecorder, row_buckets

__all__ = ["paged_options", "use_device"]

_logger = logging.getLogger(__name__)

# Of the trial's values, which are of the order of one, bfloat16 keeps eight bits.
_TOLERANCE = 0.05


def use_device(name: str) -> torch.device:
    """The torch device, made the current one of this thread and process.

    NCCL, graphs and streams take the current device when they are told none.
    """
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def paged_options(
    config: EngineConfig, shape: ModelShape, limits: EngineLimits, dtype: torch.dtype, device: torch.device
) -> PagedOptions | None:
    """What `config` asks for, of what works on `device`; None to gather.

    `shape` is this rank's. Raises `CompatibilityError` when `attention` asks for the paged kernel by
    name and it cannot run, or gives a wrong result. With `auto` the engine then gathers, and the
    log says why.
    """
    if config.attention == "gather" or (config.attention == "auto" and device.type != "cuda"):
        return None
    kernel, problem = _checked_kernel(shape, limits, dtype, device)
    if kernel is None:
        if config.attention == "varlen":
            raise CompatibilityError(f"attention: varlen cannot be used, since {problem}")
        _logger.warning("paged attention and CUDA graphs are off, attention gathers instead: %s", problem)
        return None
    recorded = config.cuda_graphs != "off"
    return PagedOptions(
        kernel=kernel,
        max_width=max(config.graph_widths),
        row_buckets=row_buckets(config.graph_batch_sizes, config.graph_widths) if recorded else (),
        recorder=CudaRecorder(),
        record_at_start=config.cuda_graphs == "startup",
    )


def _checked_kernel(
    shape: ModelShape, limits: EngineLimits, dtype: torch.dtype, device: torch.device
) -> tuple[PagedKernel | None, str]:
    """The kernel, or why there is none."""
    problem = unsupported(shape, dtype=dtype, block_size=limits.block_size, device=device)
    if problem is not None:
        return None, problem
    kernel = load_varlen_kernel()
    if kernel is None:
        return None, f"torch {torch.__version__} has no torch.nn.attention.varlen"
    try:
        error = kernel_error(
            kernel,
            shape,
            dtype=dtype,
            block_size=limits.block_size,
            max_keys=limits.max_model_len,
            device=device,
        )
    except (RuntimeError, TypeError, ValueError) as failure:
        return None, f"torch {torch.__version__} refuses the paged kernel: {failure}"
    if error > _TOLERANCE:
        return None, f"torch {torch.__version__}'s paged kernel is off by {error:.2g} on a trial of this shape"
    return kernel, ""
