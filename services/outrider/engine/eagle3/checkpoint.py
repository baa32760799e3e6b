"""Read and write heads in the format that their authors publish: config.json and one file of weights.

    fc.weight                                   [hidden, 3 * target_hidden]
    midlayer.self_attn.{q,k,v}_proj.weight      [heads * head_dim, 2 * hidden]
    midlayer.self_attn.o_proj.weight, midlayer.mlp.{gate,up,down}_proj.weight
    midlayer.{hidden_norm,input_layernorm,post_attention_layernorm}.weight, norm.weight
    lm_head.weight                              [draft_vocab, hidden]
    d2t                                         int64 [draft_vocab]: target id - draft id
    t2d                                         bool [vocab]: whether the target's id can be drafted
    embed_tokens.weight                         [vocab, hidden]; left out where it is the target's

A full vocabulary needs neither d2t nor t2d.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.errors import CompatibilityError, ConfigError
from outrider.engine.eagle3.config import Eagle3Shape
from outrider.engine.eagle3.model import Eagle3Head

__all__ = ["load_embedding", "load_head", "save_head"]

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_EMBEDDING = "embed_tokens.weight"
_TARGET_EMBEDDING = "model.embed_tokens.weight"


def load_head(folder: Path, shape: Eagle3Shape) -> tuple[Eagle3Head, Tensor | None]:
    """The head in float32, and its embedding table [vocab, hidden] if it brings one of its own.

    Raises `ConfigError` when the folder has no weights, and `CompatibilityError` naming a weight
    that is missing, unknown or of another size, or a draft id outside the vocabulary.
    """
    weights = _read(folder)
    embedding = weights.pop(_EMBEDDING, None)
    drafted = weights.pop("t2d", None)
    head = Eagle3Head(shape)
    if "d2t" not in weights and shape.draft_vocab_size == shape.vocab_size:
        weights["d2t"] = torch.zeros(shape.draft_vocab_size, dtype=torch.long)
    _check(head, weights)
    head.load_state_dict({name: one.long() if name == "d2t" else one.float() for name, one in weights.items()})
    ids = head.target_ids
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size or len(ids.unique()) != len(ids):
        raise CompatibilityError(f"draft: d2t names ids outside 0..{shape.vocab_size - 1}, or one of them twice")
    if drafted is not None and not torch.equal(drafted.bool().nonzero().flatten(), ids.sort().values):
        raise CompatibilityError("draft: d2t and t2d do not name the same ids")
    if embedding is not None and tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        raise CompatibilityError(
            f"draft: {_EMBEDDING} is {list(embedding.shape)}, not [{shape.vocab_size}, {shape.hidden_size}]"
        )
    head.requires_grad_(False).eval()
    return head, embedding


def load_embedding(folder: Path, shape: Eagle3Shape) -> Tensor:
    """The target's embedding table [vocab, hidden], without reading anything else of its weights.

    Raises `CompatibilityError` when the folder has none in safetensors, or one of another size.
    """
    index = folder / "model.safetensors.index.json"
    name = "model.safetensors"
    try:
        if index.is_file():
            name = json.loads(index.read_text())["weight_map"][_TARGET_EMBEDDING]
        with safe_open(str(folder / name), framework="pt", device="cpu") as file:
            embedding: Tensor = file.get_tensor(_TARGET_EMBEDDING)
    except (OSError, KeyError, SafetensorError) as error:
        raise CompatibilityError(f"target: no {_TARGET_EMBEDDING} in {folder}: {error}") from error
    if tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        raise CompatibilityError(
            f"draft: the head needs an embedding of [{shape.vocab_size}, {shape.hidden_size}]; "
            f"the target's is {list(embedding.shape)}"
        )
    return embedding


def save_head(head: Eagle3Head, config: Mapping[str, Any], folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors. The embedding stays the target's and is not written."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: one.detach().contiguous().to("cpu", dtype if one.is_floating_point() else one.dtype)
        for name, one in head.state_dict().items()
    }
    weights["t2d"] = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
    weights["t2d"][head.target_ids.cpu()] = True
    save_file(weights, str(folder / _WEIGHTS[0]), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


def _read(folder: Path) -> dict[str, Tensor]:
    for name in _WEIGHTS:
        path = folder / name
        if path.is_file() and path.suffix == ".safetensors":
            return load_file(str(path))
        if path.is_file():
            weights: dict[str, Tensor] = torch.load(str(path), map_location="cpu", weights_only=True)
            return weights
    raise ConfigError(f"draft: {folder} has no weights; expected {' or '.join(_WEIGHTS)}")


def _check(head: Eagle3Head, weights: Mapping[str, Tensor]) -> None:
    expected = head.state_dict()
    for name in (*expected, *weights):
        if name not in weights:
            raise CompatibilityError(f"draft: the head's weights lack {name}")
        if name not in expected:
            raise CompatibilityError(f"draft: the head has {name}, which this engine does not know")
        if weights[name].shape != expected[name].shape:
            raise CompatibilityError(
                f"draft: {name} is {list(weights[name].shape)}, not {list(expected[name].shape)} as config.json says"
            )
