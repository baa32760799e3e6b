"""`outrider.LLM` on the formula model, and what it leaves behind: nothing."""

import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

import outrider
from outrider.core.errors import ConfigError, InvalidRequest
from outrider.core.generation import ChatMessage

DRAFT = {"method": "draft_model", "model": "scripted", "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPTS: list[str | Sequence[int]] = ["HELLO", "WORLD", [1, 2, 3]]
MIXED: list[object] = [1, "x"]
PARAMS = outrider.SamplingParams(temperature=0.8, max_tokens=24, seed=5)


def texts(config: dict[str, object] | None) -> tuple[list[str], int]:
    with outrider.LLM("scripted", max_model_len=128, speculative_config=config) as llm:
        results = llm.generate(PROMPTS, PARAMS)
    choices = [one.choices[0] for one in results]
    return [one.text for one in choices], sum(one.end.speculation.stats.verified for one in choices)


def test_texts_are_equal_with_and_without_speculation() -> None:
    plain, none_verified = texts(None)
    drafted, _ = texts(DRAFT)
    looked_up, verified = texts(NGRAM)
    assert plain == drafted == looked_up
    assert len(set(plain)) == 3
    assert none_verified == 0
    assert verified > 0


def test_one_prompt_needs_no_list_and_chat_uses_the_template() -> None:
    with outrider.LLM("scripted", max_model_len=128) as llm:
        assert llm.generate("HELLO", PARAMS)[0].choices[0].text == texts(None)[0][0]
        assert llm.generate([1, 2, 3], PARAMS)[0].choices[0].text == texts(None)[0][2]
        (answer,) = llm.chat([[ChatMessage(role="user", content="HI")]], PARAMS)
        assert answer.accepted.prompt_tokens == len("user:HI\nassistant:")
        with pytest.raises(ConfigError, match="are mixed"):
            llm.generate(MIXED, PARAMS)  # type: ignore[arg-type]


def test_nothing_is_left_after_close() -> None:
    before = set(threading.enumerate())
    llm = outrider.LLM("scripted", max_model_len=128, speculative_config=DRAFT)
    llm.generate("HELLO", PARAMS)
    llm.close()
    llm.close()
    left = {one.name for one in set(threading.enumerate()) - before if one.name.startswith("outrider")}
    assert left == set()
    with pytest.raises(ConfigError, match="is closed"):
        llm.generate("HELLO", PARAMS)


def test_a_refused_request_leaves_the_model_usable() -> None:
    with outrider.LLM("scripted", max_model_len=64) as llm:
        with pytest.raises(InvalidRequest, match="max_model_len 64"):
            llm.generate(["HELLO", "A" * 80], PARAMS)
        assert llm.generate("HELLO", PARAMS)[0].choices[0].text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 needs a process per rank"),
        ({"dtype": "int3"}, "dtype: 'int3'"),
        ({"speculative_config": {"method": "eagle"}}, "method 'eagle' is not supported"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        outrider.LLM("scripted", **change)  # type: ignore[arg-type]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import outrider, sys; print([m for m in ('torch', 'grpc', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_script_that_forgets_to_close_ends_cleanly() -> None:
    code = "import outrider\nllm = outrider.LLM('scripted', max_model_len=64)\nllm.generate('HI')\nprint('done')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert shown.stdout.strip() == "done"
    assert "Traceback" not in shown.stderr
