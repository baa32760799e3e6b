"""Outrider: speculative decoding as a distributed service, without changing the distribution.

This package holds everything that runs without Ray. `outrider_cluster` deploys it.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The types of `LLM` and `SamplingParams` are in `__init__.pyi`. They are looked up by name, so that
# `import outrider` loads nothing and the lowest layer does not import the highest.
_LAZY = {"LLM": "outrider.local.llm", "SamplingParams": "outrider.local.sampling_params"}

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
