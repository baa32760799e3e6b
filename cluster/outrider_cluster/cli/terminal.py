"""What commands share at the terminal: where messages go, and how errors end a command."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import typer
from rich.console import Console

from outrider.core.errors import OutriderError
from outrider_cluster.stopping import StopRequested

__all__ = ["claimed_stdout", "errors_as_exit_codes", "fail", "messages", "progress"]

messages = Console(stderr=True, highlight=False)
"""For people: everything but a command's result."""

_FAILED = 1


def progress(text: str) -> None:
    """One line about what is happening."""
    messages.print(text, style="dim", markup=False, soft_wrap=True)


def fail(problem: str) -> NoReturn:
    """End the command with an error."""
    messages.print(f"error: {problem}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(_FAILED)


@contextlib.contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Domain errors become one line and exit code 1; a requested stop is no error."""
    try:
        yield
    except OutriderError as error:
        fail(str(error))
    except StopRequested as stop:
        progress(f"stopped by {stop}")


@contextlib.contextmanager
def claimed_stdout() -> Iterator[Callable[[str], None]]:
    """Keep standard output for this command's own lines.

    Until the end of the block file descriptor 1 is standard error, so that no library and no child
    process can write between the lines that scripts read. Yields a function that writes one line.
    """
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)

    def write_line(text: str) -> None:
        os.write(own, f"{text}\n".encode())

    try:
        yield write_line
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)
