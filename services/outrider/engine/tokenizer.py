"""The tokenizer of a model: text to ids and back, and whether two models share a vocabulary.

Loads no torch: the router needs a tokenizer and no model. It reads `tokenizer.json`, which every
supported architecture has; the class that transformers would pick by architecture is not asked,
because picking it loads torch.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage
from outrider.engine.detokenizer import IncrementalDetokenizer
from outrider.engine.token_bytes import TokenByteTable
from outrider.engine.vocabulary import Vocabulary

__all__ = ["Tokenizer"]


class Tokenizer:
    """Implements `router.codec.TextCodec`. Immutable; may be used from several threads."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer in a model folder. Raises `ConfigError` when there is none."""
        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer: cannot load the one in {folder}: {error}") from error
        self._backend = self._tokenizer.backend_tokenizer
        self._vocabulary = Vocabulary(tokens=_tokens_by_id(self._backend))
        self._eos_token_ids = _eos_token_ids(folder, self._tokenizer)
        self._bytes = TokenByteTable(self._backend)

    @property
    def vocab_size(self) -> int:
        """Ids are below this; padding rows of the model are not counted."""
        return len(self._vocabulary.tokens)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, ascending."""
        return self._eos_token_ids

    @property
    def vocabulary(self) -> Vocabulary:
        """Tokens, special ones and merges, to be compared with another model's. Takes up to a second."""
        return replace(self._vocabulary, special_ids=_special_ids(self._backend), merges=_merges(self._backend))

    def fingerprint(self) -> bytes:
        """Digest of the vocabulary: equal if and only if every id stands for the same token."""
        return self._vocabulary.fingerprint()

    def encode(self, text: str) -> list[int]:
        """Tokenize plain text, with the special tokens that the model's tokenizer adds by itself."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[ChatMessage], *, continue_final_message: bool) -> list[int]:
        """Render a conversation through the model's chat template and tokenize it.

        Opens an assistant turn, or continues the last message. Raises `ValueError` when there is
        no template or the template refuses the conversation.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": str(one.role), "content": one.content} for one in messages],
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        # Templates write special tokens themselves; the tokenizer must not add them again.
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence; bytes that are no valid UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; not always whole characters."""
        return self._bytes.token_bytes(token_id)

    def detokenizer(self, *, context: Sequence[int], skip_special_tokens: bool) -> IncrementalDetokenizer:
        """Make a detokenizer for one sequence (a `core.text.DetokenizerFactory`)."""
        return IncrementalDetokenizer(self._backend, context=context, skip_special_tokens=skip_special_tokens)


def _tokens_by_id(backend: Any) -> tuple[str | None, ...]:
    by_id = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    return tuple(by_id.get(token_id) for token_id in range(max(by_id) + 1))


def _special_ids(backend: Any) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _merges(backend: Any) -> tuple[str, ...]:
    merges = json.loads(backend.to_str())["model"].get("merges") or ()
    # Older files write a pair as one string.
    return tuple(one if isinstance(one, str) else " ".join(one) for one in merges)


def _eos_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    # Chat models often end a turn with another token than a text; generation_config lists both.
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))
