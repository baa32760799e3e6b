"""A draft with another vocabulary is refused before anything is deployed, by its first differing token."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from outrider.core.errors import CompatibilityError
from outrider_cluster.codec import check_draft_vocabulary
from outrider_cluster.settings import Environment, Settings, default_settings


def model_folder(folder: Path, words: list[str]) -> Path:
    """A folder with a tokenizer of these words; enough for everything but loading weights."""
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


def pair(target: Path, draft: Path) -> Settings:
    values = default_settings().model_dump(mode="json")
    values["model"]["name"] = str(target)
    values["draft"] |= {"model": str(draft), "quantization": "none"}
    return Settings.model_validate(values)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(cache_dir=tmp_path / "cache", auth_token="")


def test_the_first_differing_token_is_named(tmp_path: Path, environment: Environment) -> None:
    target = model_folder(tmp_path / "target", ["<unk>", "a", "b", "c"])
    draft = model_folder(tmp_path / "draft", ["<unk>", "a", "x", "y"])
    with pytest.raises(CompatibilityError, match="token id 2 is 'b' here and 'x' there"):
        check_draft_vocabulary(pair(target, draft), environment, lambda text: None)


def test_a_missing_token_is_a_difference(tmp_path: Path, environment: Environment) -> None:
    target = model_folder(tmp_path / "target", ["<unk>", "a", "b"])
    draft = model_folder(tmp_path / "draft", ["<unk>", "a"])
    with pytest.raises(CompatibilityError, match="token id 2 is 'b' here and not assigned there"):
        check_draft_vocabulary(pair(target, draft), environment, lambda text: None)


def test_the_same_vocabulary_passes(tmp_path: Path, environment: Environment) -> None:
    target = model_folder(tmp_path / "target", ["<unk>", "a", "b"])
    draft = model_folder(tmp_path / "draft", ["<unk>", "a", "b"])
    check_draft_vocabulary(pair(target, draft), environment, lambda text: None)


def test_a_self_draft_needs_no_look(environment: Environment) -> None:
    check_draft_vocabulary(default_settings(), environment, lambda text: None)
