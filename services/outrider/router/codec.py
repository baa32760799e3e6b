"""Between text and token ids: the port that the router needs, and the prompt of a request."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.core.errors import InvalidRequest
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.text import Detokenizer

__all__ = ["OFF_LOOP_CHARS", "TextCodec", "encode_prompt", "input_field"]

OFF_LOOP_CHARS = 4096
"""Texts of at least this many characters are tokenized in a thread: other streams go on meanwhile."""

_TURN_CHARS = 16
"""What a chat template writes around each message, about: many empty messages are a long text, too."""


class TextCodec(Protocol):
    """The tokenizer of the served model. Safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this; padding rows of the model are not counted."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenize plain text, without a chat template."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage], *, continue_final_message: bool) -> list[int]:
        """Render a conversation through the model's chat template and tokenize it.

        Opens an assistant turn, or continues the last message. Raises `ValueError` when the
        template refuses the conversation.
        """
        ...

    def detokenizer(self, *, context: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """Make a detokenizer for one sequence (a `core.text.DetokenizerFactory`)."""
        ...


def input_field(request: GenerationRequest) -> str:
    """Name of the field that holds the prompt, for error messages."""
    if request.text is not None:
        return "text"
    return "chat" if request.messages is not None else "token_ids"


async def encode_prompt(request: GenerationRequest, codec: TextCodec) -> tuple[int, ...]:
    """Token ids of a request whose fields are valid. Long texts are tokenized off the event loop.

    Raises `InvalidRequest` when the chat template refuses the conversation.
    """
    if request.token_ids is not None:
        return request.token_ids
    num_chars, encode = _encoding(request, codec)
    try:
        ids = await asyncio.to_thread(encode) if num_chars >= OFF_LOOP_CHARS else encode()
    except ValueError as error:
        raise InvalidRequest(input_field(request), str(error)) from error
    return tuple(ids)


def _encoding(request: GenerationRequest, codec: TextCodec) -> tuple[int, Callable[[], list[int]]]:
    """Characters to tokenize, and the call that does it."""
    if request.text is not None:
        text = request.text
        return len(text), lambda: codec.encode(text)
    messages = request.messages or ()
    return (
        sum(len(one.content) + _TURN_CHARS for one in messages),
        lambda: codec.encode_chat(messages, continue_final_message=request.continue_final_message),
    )
