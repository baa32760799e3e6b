"""Which KV blocks each sequence owns and how far they are filled. Bookkeeping only, no tensors."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.block_pool import BlockPool

__all__ = ["KVCache", "PrefixCacheCounters"]


@dataclass(slots=True)
class PrefixCacheCounters:
    """Raw counters; hit rate = hit_tokens / queried_tokens."""

    queried_tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True)
class _SequenceBlocks:
    blocks: list[int] = field(default_factory=list)
    computed_len: int = 0
    digests: list[bytes] = field(default_factory=list)
    """Chain digests of the full computed blocks at the front."""


class KVCache:
    """KV of all sequences of one engine: `computed_len` and allocated blocks are separate numbers.

    A handle is any integer that the caller keeps unique while it is open.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.counters = PrefixCacheCounters()
        self._pool = BlockPool(num_blocks)
        self._share = enable_prefix_cache
        self._sequences: dict[int, _SequenceBlocks] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 … 1."""
        return self._pool.usage

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be reserved now."""
        return self._pool.num_free

    @property
    def capacity_tokens(self) -> int:
        """Positions that the whole pool holds."""
        return self._pool.num_blocks * self.block_size

    def __contains__(self, handle: int) -> bool:
        return handle in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, handle: int, token_ids: Sequence[int]) -> int:
        """Start a sequence; return how many of its tokens are already in the cache.

        Always below len(token_ids): the last token is left to compute, since its logits are needed.
        """
        if handle in self._sequences:
            raise ValueError(f"handle {handle} is already open")
        state = _SequenceBlocks()
        self._sequences[handle] = state
        if not self._share:
            return 0
        self.counters.queried_tokens += len(token_ids)
        for index in range((len(token_ids) - 1) // self.block_size):
            digest = self._digest(state, token_ids, index)
            block = self._pool.find(digest)
            if block is None:
                break
            self._pool.share(block)
            state.blocks.append(block)
            state.digests.append(digest)
        state.computed_len = len(state.blocks) * self.block_size
        self.counters.hit_tokens += state.computed_len
        return state.computed_len

    def computed_len(self, handle: int) -> int:
        """Positions whose KV is valid."""
        return self._sequences[handle].computed_len

    def block_table(self, handle: int) -> Sequence[int]:
        """The sequence's blocks in order. Valid until the next call that changes this sequence."""
        return self._sequences[handle].blocks

    def can_reserve(self, handle: int, length: int) -> bool:
        """Whether blocks for positions below `length` are there or can be allocated."""
        return self._pool.can_allocate(self._missing(handle, length))

    def reserve(self, handle: int, length: int) -> None:
        """Allocate blocks for positions below `length`. Raises `ValueError` when they run out."""
        self._sequences[handle].blocks.extend(self._pool.allocate(self._missing(handle, length)))

    def advance(self, handle: int, token_ids: Sequence[int], length: int) -> None:
        """Declare KV valid below `length`; all of token_ids[:length] must be committed text.

        Publishes the blocks that became full.
        """
        state = self._sequences[handle]
        if not state.computed_len <= length <= len(state.blocks) * self.block_size:
            raise ValueError(f"cannot advance from {state.computed_len} to {length}")
        state.computed_len = length
        if not self._share:
            return
        for index in range(len(state.digests), length // self.block_size):
            digest = self._digest(state, token_ids, index)
            state.digests.append(digest)
            self._pool.publish(state.blocks[index], digest)

    def truncate(self, handle: int, length: int) -> int:
        """Forget KV from position `length` on; return the computed length that remains.

        It can be less than `length`: a published block is never written again, so one that the
        cut goes through is given back as a whole.
        """
        state = self._sequences[handle]
        if length >= state.computed_len:
            return state.computed_len
        keep = -(-length // self.block_size)
        if length % self.block_size and self._pool.published(state.blocks[keep - 1]):
            keep -= 1
        self._pool.release(state.blocks[keep:])
        del state.blocks[keep:]
        del state.digests[length // self.block_size :]
        state.computed_len = min(length, keep * self.block_size)
        return state.computed_len

    def close(self, handle: int) -> None:
        """Release everything of a sequence."""
        self._pool.release(self._sequences.pop(handle).blocks)

    def _missing(self, handle: int, length: int) -> int:
        return max(0, -(-length // self.block_size) - len(self._sequences[handle].blocks))

    def _digest(self, state: _SequenceBlocks, token_ids: Sequence[int], index: int) -> bytes:
        """Chain digest: equal exactly when all tokens up to the end of this block are equal."""
        parent = state.digests[index - 1] if index else b""
        chunk = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return hashlib.blake2b(parent + array("I", chunk).tobytes(), digest_size=16).digest()
