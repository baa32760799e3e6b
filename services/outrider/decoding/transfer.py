"""Small values from the host to a device, without making the host wait for the device.

A copy from ordinary memory to a GPU waits until the stream is empty, so a single one between a forward
and its sampling costs the whole overlap of the two; indexing with a Python list is such a copy too.
From pinned memory it is only queued, and torch keeps the pinned buffer until the copy is done.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["device_index", "device_tensor", "to_device"]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; the host does not wait."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def device_tensor(values: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.tensor(values, dtype)` on `device`; the host does not wait."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def device_index(values: Sequence[int], device: torch.device) -> Tensor:
    """Positions to index a tensor of `device` with; int64."""
    return device_tensor(values, dtype=torch.int64, device=device)
