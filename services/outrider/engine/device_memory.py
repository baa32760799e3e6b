"""How much memory there is on this machine's devices."""

import os
from pathlib import Path
from typing import Literal

from outrider.core.errors import ConfigError

__all__ = ["device_memory_bytes"]

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def device_memory_bytes(device: Literal["cuda", "cpu"], *, cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Bytes of one GPU, or of the system memory that this process may use (a container's limit counts).

    Raises `ConfigError` when a GPU is asked for and there is none.
    """
    if device == "cpu":
        return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(cgroup_limit)])
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("gpu_memory_gib: there is no GPU here to ask; give the memory of one (--gpu-memory-gib 80)")
    return min(int(torch.cuda.get_device_properties(one).total_memory) for one in range(torch.cuda.device_count()))


def _limits(cgroup_limit: Path) -> list[int]:
    try:
        text = cgroup_limit.read_text().strip()
    except OSError:
        text = "max"
    return [int(text)] if text.isdecimal() else []
