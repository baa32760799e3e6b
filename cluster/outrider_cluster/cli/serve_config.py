"""`outrider serve-config`: a configuration as the declared state that `serve deploy` and KubeRay apply."""

from pathlib import Path
from typing import Annotated

import typer

from outrider_cluster.cli.terminal import errors_as_exit_codes
from outrider_cluster.settings import load_settings, prepare_environment

__all__ = ["serve_config"]


def serve_config(
    config: Annotated[Path, typer.Argument(help="Configuration file of Outrider.")],
    deployed: Annotated[
        Path | None,
        typer.Option(help="The declaration that is running: only what changes live may differ, and no replica ends."),
    ] = None,
    rayservice: Annotated[
        str | None, typer.Option(help="Write a kustomize patch for the RayService of this name instead.")
    ] = None,
) -> None:
    """Write a Serve configuration file (`serve deploy`), or a RayService's, for a configuration of Outrider."""
    with errors_as_exit_codes():
        settings = load_settings(config)
        prepare_environment(settings)
        # Imports Ray, which reads the environment.
        from outrider_cluster.declaration import as_rayservice_patch, as_yaml, declaration, deployed_settings

        before = None if deployed is None else deployed_settings(deployed)
        declared = declaration(settings, deployed=before)
        text = as_yaml(declared) if rayservice is None else as_rayservice_patch(declared, name=rayservice)
        typer.echo(text, nl=False)
