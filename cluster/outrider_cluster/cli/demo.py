"""`outrider demo`."""

import typer

__all__ = ["demo"]


def demo() -> None:
    """Demo."""
    raise typer.Exit(1)
