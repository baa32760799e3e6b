"""What the target is asked: conversations of a file or a log, each of them once over all runs of a stage."""

import itertools
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage
from outrider.engine.tokenizer import Tokenizer

__all__ = ["Conversation", "ConversationFile", "PromptQueue", "has_own_system_turn", "load_conversations", "user_turn"]

Conversation = tuple[ChatMessage, ...]
"""It ends with what the target is to answer."""

_ASSISTANT, _SYSTEM = "assistant", "system"
_ROLES = {"developer": _SYSTEM}
"""As the HTTP door reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFile:
    """What was read from a file."""

    conversations: tuple[Conversation, ...]
    """At least one."""
    num_refused: int
    """Lines that cannot be read, which are left out: a log also holds what a draft cannot learn from."""
    first_refused: str
    """Where and what the first of them is; empty when there are none."""


def user_turn(text: str) -> Conversation:
    """A conversation of one user turn."""
    return (ChatMessage(role="user", content=text),)


def load_conversations(path: Path) -> ConversationFile:
    """A `.jsonl` file: on every line an object with a `prompt`, or with `messages` as in a logged chat request.

    Other keys mean nothing here. Of a conversation that ends with answers, these are left out: the target
    answers anew. Raises `ConfigError` naming the file, and its first line when none can be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"prompts: {path}: {getattr(error, 'strerror', None) or error}") from error
    conversations, refused = [], []
    # Not splitlines: it also splits at separators that a JSON string may hold as they are, U+2028 among them.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                conversations.append(_conversation(json.loads(line)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                refused.append(
                    f'{path}:{number}: neither {{"prompt": "…"}} nor {{"messages": [{{"role", "content"}}]}}: {error!r}'
                )
    if not conversations:
        raise ConfigError(f"prompts: {refused[0] if refused else f'{path} is empty'}")
    return ConversationFile(
        conversations=tuple(conversations), num_refused=len(refused), first_refused=refused[0] if refused else ""
    )


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
        self._answered = frozenset(asked)
        self._taken: set[tuple[int, ...]] = set()
        order = list(prompts)
        random.Random(seed).shuffle(order)
        self._fresh = self._tokenized(order)
        self.num_too_long = 0
        """Prompts left out so far because they have more tokens."""
        self.num_refused = 0
        """Prompts left out so far because the chat template refuses them."""
        self.num_answered = 0
        """Prompts so far that were given out, or passed over because an earlier run has asked them."""

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
            elif ids[begin:] not in self._taken:
                self._taken.add(ids[begin:])
                self.num_answered += 1
                if ids[begin:] not in self._answered:
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
    turns = [(_role(turn), turn.get("content")) for turn in line["messages"]]
    while turns and turns[-1][0] == _ASSISTANT:
        turns.pop()
    if not turns:
        raise ValueError("messages hold nothing to answer")
    return tuple(ChatMessage(role=role, content=_text(content)) for role, content in turns)


def _role(turn: object) -> str:
    if not isinstance(turn, dict) or not isinstance(role := turn.get("role"), str):
        raise TypeError("a message's role is not a string")
    return _ROLES.get(role, role)


def _text(content: object) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError("a message's content is neither a string nor a list of parts")
    return "".join(_part(part) for part in content)


def _part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(text := part.get("text"), str):
        raise TypeError("a message's content has a part that is no text")
    return text
