"""A model's config.json, without its weights."""

import json
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError
from outrider.engine.models.catalogue import is_packaged
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve

__all__ = ["read_config"]


def read_config(name_or_path: str, cache_dir: Path, progress: Progress) -> dict[str, Any]:
    """Parse the config.json of a model, named as `resolve` takes it, or by the file's own path.

    From a model hub only this file is fetched; a packaged model is prepared if need be. Raises
    `ConfigError` saying what was tried.
    """
    path = Path(name_or_path).expanduser()
    if is_packaged(name_or_path) or path.is_dir():
        path = resolve(name_or_path, cache_dir, progress) / "config.json"
    elif not path.is_file():
        path = _from_hub(name_or_path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model: {path} holds no object")
    return config


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model: {hub_id!r} is no folder and no config.json here, and cannot be fetched from the model hub "
            f"({type(error).__name__})"
        ) from error
