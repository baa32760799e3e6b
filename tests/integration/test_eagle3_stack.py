"""An EAGLE-3 head in a child process, over a real link: equal texts, whatever the head says."""

from pathlib import Path

import pytest
from tests.unit.engine.byte_tokenizer import save_byte_tokenizer
from tests.unit.engine.tiny_heads import save_random_head
from tests.unit.engine.tiny_models import SIZES, save_random_model
from transformers import LlamaConfig

import outrider
from outrider.core.errors import CompatibilityError, ConfigError
from outrider.core.generation import ChatMessage

PROMPTS = ["one two", "a longer prompt of several words", "x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("eagle3")
    save_random_model(folder / "target", LlamaConfig(**{**SIZES, "vocab_size": 512}))
    save_byte_tokenizer(folder / "target")
    save_random_head(folder / "head", vocab_size=512)
    return folder / "target", folder / "head"


def texts(target: Path, speculative_config: dict[str, object] | None, temperature: float) -> list[tuple[int, ...]]:
    params = outrider.SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    with outrider.LLM(str(target), max_model_len=128, max_num_seqs=4, speculative_config=speculative_config) as llm:
        results = llm.generate(PROMPTS, params)
    if speculative_config is not None:
        assert sum(one.choices[0].end.speculation.stats.verified for one in results) > 20
    return [tuple(one.choices[0].token_ids) for one in results]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_the_target_alone(folders: tuple[Path, Path], temperature: float) -> None:
    target, head = folders
    config: dict[str, object] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    assert texts(target, config, temperature) == texts(target, None, temperature)


def test_what_does_not_fit_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = folders
    save_random_head(tmp_path / "other", vocab_size=511)
    with pytest.raises(CompatibilityError, match="511 ids"):
        texts(target, {"method": "eagle3", "model": str(tmp_path / "other"), "num_speculative_tokens": 3}, 0.0)
    with pytest.raises(ConfigError, match="not 'self'"):
        texts(target, {"method": "eagle3", "model": "self", "num_speculative_tokens": 3}, 0.0)


@pytest.mark.timeout(240)
def test_the_shipped_head_speeds_its_target_up_without_a_change() -> None:
    params = outrider.SamplingParams(max_tokens=32, temperature=0.0)
    question = [[ChatMessage(role="user", content="Write a Python function that adds two numbers.")]]
    config = {"model": "smollm2-eagle3", "num_speculative_tokens": 2}
    with outrider.LLM("smollm2-135m", max_model_len=128, max_num_seqs=2, speculative_config=config) as llm:
        (fast,) = llm.chat(question, params)
    with outrider.LLM("smollm2-135m", max_model_len=128, max_num_seqs=2) as llm:
        (plain,) = llm.chat(question, params)
    assert fast.choices[0].token_ids == plain.choices[0].token_ids
    stats = fast.choices[0].end.speculation.stats
    assert stats.accepted_per_position[0] / stats.verified_per_position[0] > 0.3
