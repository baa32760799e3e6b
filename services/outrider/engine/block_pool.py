"""KV blocks of one engine: reference counts, and a cache of full blocks by what they hold.

Only full blocks of committed tokens are ever published, so a block that someone shares is never
written again and needs no copy-on-write.
"""

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block ids. A released block keeps its content until it is handed out again (LRU)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks {num_blocks} is below 1")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Oldest first: blocks nobody references, with or without cached content.
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, cached content included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are referenced, 0 … 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each, forgetting what the oldest of them cached.

        Raises `ValueError` when too few are free: ask `can_allocate` first.
        """
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
            self._references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, in order: of cached content, what is released first goes first."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is already free")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    # Nothing worth keeping: reuse it before any block with cached content.
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """Offer a full block of committed tokens under the digest of its whole prefix.

        The first block of a digest stays the published one.
        """
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def published(self, block: int) -> bool:
        """Whether others may share this block."""
        return block in self._digest_of

    def is_free(self, block: int) -> bool:
        """Whether nobody references this block."""
        return block in self._free

    def find(self, digest: bytes) -> int | None:
        """The block that holds this prefix, if it is cached. Takes no reference."""
        return self._block_of.get(digest)

    def share(self, block: int) -> None:
        """Add a reference to a published block."""
        if not self.published(block):
            raise ValueError(f"block {block} is not published")
        self._free.pop(block, None)
        self._references[block] += 1
