"""Entry point of the console script: what has to be settled before anything heavy is imported."""

import os

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # gRPC tells on stderr of every connection that a server closes in good order. It looks once, when it is
    # loaded, and nearly every command loads it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from outrider_cluster.cli import main as run

    run()
