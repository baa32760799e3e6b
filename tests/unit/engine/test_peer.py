"""What benchmarks compare with: transformers' own generation, and the time to read the weights."""

from pathlib import Path

import pytest
import torch
from tests.unit.engine.tiny_models import CONFIGS, random_tokens, save_random_model

from outrider.core.errors import ConfigError
from outrider.engine.bandwidth import WeightReader, weight_bytes
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine
from outrider.engine.peer import TransformersPeer

PROMPT = random_tokens(12)
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random_model(path, CONFIGS["llama"])
    return path


def our_greedy_text(folder: Path) -> list[int]:
    engine = build_engine(EngineConfig(model=str(folder), num_blocks=8, max_model_len=64), lambda text: None)
    tokens = list(PROMPT)
    for _ in range(NEW_TOKENS):
        one = ForwardSlice(token_ids=tokens, start=0, block_table=list(range(4)), num_logits=1)
        tokens.append(int(engine.forward(ForwardBatch(slices=(one,))).argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("way", ["plain", "assistant", "lookup"])
def test_the_peer_writes_the_same_greedy_text_in_every_way(folder: Path, way: str) -> None:
    peer = TransformersPeer(
        folder,
        dtype=torch.float32,
        threads=1,
        assistant=folder if way == "assistant" else None,
        prompt_lookup_tokens=3 if way == "lookup" else None,
    )
    answer = peer.generate(PROMPT, max_tokens=NEW_TOKENS, temperature=0.0, seed=1, assisted=way != "plain")
    assert list(answer.token_ids) == our_greedy_text(folder)[: len(answer.token_ids)]
    assert sum(tokens for _, tokens in answer.messages) == len(answer.token_ids) > 0
    times = [answer.started_s, *(time for time, _ in answer.messages), answer.ended_s]
    assert times == sorted(times)
    if way == "assistant":
        assert len(answer.messages) < len(answer.token_ids)  # it agrees with itself


def test_sampling_follows_its_seed(folder: Path) -> None:
    peer = TransformersPeer(folder, dtype=torch.float32, threads=1)
    draw = [
        peer.generate(PROMPT, max_tokens=NEW_TOKENS, temperature=1.0, seed=seed, assisted=False).token_ids
        for seed in (1, 1, 2)
    ]
    assert draw[0] == draw[1] != draw[2]


def test_what_is_not_set_up_is_refused(folder: Path, tmp_path: Path) -> None:
    peer = TransformersPeer(folder, dtype=torch.float32, threads=1)
    with pytest.raises(ConfigError, match="neither an assistant nor prompt lookup"):
        peer.generate(PROMPT, max_tokens=1, temperature=0.0, seed=1, assisted=True)
    with pytest.raises(ConfigError, match="takes one of them"):
        TransformersPeer(folder, dtype=torch.float32, threads=1, assistant=folder, prompt_lookup_tokens=3)
    with pytest.raises(ConfigError, match="transformers cannot load"):
        TransformersPeer(tmp_path, dtype=torch.float32, threads=1)


def test_weights_count_once_and_an_untied_embedding_not_at_all(tmp_path: Path) -> None:
    tied, untied = tmp_path / "tied", tmp_path / "untied"
    numbers = {}
    for path, name in ((tied, "llama-tied"), (untied, "llama")):
        model = save_random_model(path, CONFIGS[name])
        numbers[path] = sum(one.numel() for one in model.parameters())
    embedding = 128 * 64
    assert weight_bytes(tied, torch.float32) == 4 * numbers[tied]
    assert weight_bytes(untied, torch.bfloat16) == 2 * (numbers[untied] - embedding)
    with pytest.raises(ConfigError, match="has no safetensors"):
        weight_bytes(tmp_path, torch.float32)


def test_reading_takes_time() -> None:
    assert WeightReader(1 << 20, threads=1)() > 0.0
