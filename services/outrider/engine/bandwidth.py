"""The bound on memory-bound decoding: how long it takes to read as many bytes as the weights have."""

import json
import math
import time
from pathlib import Path

import torch

from outrider.core.errors import ConfigError

__all__ = ["WeightReader", "weight_bytes"]

_HEADER_LENGTH_BYTES = 8
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes that one decode step reads at least: every weight once, held as `dtype`.

    An embedding that is not tied to the output head is left out, since a step reads only single rows
    of it. Raises `ConfigError` when the folder has no safetensors.
    """
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        sizes |= _numbers_by_name(file)
    if not sizes:
        raise ConfigError(f"model: {folder} has no safetensors to count the weights of")
    tied = not any(name.endswith(_HEAD) for name in sizes)
    return dtype.itemsize * sum(size for name, size in sizes.items() if tied or not name.endswith(_EMBEDDING))


def _numbers_by_name(file: Path) -> dict[str, int]:
    """Numbers of each tensor, from the header alone: a length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        header = json.loads(stream.read(length))
    return {name: math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__"}


class WeightReader:
    """A buffer of `num_bytes` that can be read as a whole. Holds that much memory."""

    def __init__(self, num_bytes: int, *, threads: int) -> None:
        """Sets the number of torch threads of the calling thread."""
        torch.set_num_threads(threads)
        self._buffer = torch.ones(num_bytes // torch.float32.itemsize, dtype=torch.float32)

    def __call__(self) -> float:
        """Read everything once by summing it; returns the seconds."""
        began = time.perf_counter()
        self._buffer.sum()
        return time.perf_counter() - began
