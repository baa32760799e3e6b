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
    parent: "_SequenceBlocks | None" = None
    """Of a fork: whom its first blocks belong to."""
    num_borrowed: int = 0
    """Of a fork: blocks at the front that are its parent's."""
    num_forks: int = 0
    """Open forks that borrow blocks of this sequence."""


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
        return self._start(handle, token_ids, self._cached(token_ids))

    def try_open(self, handle: int, token_ids: Sequence[int], *, spare_tokens: int) -> int | None:
        """`open` and reserve blocks for all of `token_ids`, if `spare_tokens` more would fit too.

        Returns None otherwise; then nothing has changed, the order of eviction included.
        """
        cached = self._cached(token_ids)
        revived = sum(self._pool.is_free(block) for block, _ in cached)
        missing = self._num_blocks(len(token_ids) + spare_tokens) - len(cached)
        if not self._pool.can_allocate(missing + revived):
            return None
        computed = self._start(handle, token_ids, cached)
        self.reserve(handle, len(token_ids))
        return computed

    def catch_up(self, handle: int, token_ids: Sequence[int]) -> int:
        """Take over the blocks that others have published since; return the tokens gained.

        For a sequence in the middle of its prefill, so that equal prompts that arrive together are
        computed once. Gives back the blocks that were reserved for the same positions.
        """
        state = self._sequences[handle]
        first = len(state.digests)
        found = self._cached(token_ids, after=state.digests)
        if not found:
            return 0
        before = state.computed_len
        for index, (block, digest) in enumerate(found, start=first):
            self._pool.share(block)
            state.digests.append(digest)
            if index < len(state.blocks):
                self._pool.release([state.blocks[index]])
                state.blocks[index] = block
            else:
                state.blocks.append(block)
        state.computed_len = len(state.digests) * self.block_size
        gained = state.computed_len - before
        self.counters.hit_tokens += gained
        return gained

    def next_block_digest(self, handle: int, token_ids: Sequence[int]) -> bytes | None:
        """What the first block that is not full yet will be published under.

        None when `token_ids` do not fill it or nothing is shared: equal answers of two sequences
        mean that one of them could wait for the other's block.
        """
        digests = self._sequences[handle].digests
        if not self._share or (len(digests) + 1) * self.block_size >= len(token_ids):
            return None
        return self._digest(digests, token_ids)

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
            digest = self._digest(state.digests, token_ids)
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
        if state.num_forks:
            raise ValueError(f"handle {handle} has open forks")
        keep = -(-length // self.block_size)
        cut = state.blocks[keep - 1] if length % self.block_size else None
        if cut is not None and self._pool.published(cut):
            keep -= 1
        self._pool.release(reversed(state.blocks[keep:]))
        del state.blocks[keep:]
        del state.digests[length // self.block_size :]
        state.computed_len = min(length, keep * self.block_size)
        return state.computed_len

    def can_fork(self, parent: int, length: int, child_length: int) -> bool:
        """Whether a fork at `length` and blocks for positions below `child_length` can be had."""
        own = -(-child_length // self.block_size) - length // self.block_size
        return parent in self._sequences and self._pool.can_allocate(max(0, own))

    def fork(self, parent: int, child: int, length: int) -> list[tuple[int, int]]:
        """Start `child` with the parent's KV below `length`, drafted tokens included.

        Full blocks are borrowed: while the child is open the parent must neither be cut nor closed, nor
        written below `length`. The block that the cut goes through is copied: returns (source,
        destination) pairs that the engine has to copy before the child's first forward.
        """
        if child in self._sequences:
            raise ValueError(f"handle {child} is already open")
        state = self._sequences[parent]
        full = length // self.block_size
        copies = []
        blocks = state.blocks[:full]
        if length % self.block_size:
            copies = [(state.blocks[full], self._pool.allocate(1)[0])]
            blocks.append(copies[0][1])
        state.num_forks += 1
        self._sequences[child] = _SequenceBlocks(
            blocks=blocks,
            computed_len=min(state.computed_len, length),
            digests=state.digests[:full],
            parent=state,
            num_borrowed=full,
        )
        return copies

    def adopt(self, parent: int, child: int) -> None:
        """The parent takes over the KV of its only open fork in place of its own; the fork is closed."""
        state, fork = self._sequences[parent], self._sequences[child]
        if fork.parent is not state or state.num_forks != 1:
            raise ValueError(f"handle {child} is not the only fork of {parent}")
        del self._sequences[child]
        self._pool.release(reversed(state.blocks[fork.num_borrowed :]))
        state.blocks[fork.num_borrowed :] = fork.blocks[fork.num_borrowed :]
        state.digests, state.computed_len, state.num_forks = fork.digests, fork.computed_len, 0

    def close(self, handle: int) -> None:
        """Release everything of a sequence.

        The end of the text goes first: a block is of use only while all blocks before it are cached,
        so the cache has to lose a text from its end.
        """
        state = self._sequences[handle]
        if state.num_forks:
            raise ValueError(f"handle {handle} has open forks")
        del self._sequences[handle]
        if state.parent is not None:
            state.parent.num_forks -= 1
        self._pool.release(reversed(state.blocks[state.num_borrowed :]))

    def _num_blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _missing(self, handle: int, length: int) -> int:
        return max(0, self._num_blocks(length) - len(self._sequences[handle].blocks))

    def _start(self, handle: int, token_ids: Sequence[int], cached: Sequence[tuple[int, bytes]]) -> int:
        if handle in self._sequences:
            raise ValueError(f"handle {handle} is already open")
        state = _SequenceBlocks()
        for block, digest in cached:
            self._pool.share(block)
            state.blocks.append(block)
            state.digests.append(digest)
        state.computed_len = len(cached) * self.block_size
        self._sequences[handle] = state
        if self._share:
            self.counters.queried_tokens += len(token_ids)
            self.counters.hit_tokens += state.computed_len
        return state.computed_len

    def _cached(self, token_ids: Sequence[int], *, after: Sequence[bytes] = ()) -> list[tuple[int, bytes]]:
        """Published blocks of this text behind the blocks of `after`, up to the first gap."""
        found: list[tuple[int, bytes]] = []
        if not self._share:
            return found
        digests = list(after)
        while (len(digests) + 1) * self.block_size < len(token_ids):
            digests.append(self._digest(digests, token_ids))
            block = self._pool.find(digests[-1])
            if block is None:
                break
            found.append((block, digests[-1]))
        return found

    def _digest(self, before: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
        """Chain digest of the block behind those of `before`.

        Equal exactly when all tokens up to the end of this block are equal.
        """
        start = len(before) * self.block_size
        parent = before[-1] if before else b""
        chunk = array("I", token_ids[start : start + self.block_size])
        return hashlib.blake2b(parent + chunk.tobytes(), digest_size=16).digest()
