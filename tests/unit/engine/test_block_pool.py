"""The pool against a model of it: references, order of reuse, and what is findable."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.block_pool import BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Model: one list of references, the free blocks in order of reuse, and what each block caches."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[int] = []
        """One entry per reference."""
        self.reuse = list(range(NUM_BLOCKS))
        self.cached: dict[int, bytes] = {}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if count > len(self.reuse):
            assert not self.pool.can_allocate(count)
            with pytest.raises(ValueError, match="blocks wanted"):
                self.pool.allocate(count)
            return
        assert self.pool.can_allocate(count)
        expected, self.reuse = self.reuse[:count], self.reuse[count:]
        assert self.pool.allocate(count) == expected
        for block in expected:
            self.cached.pop(block, None)
        self.held += expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.held)))
        released = data.draw(st.permutations(self.held))[:count]
        self.pool.release(released)
        for block in released:
            self.held.remove(block)
            if block not in self.held:
                # Worthless content goes before everything cached; of cached content the oldest goes first.
                self.reuse.insert(len(self.reuse) if block in self.cached else 0, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, data: st.DataObject, digest: bytes) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.publish(block, digest)
        if block not in self.cached and digest not in self.cached.values():
            self.cached[block] = digest

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.share(block)
        if block in self.reuse:
            self.reuse.remove(block)
        self.held.append(block)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.reuse)
        assert self.pool.usage == pytest.approx(len(set(self.held)) / NUM_BLOCKS)
        for block in range(NUM_BLOCKS):
            assert self.pool.is_free(block) is (block not in self.held)
            assert self.pool.published(block) is (block in self.cached)

    @invariant()
    def exactly_what_is_cached_is_found(self) -> None:
        by_digest = {digest: block for block, digest in self.cached.items()}
        assert {digest: self.pool.find(digest) for digest in by_digest} == by_digest
        assert all(self.pool.find(digest) is None for digest in {b"a", b"b", b"c"} - set(by_digest))

    def teardown(self) -> None:
        self.pool.release(self.held)
        assert self.pool.usage == 0.0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def test_cached_content_is_lost_in_the_order_of_its_release() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.publish(block, bytes([block]))
    pool.release([blocks[1], blocks[3], blocks[0], blocks[2]])
    taken = [pool.allocate(1)[0] for _ in range(4)]
    assert taken == [blocks[3], blocks[1], blocks[0], blocks[2]], "the uncached one, then the oldest first"


def test_what_was_shared_again_is_kept_longest() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    pool.share(blocks[0])
    pool.release([blocks[0]])
    assert pool.allocate(2) == [blocks[1], blocks[2]]
    assert pool.find(bytes([blocks[0]])) == blocks[0]


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks 0"):
        BlockPool(0)
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="already free"):
        pool.release([0])
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not published"):
        pool.share(block)
