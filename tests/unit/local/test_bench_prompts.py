"""Prompt sets: the repository's own, ShareGPT files, and what is refused."""

import json
from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider.local.bench.prompts import MIXED, Prompt, PromptSet, load_prompt_file, load_prompt_sets, prompt_folder

SETS = ("code", "chat", "summarise", "creative")


def test_the_repositorys_sets_are_unique_and_large_enough() -> None:
    sets = load_prompt_sets(SETS, prompt_folder())
    assert [one.name for one in sets] == list(SETS)
    assert all(len(one.prompts) >= 24 for one in sets)
    assert {prompt.temperature for prompt in sets[3].prompts} == {1.0}
    assert {prompt.temperature for one in sets[:3] for prompt in one.prompts} == {0.0}
    assert all(prompt.text.count('"') >= 4 for prompt in sets[2].prompts)  # something to quote


def test_the_mixed_set_takes_turns() -> None:
    (mixed,) = load_prompt_sets([MIXED], prompt_folder())
    assert len(mixed.prompts) == 96
    first_of_each = {one.prompts[0].text for one in load_prompt_sets(SETS, prompt_folder())}
    assert {prompt.text for prompt in mixed.prompts[:4]} == first_of_each


def test_a_sharegpt_file_gives_each_first_human_turn_once(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    conversations = [
        {"conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "Who are you?"}]},
        {"conversations": [{"from": "human", "value": "Who are you?"}]},
        {"conversations": []},
        {"conversations": [{"from": "human", "value": "Why?"}]},
    ]
    file.write_text(json.dumps(conversations))
    assert load_prompt_file(file) == PromptSet(name="share", prompts=(Prompt(text="Who are you?"), Prompt(text="Why?")))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str) -> None:
    file = tmp_path / "a.jsonl"
    line = json.dumps({"prompt": f"one{separator}two"}, ensure_ascii=False)
    file.write_bytes(f"{line}\r\n\n{{}}".replace("{}", '{"prompt": "x"}').encode())
    assert [one.text for one in load_prompt_file(file).prompts] == [f"one{separator}two", "x"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', r"a\.jsonl:2: not an object with a prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "x"}\n', "a repeats a prompt"),
        ("a.jsonl", "\n", "a is empty"),
        ("a.json", '{"a": 1}', "not in ShareGPT's format"),
        ("a.json", "[1]", "not in ShareGPT's format"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str, text: str, problem: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_prompt_file(file)


def test_an_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no set 'poems'; known: chat, code, creative, summarise, mixed"):
        load_prompt_sets(["poems"], prompt_folder())


def test_more_streams_than_prompts_are_refused_instead_of_repeated() -> None:
    with pytest.raises(ConfigError, match="has 1 prompts, and 2 different ones"):
        PromptSet(name="one", prompts=(Prompt(text="x"),)).first(2)
