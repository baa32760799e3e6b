"""Small lists from the host to a device, without making the host wait for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["device_tensor"]


def device_tensor(values: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.tensor(values, dtype)` on `device`.

    A copy from ordinary memory to a GPU waits until the stream is empty, so a single one between a
    forward and its sampling costs the whole overlap of the two. From pinned memory it is only queued;
    torch keeps the pinned buffer until the copy is done.
    """
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
