"""`outrider serve`: deploy a configuration and stay in the foreground."""

import signal
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.core.errors import OutriderError
from outrider_cluster.cli.terminal import claimed_stdout, errors_as_exit_codes, messages, progress
from outrider_cluster.reaper import no_process_left
from outrider_cluster.settings import default_settings, load_settings, prepare_environment
from outrider_cluster.stopping import StopSignals

if TYPE_CHECKING:
    from outrider_cluster.service import Service

__all__ = ["serve"]

_DONE = {
    "none": "nothing has changed",
    "live": "live, within one engine step",
    "draft": "the draft is being replaced; targets decode plainly until it serves",
    "rolling": "replicas are being replaced one after another",
}


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file; without one, the embedded laptop configuration.")
    ] = None,
) -> None:
    """Serve until SIGINT or SIGTERM. SIGHUP reads the file again and applies it without a break.

    Prints one line on standard output once an engine serves: ready grpc=HOST:PORT http=HOST:PORT
    (without the second where http.enabled is false).
    """
    with no_process_left(), StopSignals() as signals, errors_as_exit_codes(), claimed_stdout() as announce:
        hangups: SimpleQueue[int] = SimpleQueue()
        # From the start: while an engine loads, SIGHUP would end the process and leave Ray behind.
        signal.signal(signal.SIGHUP, lambda number, frame: hangups.put(number))
        settings = default_settings() if config is None else load_settings(config)
        prepare_environment(settings)
        # Imports Ray, which reads the environment.
        from outrider_cluster.service import running_service

        with running_service(settings, progress, signals) as service:
            http = service.ingress.http_address
            announce(f"ready grpc={service.ingress.grpc_address}" + (f" http={http}" if http else ""))
            while hangups.get():
                _reload(config, service)


def _reload(config: Path | None, service: "Service") -> None:
    """Apply the file as it is now. A file that cannot be applied changes nothing."""
    try:
        change = service.update(default_settings() if config is None else load_settings(config))
    except OutriderError as error:
        messages.print(f"not applied: {error}", style="red", markup=False, soft_wrap=True)
    else:
        progress(f"applied the configuration anew: {_DONE[change.value]}")
