"""What the target is asked: read from a file or a log, each prompt once, and what cannot be asked is said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.distill.tiny_target import save_tiny_target
from transformers import AutoModelForCausalLM

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage
from outrider.distill.prompts import Conversation, ConversationFile, PromptQueue, load_conversations, user_turn
from outrider.distill.records import LabelledText, PromptClass, RecordStore, TokenKind
from outrider.distill.requests import ChatFrame
from outrider.distill.sample_stage import SamplingProgress, sample_texts
from outrider.distill.settings import DistillSettings, StageMinutes
from outrider.engine.tokenizer import Tokenizer

PROMPTS = tuple(user_turn(f"question {number}?") for number in range(40))
SYSTEM = ChatMessage(role="system", content="Answer in verse.")


class EnoughError(Exception):
    """Ends a stage that would go on for its time."""


def settings(folder: Path, prompts: tuple[Conversation, ...], **changes: Any) -> DistillSettings:
    return DistillSettings(
        target=str(folder / "target"),
        output=folder / "draft",
        minutes=StageMinutes(sample=1, train=1),
        prompts=prompts,
        dtype="float32",
        **({"max_new_tokens": 8, "num_slots": 4, "top_k": 4} | changes),
    )


def sample(one: DistillSettings, store: RecordStore, *, rounds: int, first_round: int = 0) -> list[str]:
    """So many rounds of the stage; what it said."""
    told: list[str] = []

    def tell(now: SamplingProgress) -> None:
        if now.rounds == first_round + rounds:
            raise EnoughError

    target = AutoModelForCausalLM.from_pretrained(one.target)
    with pytest.raises(EnoughError):
        sample_texts(
            one,
            Tokenizer(Path(one.target)),
            target,
            store,
            first_round=first_round,
            seconds=600.0,
            tell=tell,
            hear=lambda share, tokens: None,
            progress=told.append,
        )
    return told


def is_refused(one: DistillSettings, store: RecordStore, problem: str, *, first_round: int) -> None:
    """The stage raises before it has sampled anything."""
    with pytest.raises(ConfigError, match=problem):
        sample_texts(
            one,
            Tokenizer(Path(one.target)),
            AutoModelForCausalLM.from_pretrained(one.target),
            store,
            first_round=first_round,
            seconds=1.0,
            tell=lambda now: None,
            hear=lambda share, tokens: None,
            progress=lambda text: None,
        )


def asked(store: RecordStore) -> list[tuple[int, ...]]:
    return list(store.prompts())


def written(folder: Path, *lines: object) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_prompts_and_logged_requests_are_read(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    system = {"role": "system", "content": "Answer in verse."}
    path = written(
        tmp_path,
        {"prompt": "One?", "temperature": 0.5},
        {"model": "m", "messages": [system, user], "stream": True},
        {"messages": [user, answer, user, answer]},
    )
    assert load_conversations(path) == ConversationFile(
        conversations=(
            user_turn("One?"),
            (SYSTEM, *user_turn("Hi")),
            (*user_turn("Hi"), ChatMessage(role="assistant", content="Hello"), *user_turn("Hi")),
        ),
        num_refused=0,
        first_refused="",
    )


def test_content_in_parts_and_answers_without_content_are_read_as_the_door_reads_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i", "cache_control": {}}]
    verse = {"role": "developer", "content": [{"type": "text", "text": "Answer in verse."}]}
    called: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": [{}]}
    read = load_conversations(written(tmp_path, {"messages": [verse, {"role": "user", "content": parts}, called]}))
    assert (read.conversations, read.num_refused) == (((SYSTEM, *user_turn("Hi")),), 0)


UNREADABLE: list[object] = [
    {"text": "x"},
    {"prompt": 3},
    ["x"],
    {"messages": []},
    {"messages": "x"},
    {"messages": None},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "assistant", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "x"}]},
]


@pytest.mark.parametrize("line", UNREADABLE)
def test_a_line_that_asks_nothing_is_left_out_and_named(tmp_path: Path, line: object) -> None:
    read = load_conversations(written(tmp_path, {"prompt": "One?"}, line, line))
    assert (read.conversations, read.num_refused) == ((user_turn("One?"),), 2)
    assert "log.jsonl:2: neither" in read.first_refused


def test_a_file_of_which_no_line_can_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts: .*log\.jsonl:1: neither"):
        load_conversations(written(tmp_path, *UNREADABLE))
    (tmp_path / "log.jsonl").write_text('{"prompt": \n')
    with pytest.raises(ConfigError, match=r"log\.jsonl:1: neither"):
        load_conversations(tmp_path / "log.jsonl")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str, ending: str) -> None:
    path = tmp_path / "log.jsonl"
    text = f"one{separator}two"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    path.write_bytes(f"{line}{ending}{ending}{line}{ending}".encode())
    assert load_conversations(path).conversations == (user_turn(text),) * 2


def test_a_file_without_a_prompt_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        load_conversations(written(tmp_path))
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"prompts: .*log\.jsonl"):
        load_conversations(tmp_path / "log.jsonl")
    with pytest.raises(ConfigError, match="No such file"):
        load_conversations(tmp_path / "none.jsonl")


def test_every_prompt_is_asked_once_over_all_runs_whatever_the_slots(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    store = RecordStore(tmp_path / "records")
    sample(settings(tmp_path, PROMPTS[:20]), store, rounds=2)
    # More prompts, some of them twice, and other numbers of texts at once.
    sample(settings(tmp_path, PROMPTS + PROMPTS[:5], num_slots=9), store, rounds=2, first_round=2)
    sample(settings(tmp_path, PROMPTS, num_slots=14), store, rounds=1, first_round=4)
    prompts = asked(store)
    assert len(prompts) == len(set(prompts)) == len(PROMPTS)


def test_a_short_run_sees_some_of_everything(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    store = RecordStore(tmp_path / "records")
    sample(settings(tmp_path, PROMPTS), store, rounds=2)
    first = {tuple(Tokenizer(tmp_path / "target").encode_chat(one, continue_final_message=False)) for one in PROMPTS}
    prefix = tuple(store.prefix().tolist())
    in_order = [prefix + one for one in asked(store)]
    assert set(in_order) < first
    assert in_order != sorted(in_order)


def test_when_all_is_answered_the_target_makes_up_more_and_says_so(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    store = RecordStore(tmp_path / "records")
    told = sample(settings(tmp_path, PROMPTS[:4]), store, rounds=3)
    kinds = [one.prompt_class for one in store.texts()]
    assert kinds[:4] == [PromptClass.GIVEN] * 4
    assert set(kinds[4:]) == {PromptClass.SAMPLED}
    assert told.count("every prompt has its answer; the target makes up more") == 1
    assert len(set(asked(store))) == len(kinds)


def test_prompts_without_room_are_passed_over(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    store = RecordStore(tmp_path / "records")
    long = tuple(user_turn(f"far too long {number} " * 400) for number in range(9))
    sample(settings(tmp_path, long + PROMPTS[:2], num_slots=2), store, rounds=1)
    assert [text.prompt_class for text in store.texts()] == [PromptClass.GIVEN] * 2


def test_prompts_none_of_which_can_be_asked_are_an_error(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    one = settings(tmp_path, (user_turn("far too long " * 400),) * 2)
    is_refused(one, RecordStore(tmp_path / "records"), "none can be asked: 2 have more than", first_round=0)


def test_made_up_prompts_of_an_earlier_run_answer_no_given_one(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    store = RecordStore(tmp_path / "records")
    sample(settings(tmp_path, ()), store, rounds=1)
    assert asked(store)
    is_refused(
        settings(tmp_path, (user_turn("far too long " * 400),)),
        store,
        "none can be asked: 1 have more than",
        first_round=1,
    )


def test_prompts_that_an_earlier_run_has_asked_have_their_answers(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    store = RecordStore(tmp_path / "records")
    sample(settings(tmp_path, PROMPTS[:4]), store, rounds=1)
    told = sample(settings(tmp_path, PROMPTS[:4]), store, rounds=1, first_round=1)
    assert told == ["every prompt has its answer; the target makes up more"]


def test_system_turns_of_a_log_reach_the_target(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    tokenizer = Tokenizer(tmp_path / "target")
    store = RecordStore(tmp_path / "records")
    own = (SYSTEM, *user_turn("Why?"))
    sample(settings(tmp_path, (own, *PROMPTS[:3])), store, rounds=1)
    prefix = tuple(store.prefix().tolist())
    assert len(prefix) == 1
    expected = tuple(tokenizer.encode_chat(own, continue_final_message=False))
    assert expected in [prefix + one for one in asked(store)]
    # A run without them goes on behind the prefix that is there.
    sample(settings(tmp_path, PROMPTS), store, rounds=1, first_round=1)
    assert len(list(store.texts())) == 8


def test_system_turns_cannot_join_texts_behind_a_longer_prefix(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    frame = ChatFrame.of(Tokenizer(tmp_path / "target"))
    assert len(frame.before) > 2
    store = RecordStore(tmp_path / "records")
    sample(settings(tmp_path, PROMPTS), store, rounds=1)
    is_refused(settings(tmp_path, ((SYSTEM, *user_turn("Why?")),)), store, "system turns of their own", first_round=1)


def test_shards_behind_different_prefixes_are_refused(tmp_path: Path) -> None:
    text = LabelledText(
        ids=torch.tensor([1, 2, 3], dtype=torch.int32),
        kind=torch.tensor([TokenKind.PROMPT, TokenKind.ANSWER, TokenKind.END], dtype=torch.int8),
        top_ids=torch.zeros(3, 1, dtype=torch.int32),
        top_logp=torch.zeros(3, 1),
        hidden=torch.zeros(3, 2),
        prompt_class=PromptClass.GIVEN,
        temperature=0.0,
    )
    store = RecordStore(tmp_path)
    for prefix in (torch.tensor([7, 8]), torch.tensor([7])):
        store.append([text], prefix)
    assert asked(store) == [(1, 2), (1, 2)]
    with pytest.raises(ConfigError, match=r"s0001\.safetensors: these texts stand behind another prefix"):
        list(store.texts())


def test_what_the_template_refuses_is_counted(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    tokenizer = Tokenizer(tmp_path / "target")
    other = tokenizer.encode_chat(PROMPTS[0], continue_final_message=False)
    queue = PromptQueue(PROMPTS[:3], tokenizer, prefix=[other[0] + 1], max_tokens=100, asked=(), seed=0)
    assert queue.take(9) == []
    assert (queue.num_refused, queue.num_too_long) == (3, 0)
