"""The real model of the tests: prepared folder, tokenizer and engines agree with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.engine.rank_processes import rank_group
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.core.generation import ChatMessage
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine
from outrider.engine.models.prepare import default_cache_dir, prepare
from outrider.engine.tokenizer import Tokenizer

MODEL = "smollm2-135m"
NEW_TOKENS = 48
TABLE = [40, 3, 17, 8, 29, 1, 22, 35, 11]


def ignore(_: str) -> None:
    """A progress sink."""


def settings(**changes: Any) -> EngineConfig:
    return EngineConfig(model=MODEL, num_blocks=64, max_model_len=512, **changes)


class Story:
    """A prompt, its greedy continuation by plain transformers, and that one's logits."""

    def __init__(self, folder: Path) -> None:
        prompt = ChatMessage(role="user", content="Write a short story about a boy and his dog in Paris.")
        self.prompt = Tokenizer(folder).encode_chat([prompt], continue_final_message=False)
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        with torch.inference_mode():
            ids = torch.tensor([self.prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
            self.logits: Tensor = model(output).logits[0]
        self.tokens: list[int] = output[0].tolist()

    @property
    def batch(self) -> ForwardBatch:
        """All tokens in one prefill that asks for every row."""
        one = ForwardSlice(token_ids=self.tokens, start=0, block_table=TABLE, num_logits=len(self.tokens))
        return ForwardBatch(slices=(one,))


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare(MODEL, default_cache_dir(), ignore)


@pytest.fixture(scope="module")
def story(folder: Path) -> Story:
    return Story(folder)


@pytest.fixture(scope="module")
def engine() -> ModelEngine:
    return build_engine(settings(), ignore)


def test_prefill_logits_equal_transformers(engine: ModelEngine, story: Story) -> None:
    torch.testing.assert_close(engine.forward(story.batch), story.logits, rtol=0, atol=1e-3)


def test_chunks_rows_and_verify_rows_give_the_same_text(engine: ModelEngine, story: Story) -> None:
    start = len(story.prompt)
    chunks = [(0, 7, 0), (7, start, 1)]
    for first in range(start, start + NEW_TOKENS - 7, 7):  # plain and verify rows in turn
        chunks += [(first, first + 1, 1), (first + 1, first + 7, 6)]
    rows = []
    for first, end, num_logits in chunks:
        one = ForwardSlice(token_ids=story.tokens[first:end], start=first, block_table=TABLE, num_logits=num_logits)
        rows.append(engine.forward(ForwardBatch(slices=(one,))))
    logits = torch.cat(rows)

    expected = story.logits[start - 1 : start - 1 + len(logits)]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    assert logits.argmax(-1).tolist() == story.tokens[start : start + len(logits)]


def test_the_quantised_copy_is_a_good_draft(story: Story) -> None:
    engine = build_engine(settings(dtype="bfloat16", quantization="int4"), ignore)
    agreement = (engine.forward(story.batch).argmax(-1) == story.logits.argmax(-1)).float().mean()
    assert agreement > 0.85


def test_two_ranks_equal_transformers(folder: Path, story: Story) -> None:
    with rank_group(settings(tensor_parallel_size=2)) as group:
        answer = group.forward(story.batch)
        group.close()
        assert group.exit_codes() == [0, 0]
    assert isinstance(answer, list), answer
    logits = torch.tensor(answer)
    torch.testing.assert_close(logits, story.logits, rtol=0, atol=1e-3)


TEXTS = [
    "The capital of France is Paris.",
    "Room 101, 3.14159 and 2^31 = 2147483648",
    "def f(x):\n    return x ** 2  # squared\n",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "👩‍👩‍👧‍👦 e\u0301 你好 🇳🇴",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_those_of_the_architectures_own_class(folder: Path, text: str) -> None:
    ids = Tokenizer(folder).encode(text)
    assert ids == AutoTokenizer.from_pretrained(str(folder)).encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_text_streams_without_splitting_a_character(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(folder)
    detokenizer = tokenizer.detokenizer(context=tokenizer.encode("Once"), skip_special_tokens=True)
    pieces = [*(detokenizer.feed(token_id) for token_id in tokenizer.encode(text)), detokenizer.flush()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_digits_are_single_tokens(folder: Path) -> None:
    # The conversion from GGUF forgets this splitter; without it "2024" is one token.
    tokenizer = Tokenizer(folder)
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
