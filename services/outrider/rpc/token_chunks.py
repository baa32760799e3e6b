"""Long token lists in pieces: cutting on the sender's side, putting together on the receiver's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.rpc.enums import protocol_error
from outrider.v1 import speculation_pb2 as pb

__all__ = ["MAX_CHUNK_TOKENS", "AssembledText", "TextAssembler", "token_chunks"]

MAX_CHUNK_TOKENS = 4096


def token_chunks(token_ids: Sequence[int], first_position: int) -> Iterator[pb.TokenChunk]:
    """Cut a list into chunks of at most `MAX_CHUNK_TOKENS` ids; an empty list is one empty chunk."""
    starts = range(0, max(len(token_ids), 1), MAX_CHUNK_TOKENS)
    for index, start in enumerate(starts):
        yield pb.TokenChunk(
            chunk_index=index,
            last=index == len(starts) - 1,
            first_position=first_position + start,
            token_ids=token_ids[start : start + MAX_CHUNK_TOKENS],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledText:
    """A complete list, and the message that opened it when it belongs to an OpenSequence."""

    first_position: int
    token_ids: tuple[int, ...]
    opening: pb.OpenSequence | None


@dataclass(slots=True, kw_only=True)
class _Partial:
    first_position: int
    opening: pb.OpenSequence | None
    token_ids: list[int] = field(default_factory=list)
    next_index: int = 0


class TextAssembler:
    """Puts the chunks of one link together, one unfinished list per sequence.

    `max_tokens` bounds what all unfinished lists hold together, so that a peer cannot fill memory.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._partials: dict[int, _Partial] = {}

    def open(self, message: pb.OpenSequence) -> AssembledText | None:
        """Take the first chunk of an OpenSequence; None while chunks are missing."""
        self.forget(message.handle)
        if message.text.chunk_index != 0 or message.text.first_position != 0:
            raise protocol_error("open_sequence.text", "does not start at chunk 0 and position 0")
        self._partials[message.handle] = _Partial(first_position=0, opening=message)
        return self._add(message.handle, message.text, "open_sequence.text")

    def resync(self, message: pb.Resync) -> AssembledText | None:
        """Take a chunk of a Resync, or a further one of an OpenSequence; None while chunks are missing."""
        chunk = message.text
        if chunk.chunk_index == 0:
            self._partials[message.handle] = _Partial(first_position=chunk.first_position, opening=None)
        return self._add(message.handle, chunk, "resync.text")

    def forget(self, handle: int) -> None:
        """Drop what has arrived of a sequence's unfinished list."""
        self._partials.pop(handle, None)

    def _add(self, handle: int, chunk: pb.TokenChunk, name: str) -> AssembledText | None:
        """Append a chunk. Raises `ProtocolError`, and forgets the list, when one is missing or too many."""
        partial = self._partials.pop(handle, None)
        if partial is None or chunk.chunk_index != partial.next_index:
            expected = 0 if partial is None else partial.next_index
            raise protocol_error(f"{name}.chunk_index", f"{chunk.chunk_index} arrived where {expected} is next")
        if chunk.first_position != partial.first_position + len(partial.token_ids):
            raise protocol_error(f"{name}.first_position", f"{chunk.first_position} does not follow the last chunk")
        held = sum(len(one.token_ids) for one in self._partials.values())
        if held + len(partial.token_ids) + len(chunk.token_ids) > self._max_tokens:
            raise protocol_error(f"{name}.token_ids", f"unfinished lists exceed {self._max_tokens} tokens")
        partial.token_ids.extend(chunk.token_ids)
        partial.next_index += 1
        if chunk.last:
            return AssembledText(
                first_position=partial.first_position, token_ids=tuple(partial.token_ids), opening=partial.opening
            )
        self._partials[handle] = partial
        return None
