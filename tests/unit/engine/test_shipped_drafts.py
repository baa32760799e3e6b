"""A shipped draft is put together from its own layers and its target's embeddings."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core.errors import ConfigError
from outrider.engine.models import assemble, catalogue
from outrider.engine.models.catalogue import ShippedDraft, is_packaged, origin_of, packaged_names, shipped_draft

EMBEDDING = torch.arange(12.0).reshape(4, 3) / 3


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShippedDraft:
    monkeypatch.setattr(catalogue, "_SHIPPED", tmp_path / "shipped")
    folder = tmp_path / "shipped" / "small"
    folder.mkdir(parents=True)
    save_file({"model.norm.weight": torch.ones(3, dtype=torch.bfloat16)}, str(folder / "layers.safetensors"))
    for name in ("config.json", "draft_vocabulary.json", "README.md"):
        (folder / name).write_text(name)
    digest = hashlib.sha256((folder / "layers.safetensors").read_bytes()).hexdigest()
    return ShippedDraft(name="small", target="big", weights_sha256=digest)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "big"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": EMBEDDING}, str(folder / "model.safetensors"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text(name)
    return folder


def test_the_folder_is_whole(draft: ShippedDraft, target: Path, tmp_path: Path) -> None:
    assemble.assemble_draft(draft, target, tmp_path / "result")
    weights = load_file(str(tmp_path / "result" / "model.safetensors"))
    assert weights.keys() == {"model.norm.weight", "model.embed_tokens.weight"}
    torch.testing.assert_close(weights["model.embed_tokens.weight"], EMBEDDING.bfloat16(), rtol=0, atol=0)
    files = {path.name for path in (tmp_path / "result").iterdir()}
    assert files >= {"config.json", "draft_vocabulary.json", "README.md", "tokenizer.json", "chat_template.jinja"}


def test_changed_weights_are_refused(draft: ShippedDraft, target: Path, tmp_path: Path) -> None:
    draft.weights.write_bytes(b"something else")
    with pytest.raises(ConfigError, match="the installation is damaged"):
        assemble.assemble_draft(draft, target, tmp_path / "result")


def test_a_target_without_embeddings_is_refused(draft: ShippedDraft, target: Path, tmp_path: Path) -> None:
    (target / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="lends no embeddings"):
        assemble.assemble_draft(draft, target, tmp_path / "result")


@pytest.mark.parametrize("name", [name for name in packaged_names() if shipped_draft(name) is not None])
def test_what_ships_is_what_the_catalogue_says(name: str) -> None:
    draft = shipped_draft(name)
    assert draft is not None
    assert is_packaged(draft.target)
    assert origin_of(name) == f"ships with outrider, over {draft.target}"
    assert hashlib.sha256(draft.weights.read_bytes()).hexdigest() == draft.weights_sha256
    files = list(draft.folder.iterdir())
    assert sum(path.stat().st_size for path in files) <= 40_000_000
    vocabulary = json.loads((draft.folder / "draft_vocabulary.json").read_text())["token_ids"]
    config = json.loads((draft.folder / "config.json").read_text())
    assert config["tie_word_embeddings"]
    assert vocabulary == sorted(set(vocabulary))
    assert vocabulary[-1] < config["vocab_size"]
    assert config["eos_token_id"] in vocabulary
