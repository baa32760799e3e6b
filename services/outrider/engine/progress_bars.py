"""Progress bars that other packages draw."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

__all__ = ["no_bars_of_others"]


@contextmanager
def no_bars_of_others() -> Iterator[None]:
    """Keep transformers from drawing: its bars cut through ours, and fill the log of a process without a terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
