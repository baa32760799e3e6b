"""The command `outrider`. One module per command; heavy imports happen inside the commands."""

import typer

from outrider_cluster.cli.bench import bench
from outrider_cluster.cli.demo import demo
from outrider_cluster.cli.emulate import emulate
from outrider_cluster.cli.generate import generate
from outrider_cluster.cli.models import models
from outrider_cluster.cli.plan import plan
from outrider_cluster.cli.serve import serve
from outrider_cluster.cli.soak import soak
from outrider_cluster.cli.status import status
from outrider_cluster.settings import prepare_command

__all__ = ["app", "main"]

app = typer.Typer(
    name="outrider",
    help="Lossless speculative decoding as a distributed Ray Serve deployment.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(generate)
app.command()(status)
app.command()(demo)
app.command()(plan)
app.command()(emulate)
app.command()(bench)
app.command()(soak)
app.add_typer(models, name="models")


def main() -> None:
    """Entry point of the console script."""
    prepare_command()
    app()
