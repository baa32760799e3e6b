"""The command `outrider`. One module per command; heavy imports happen inside the commands."""

import logging

import typer

from outrider_cluster.cli.bench import bench
from outrider_cluster.cli.burst import burst
from outrider_cluster.cli.demo import demo
from outrider_cluster.cli.distill import distill
from outrider_cluster.cli.emulate import emulate
from outrider_cluster.cli.generate import generate
from outrider_cluster.cli.keys import keys
from outrider_cluster.cli.models import models
from outrider_cluster.cli.plan import plan
from outrider_cluster.cli.serve import serve
from outrider_cluster.cli.serve_config import serve_config
from outrider_cluster.cli.soak import soak
from outrider_cluster.cli.status import status

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
app.command()(burst)
app.command()(bench)
app.command()(distill)
app.command()(soak)
app.command(name="serve-config")(serve_config)
app.add_typer(keys, name="keys")
app.add_typer(models, name="models")


def main() -> None:
    """Run a command by the arguments of the process."""
    logging.getLogger("asyncio").addFilter(_not_of_an_ended_loop)
    app()


def _not_of_an_ended_loop(record: logging.LogRecord) -> bool:
    """Leave out events of a gRPC client whose event loop has ended.

    All clients of a process share one poller; Serve's loop, which outlives a command's own, may find
    the last event of ours and report it as an error, although nothing waits for it any more.
    """
    return "PollerCompletionQueue._handle_events" not in record.getMessage()
