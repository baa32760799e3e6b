"""Put a shipped draft together: its own layers, and what it shares with its target."""

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.engine.models.catalogue import ShippedDraft

__all__ = ["EMBEDDING", "assemble_draft"]

EMBEDDING = "model.embed_tokens.weight"
"""The table that a draft leaves out; tied, it is the output head as well."""

_WEIGHTS = "model.safetensors"
_OWN_FILES = ("config.json", "draft_vocabulary.json", "README.md")
_SHARED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def assemble_draft(draft: ShippedDraft, target: Path, folder: Path) -> None:
    """Write the standard Hugging Face folder of a shipped draft, in bfloat16.

    `target` is the folder of the model that it drafts for. Raises `ConfigError` when a file is
    missing or is not the one that was shipped.
    """
    digest = hashlib.sha256(_bytes(draft)).hexdigest()
    if digest != draft.weights_sha256:
        raise ConfigError(
            f"model {draft.name!r}: {draft.weights.name} has SHA-256 {digest}, expected {draft.weights_sha256}; "
            "the installation is damaged"
        )
    weights = load_file(str(draft.weights))
    weights[EMBEDDING] = _embedding(draft, target / _WEIGHTS).to(torch.bfloat16)
    folder.mkdir()
    save_file(weights, str(folder / _WEIGHTS), metadata={"format": "pt"})
    for source, names in ((draft.folder, _OWN_FILES), (target, _SHARED_FILES)):
        for name in names:
            shutil.copyfile(source / name, folder / name)


def _bytes(draft: ShippedDraft) -> bytes:
    try:
        return draft.weights.read_bytes()
    except OSError as error:
        raise ConfigError(f"model {draft.name!r}: cannot read its weights: {error}") from error


def _embedding(draft: ShippedDraft, weights: Path) -> Tensor:
    try:
        with safe_open(str(weights), framework="pt") as tensors:
            embedding: Tensor = tensors.get_tensor(EMBEDDING)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model {draft.name!r}: {weights} lends no embeddings: {error}") from error
    return embedding
