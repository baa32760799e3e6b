"""What makes the host wait for a device, counted where it costs nothing: on the CPU."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["questions"]

QUESTIONS = ("nonzero", "_local_scalar_dense", "is_nonzero", "masked_select", "_unique2", "bincount")
"""Operators whose result, or its size, the host has to see. `tolist` is none of them: it is the copy."""


class _Questions(TorchDispatchMode):
    """Counts the questions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in QUESTIONS:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


def questions(act: Callable[[], object]) -> list[str]:
    """The questions that `act` asks of the device, by operator, in order."""
    mode = _Questions()
    with mode:
        act()
    return mode.asked
