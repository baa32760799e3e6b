"""`outrider serve`: deploy a configuration and stay in the foreground."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from outrider_cluster.cli.terminal import claimed_stdout, errors_as_exit_codes, progress
from outrider_cluster.reaper import no_process_left
from outrider_cluster.settings import default_settings, load_settings, prepare_environment
from outrider_cluster.stopping import StopSignals

__all__ = ["serve"]


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file; without one, the embedded laptop configuration.")
    ] = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Prints one line on standard output once an engine serves: ready grpc=HOST:PORT
    """
    with no_process_left(), StopSignals() as signals, errors_as_exit_codes(), claimed_stdout() as announce:
        settings = default_settings() if config is None else load_settings(config)
        prepare_environment(settings)
        # Imports Ray, which reads the environment.
        from outrider_cluster.service import running_service

        with running_service(settings, progress, signals) as ingress:
            announce(f"ready grpc={ingress.grpc_address}")
            while True:
                signal.pause()
