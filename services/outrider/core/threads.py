"""Sharing one interpreter between an engine's thread and its network."""

import sys

__all__ = ["share_interpreter"]

_SWITCH_INTERVAL_S = 0.0005


def share_interpreter() -> None:
    """Let a waiting thread have the interpreter after half a millisecond, for the whole process.

    Python's default lets a busy thread keep it for 5 ms, which is a third of a verify step: that
    long a block that has arrived could wait to be read. Entry points of engine processes call it.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
