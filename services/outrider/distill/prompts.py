"""What the target is asked: conversations of a file or a log, each of them once over all runs of a stage."""

import itertools
import json
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage
from outrider.engine.tokenizer import Tokenizer

__all__ = ["Conversation", "PromptQueue", "has_own_system_turn", "load_conversations", "user_turn"]

Conversation = tuple[ChatMessage, ...]
"""It ends with what the target is to answer."""

_ASSISTANT, _SYSTEM = "assistant", "system"


def user_turn(text: str) -> Conversation:
    """A conversation of one user turn."""
    return (ChatMessage(role="user", content=text),)


def load_conversations(path: Path) -> tuple[Conversation, ...]:
    """A `.jsonl` file: on every line an object with a `prompt`, or with `messages` as in a logged chat request.

    Other keys mean nothing here. Of a conversation that ends with answers, these are left out: the target
    answers anew. Raises `ConfigError` naming file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"prompts: {path}: {getattr(error, 'strerror', None) or error}") from error
    conversations = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                conversations.append(_conversation(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f'prompts: {path}:{number}: neither {{"prompt": "…"}} nor {{"messages": [{{"role", "content"}}]}}: '
                    f"{error!r}"
                ) from error
    if not conversations:
        raise ConfigError(f"prompts: {path} is empty")
    return tuple(conversations)


class PromptQueue:
    """Tokenized prompts in an order that a seed fixes, so that a short run sees some of everything.

    What was asked before, in this run or in one that it resumes, is not asked again; nor is what repeats.
    """

    def __init__(
        self,
        prompts: Sequence[Conversation],
        tokenizer: Tokenizer,
        *,
        prefix: Sequence[int],
        max_tokens: int,
        asked: Collection[tuple[int, ...]],
        seed: int,
    ) -> None:
        """`prefix` stands before every text; `asked` are prompts without it. `max_tokens` bounds a whole prompt."""
        self._tokenizer = tokenizer
        self._prefix = tuple(prefix)
        self._max_tokens = max_tokens
        self._asked = set(asked)
        order = list(prompts)
        random.Random(seed).shuffle(order)
        self._fresh = self._tokenized(order)
        self.num_too_long = 0
        """Prompts left out so far because they have more tokens."""
        self.num_refused = 0
        """Prompts left out so far because the chat template refuses them."""

    def take(self, count: int) -> list[tuple[int, ...]]:
        """The next prompts, at most `count`; none when all have been asked."""
        return list(itertools.islice(self._fresh, count))

    def _tokenized(self, order: Sequence[Conversation]) -> Iterator[tuple[int, ...]]:
        begin = len(self._prefix)
        for conversation in order:
            try:
                ids = tuple(self._tokenizer.encode_chat(conversation, continue_final_message=False))
            except ValueError:
                self.num_refused += 1
                continue
            if len(ids) > self._max_tokens:
                self.num_too_long += 1
            elif ids[:begin] != self._prefix:
                self.num_refused += 1
            elif ids[begin:] not in self._asked:
                self._asked.add(ids[begin:])
                yield ids


def has_own_system_turn(prompts: Sequence[Conversation]) -> bool:
    """Whether some prompt says itself what the template would otherwise write before the first user turn."""
    return any(one.role == _SYSTEM for conversation in prompts for one in conversation)


def _conversation(line: object) -> Conversation:
    if not isinstance(line, dict):
        raise TypeError("not an object")
    if "messages" not in line:
        prompt = line["prompt"]
        if not isinstance(prompt, str):
            raise TypeError("prompt is not a string")
        return user_turn(prompt)
    turns = [ChatMessage(role=_text(turn, "role"), content=_text(turn, "content")) for turn in line["messages"]]
    while turns and turns[-1].role == _ASSISTANT:
        turns.pop()
    if not turns:
        raise ValueError("messages hold nothing to answer")
    return tuple(turns)


def _text(turn: object, key: str) -> str:
    if not isinstance(turn, dict) or not isinstance(turn.get(key), str):
        raise TypeError(f"a message's {key} is not a string")
    value: str = turn[key]
    return value
