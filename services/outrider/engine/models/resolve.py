"""From what configuration calls a model to a folder on this machine."""

from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.engine.models.catalogue import is_packaged, packaged_names
from outrider.engine.models.heads import shipped_head
from outrider.engine.models.prepare import Progress, prepare

__all__ = ["resolve", "resolve_head"]

_HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_HEAD_PATTERNS = ("*.json", "*.safetensors", "*.bin")
"""Draft heads are published as one pickled file, which is read without running what is in it."""


def resolve_head(name_or_path: str, cache_dir: Path, progress: Progress) -> Path:
    """Return the folder of a draft head, which has no tokenizer of its own: a shipped one, or as `resolve`."""
    return shipped_head(name_or_path) or resolve(name_or_path, cache_dir, progress, patterns=_HEAD_PATTERNS)


def resolve(
    name_or_path: str, cache_dir: Path, progress: Progress, *, patterns: tuple[str, ...] = _HUB_PATTERNS
) -> Path:
    """Return the folder of a model; download or prepare it if need be.

    In this order: a packaged model's short name (`prepare`), a folder that exists (taken as it
    is), a hub id `owner/name` (from huggingface_hub's cache, or downloaded). Raises `ConfigError`
    saying what was tried.
    """
    if is_packaged(name_or_path):
        return prepare(name_or_path, cache_dir, progress)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model: {folder} has no config.json; a Hugging Face model folder is needed")
        return folder
    if _looks_like_hub_id(name_or_path):
        return _from_hub(name_or_path, progress, patterns)
    raise ConfigError(
        f"model: {name_or_path!r} is no folder, no hub id (owner/name) and no packaged model "
        f"({', '.join(packaged_names())})"
    )


def _looks_like_hub_id(text: str) -> bool:
    owner, slash, name = text.partition("/")
    return bool(owner and slash and name) and "/" not in name and owner not in (".", "..", "~")


def _from_hub(hub_id: str, progress: Progress, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), local_files_only=True))
    except LocalEntryNotFoundError:
        progress(f"downloading {hub_id}")
    except HFValidationError as error:
        raise ConfigError(f"model: {hub_id!r} is neither a folder nor a valid hub id") from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model: cannot download {hub_id!r} from the model hub ({type(error).__name__}); "
            "check the id and the network, or give the path of a local folder"
        ) from error
