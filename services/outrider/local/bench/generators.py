"""The generators that a benchmark compares: a door of ours, and transformers."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage
from outrider.local.bench.load import Door, requests_of, run_load
from outrider.local.bench.plan import Mode, Piece
from outrider.local.bench.records import Record, Run

__all__ = ["ChatEncoder", "Generators", "Peer", "PeerText"]


class PeerText(Protocol):
    """One text of a peer and when its tokens came (`engine.peer.PeerAnswer`)."""

    @property
    def started_s(self) -> float:
        """When it began."""
        ...

    @property
    def messages(self) -> tuple[tuple[float, int], ...]:
        """(time, tokens) of every step."""
        ...

    @property
    def ended_s(self) -> float:
        """When it was over."""
        ...


class Peer(Protocol):
    """Another engine on the same model, one request at a time (`engine.peer.TransformersPeer`)."""

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int, assisted: bool
    ) -> PeerText:
        """Generate one text; blocks."""
        ...


class ChatEncoder(Protocol):
    """The tokenizer, as far as a peer needs it."""

    def encode_chat(self, messages: Sequence[ChatMessage], *, continue_final_message: bool) -> list[int]:
        """Token ids of a conversation."""
        ...


class Generators:
    """Runs pieces of a plan in any mode. A context manager, for the peer's thread."""

    def __init__(self, door: Door, *, max_tokens: int, peer: Peer | None = None, codec: ChatEncoder | None = None):
        """`peer` needs `codec`."""
        self._door = door
        self._max_tokens = max_tokens
        self._peer = peer
        self._codec = codec
        # A peer blocks; it takes one request at a time.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="peer")

    def __enter__(self) -> "Generators":
        """Itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._executor.shutdown()

    async def generate(self, mode: Mode, piece: Piece) -> Run:
        """Run one piece. Raises `ConfigError` for a peer's mode without a peer, else `OutriderError`s."""
        if not mode.is_peer:
            requests = requests_of(piece, speculates=mode is Mode.SPECULATIVE, max_tokens=self._max_tokens)
            return await run_load(self._door, piece, requests)
        if self._peer is None or self._codec is None:
            raise ConfigError(f"modes: {mode.value} needs a peer")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, self._peer_run, self._peer, self._codec, piece, mode is Mode.HF_ASSISTED
        )

    def _peer_run(self, peer: Peer, codec: ChatEncoder, piece: Piece, assisted: bool) -> Run:
        records, seconds = [], 0.0
        for number, prompt in enumerate(piece.prompts):
            turn = ChatMessage(role="user", content=prompt.text)
            text = peer.generate(
                codec.encode_chat([turn], continue_final_message=False),
                max_tokens=self._max_tokens,
                temperature=prompt.temperature,
                seed=piece.seed * 1000 + number,
                assisted=assisted,
            )
            records.append(Record(started_s=text.started_s, messages=text.messages))
            seconds += text.ended_s - text.started_s
        return Run(seconds=seconds, records=tuple(records))
