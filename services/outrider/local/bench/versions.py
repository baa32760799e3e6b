"""What the numbers depend on besides the settings."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from outrider import __version__

__all__ = ["versions"]

_DISTRIBUTIONS = ("torch", "transformers", "numpy", "grpcio", "protobuf")


def versions() -> dict[str, str]:
    """Outrider, Python, the libraries and the machine, by name."""
    found = {"outrider": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}"
    return found
