"""The books of the KV cache against a model of the memory that they describe.

The model keeps what every slot of every block holds: the text up to and including that position.
Whatever mix of operations runs, a sequence must find its own text in its blocks.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engine.sequence_kv import KVCache

Text = tuple[int, ...]

# Few different texts with long common beginnings, so that blocks are shared all the time.
PROMPTS = st.builds(
    lambda head, tail: (*head, *tail),
    st.sampled_from([(), (1,) * 4, (1,) * 8, (1, 1, 1, 1, 2, 2, 2, 2, 2)]),
    st.lists(st.integers(1, 2), min_size=1, max_size=5),
)
DRAFTED = st.lists(st.integers(1, 2), max_size=5)


class KVMachine(RuleBasedStateMachine):
    """Sequences run as the scheduler runs them, over a pool that is too small for them."""

    @initialize(num_blocks=st.integers(4, 12), block_size=st.integers(1, 4), share=st.booleans())
    def start(self, num_blocks: int, block_size: int, share: bool) -> None:
        self.kv = KVCache(num_blocks=num_blocks, block_size=block_size, enable_prefix_cache=share)
        self.num_blocks, self.block_size, self.share = num_blocks, block_size, share
        self.texts: dict[int, list[int]] = {}
        """Committed text of every open sequence."""
        self.memory: dict[tuple[int, int], Text] = {}
        """(block, offset) → text up to and including the token whose KV stands there."""
        self.committed: set[Text] = set()
        """Every text that was ever committed, and all its beginnings."""
        self.digests: dict[bytes, Text] = {}
        self.next_handle = 0

    def note(self, handle: int) -> None:
        text = self.texts[handle]
        self.committed.update(tuple(text[:end]) for end in range(len(text) + 1))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.texts)), label="handle")

    def write(self, handle: int, start: int, tokens: list[int]) -> None:
        """What a forward does: the tokens' KV into the blocks, which nobody else may see."""
        text, table = self.texts[handle], self.kv.block_table(handle)
        for position, token in enumerate(tokens, start=start):
            block = table[position // self.block_size]
            assert not self.kv._pool.published(block), f"published block {block} is written"
            owners = [other for other in self.texts if block in self.kv.block_table(other)]
            assert owners == [handle], f"block {block} of {owners} is written by {handle}"
            drafted = tokens[len(text) - start : position - start] if position > len(text) else []
            self.memory[block, position % self.block_size] = (*text[:position], *drafted, token)

    @rule(text=PROMPTS)
    def open(self, text: Text) -> None:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        hits = self.kv.open(handle, text)
        assert hits % self.block_size == 0
        assert hits < len(text)
        assert self.share or hits == 0
        self.texts[handle] = list(text)
        self.note(handle)

    @rule(text=PROMPTS, spare=st.integers(0, 4))
    def try_open(self, text: Text, spare: int) -> None:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        before = (list(self.kv._pool._free), self.kv.counters.queried_tokens, self.kv.counters.hit_tokens)
        hits = self.kv.try_open(handle, text, spare_tokens=spare)
        if hits is None:
            assert handle not in self.kv
            after = (list(self.kv._pool._free), self.kv.counters.queried_tokens, self.kv.counters.hit_tokens)
            assert after == before, "a refusal must leave no trace"
            return
        self.texts[handle] = list(text)
        self.note(handle)
        assert len(self.kv.block_table(handle)) == -(-len(text) // self.block_size)
        assert self.kv.can_reserve(handle, len(text) + spare)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), chunk=st.integers(1, 6))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        handle = self.pick(data)
        text = self.texts[handle]
        if len(text) - self.kv.computed_len(handle) > 1:
            gained = self.kv.catch_up(handle, text)
            assert self.share or gained == 0
        start = self.kv.computed_len(handle)
        end = min(start + chunk, len(text))
        if not self.kv.can_reserve(handle, end):
            self.preempt(handle)
            return
        self.kv.reserve(handle, end)
        self.write(handle, start, text[start:end])
        self.kv.advance(handle, text, end)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), drafted=DRAFTED, accepted=st.integers(0, 5), token=st.integers(1, 2))
    def verify(self, data: st.DataObject, drafted: list[int], accepted: int, token: int) -> None:
        """One round: the last token and a block go in; some of it and one more token are committed."""
        handle = self.pick(data)
        text = self.texts[handle]
        if len(text) - self.kv.computed_len(handle) != 1:
            return
        if not self.kv.can_reserve(handle, len(text) + len(drafted)):
            drafted = []
        if not self.kv.can_reserve(handle, len(text)):
            self.preempt(handle)
            return
        self.kv.reserve(handle, len(text) + len(drafted))
        self.write(handle, len(text) - 1, [text[-1], *drafted])
        accepted = min(accepted, len(drafted))
        text += [*drafted[:accepted], token]
        self.note(handle)
        self.kv.advance(handle, text, len(text) - 1)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        computed = self.kv.computed_len(handle)
        length = data.draw(st.integers(0, computed + 2), label="length")
        left = self.kv.truncate(handle, length)
        assert left == self.kv.computed_len(handle)
        assert min(length, computed) - self.block_size < left <= min(length, computed)
        if not self.share:
            assert left == min(length, computed), "without a cache nothing more than asked for is lost"

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.preempt(self.pick(data))

    def preempt(self, handle: int) -> None:
        del self.texts[handle]
        self.kv.close(handle)
        assert handle not in self.kv

    @invariant()
    def every_sequence_finds_its_own_text(self) -> None:
        for handle, text in self.texts.items():
            table = self.kv.block_table(handle)
            for position in range(self.kv.computed_len(handle)):
                slot = table[position // self.block_size], position % self.block_size
                assert self.memory[slot] == tuple(text[: position + 1])

    @invariant()
    def no_block_is_leaked_or_owned_twice(self) -> None:
        owners: Counter[int] = Counter()
        for handle in self.texts:
            table = self.kv.block_table(handle)
            assert len(set(table)) == len(table)
            owners.update(table)
        assert self.kv.num_free_blocks == self.num_blocks - len(owners)
        assert self.kv.usage == pytest.approx(len(owners) / self.num_blocks)
        for block in range(self.num_blocks):
            assert self.kv._pool._references[block] == owners[block]
            assert self.kv._pool.is_free(block) is (block not in owners)
            assert owners[block] <= 1 or self.kv._pool.published(block), "only published blocks are shared"

    @invariant()
    def only_committed_text_is_published(self) -> None:
        for block, digest in self.kv._pool._digest_of.items():
            text = self.memory[block, self.block_size - 1]
            assert text in self.committed
            assert len(text) % self.block_size == 0
            for offset in range(self.block_size):
                assert self.memory[block, offset] == text[: len(text) - self.block_size + 1 + offset]
            assert self.digests.setdefault(digest, text) == text, "one digest for two texts"
        assert len(set(self.digests.values())) == len(self.digests), "two digests for one text"

    def teardown(self) -> None:
        for handle in list(getattr(self, "texts", ())):
            self.preempt(handle)
        if hasattr(self, "kv"):
            assert self.kv.usage == 0.0
            assert len(self.kv) == 0


TestKV = KVMachine.TestCase
TestKV.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def fill(kv: KVCache, handle: int, text: list[int]) -> int:
    """Run a text's whole prefill; return its hits."""
    hits = kv.open(handle, text)
    kv.reserve(handle, len(text))
    kv.advance(handle, text, len(text))
    return hits


def text_of(start: int, length: int = 10) -> list[int]:
    return list(range(start, start + length))


def test_a_replayed_prompt_is_found_up_to_its_last_token() -> None:
    kv = KVCache(num_blocks=16, block_size=4)
    assert fill(kv, 1, text_of(0)) == 0
    assert fill(kv, 2, text_of(100)) == 0
    kv.close(1)
    kv.close(2)
    assert kv.open(3, text_of(0)) == 8
    assert kv.open(4, text_of(0, 8)) == 4, "the last token is computed again: its logits are needed"
    assert (kv.counters.queried_tokens, kv.counters.hit_tokens) == (10 + 10 + 10 + 8, 8 + 4)


def test_a_different_beginning_hides_an_equal_block() -> None:
    kv = KVCache(num_blocks=16, block_size=2)
    fill(kv, 1, [1, 2, 3, 4, 5])
    assert kv.open(2, [9, 9, 3, 4, 5]) == 0
    assert kv.open(3, [1, 2, 9, 9, 5]) == 2


def test_the_least_recently_used_text_is_lost_first_and_from_its_end() -> None:
    kv = KVCache(num_blocks=6, block_size=4)
    fill(kv, 1, text_of(0, 9))
    fill(kv, 2, text_of(100, 9))
    kv.close(1)
    kv.close(2)
    # Two blocks held nothing worth keeping, and a third has to come from the older text.
    kv.open(3, [7])
    kv.reserve(3, 12)
    assert kv.open(4, text_of(0, 9)) == 4, "the beginning of the older text is still of use"
    assert kv.open(5, text_of(100, 9)) == 8


def test_use_renews_a_text() -> None:
    kv = KVCache(num_blocks=6, block_size=4)
    for handle, start in ((1, 0), (2, 100)):
        fill(kv, handle, text_of(start, 9))
    kv.close(1)
    kv.close(2)
    kv.open(3, text_of(0, 9))
    kv.close(3)
    kv.open(4, [7])
    kv.reserve(4, 16)
    assert kv.open(5, text_of(100, 9)) == 0
    assert kv.open(6, text_of(0, 9)) == 8


def test_truncation_through_a_published_block_gives_it_back_whole() -> None:
    kv = KVCache(num_blocks=8, block_size=4)
    fill(kv, 1, text_of(0, 9))
    published = kv.block_table(1)[1]
    assert kv.truncate(1, 6) == 4
    kv.reserve(1, 8)
    assert kv.block_table(1)[1] != published or not kv._pool.published(published)
    kv.advance(1, [0, 1, 2, 3, 50, 51, 52, 53], 8)
    assert kv.open(2, text_of(0, 9)) == 8, "others still find the old text"
    assert kv.open(3, [0, 1, 2, 3, 50, 51, 52, 53, 54]) == 8


def test_truncation_inside_an_unpublished_block_keeps_it() -> None:
    kv = KVCache(num_blocks=8, block_size=4)
    fill(kv, 1, text_of(0, 7))
    table = list(kv.block_table(1))
    assert kv.truncate(1, 6) == 6
    assert list(kv.block_table(1)) == table


def test_equal_prompts_that_arrive_together_share_what_the_first_computes() -> None:
    kv = KVCache(num_blocks=16, block_size=4)
    text = text_of(0, 14)
    for handle in (1, 2):
        assert kv.open(handle, text) == 0
        kv.reserve(handle, 14)
    assert kv.next_block_digest(1, text) == kv.next_block_digest(2, text) is not None
    kv.advance(2, text, 3)  # in the middle of its own first block
    kv.advance(1, text, 9)
    used = kv.usage
    assert kv.catch_up(2, text) == 8 - 3
    assert kv.computed_len(2) == 8
    assert kv.usage == used - 2 / 16
    assert kv.block_table(1)[:2] == kv.block_table(2)[:2]
    assert kv.catch_up(2, text) == 0
    assert kv.counters.hit_tokens == 5


def test_a_cached_block_that_is_taken_over_is_free_no_longer() -> None:
    kv = KVCache(num_blocks=3, block_size=4)
    fill(kv, 1, text_of(0, 9))
    kv.close(1)
    assert kv.num_free_blocks == 3
    assert kv.try_open(2, text_of(0, 9), spare_tokens=4) is None
    assert kv.try_open(2, text_of(0, 9), spare_tokens=3) == 8
    assert kv.num_free_blocks == 0


def test_without_a_prefix_cache_nothing_is_found() -> None:
    kv = KVCache(num_blocks=8, block_size=4, enable_prefix_cache=False)
    fill(kv, 1, text_of(0))
    kv.close(1)
    assert fill(kv, 2, text_of(0)) == 0
    assert kv.next_block_digest(2, text_of(0)) is None
    assert kv.counters.queried_tokens == 0


def test_misuse_is_refused() -> None:
    kv = KVCache(num_blocks=2, block_size=4)
    kv.open(1, [1])
    with pytest.raises(ValueError, match="handle 1 is already open"):
        kv.open(1, [1])
    assert not kv.can_reserve(1, 9)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        kv.reserve(1, 9)
    kv.reserve(1, 4)
    kv.advance(1, [1, 2, 3], 3)
    for length in (2, 5):
        with pytest.raises(ValueError, match=f"from 3 to {length}"):
            kv.advance(1, [1, 2, 3], length)


def test_a_fork_borrows_full_blocks_and_copies_the_one_that_is_cut() -> None:
    kv = KVCache(num_blocks=8, block_size=4)
    fill(kv, 1, text_of(0, 11))
    parent = list(kv.block_table(1))
    ((source, copy),) = kv.fork(1, 2, 10)
    assert source == parent[2]
    assert list(kv.block_table(2)) == [*parent[:2], copy]
    assert copy not in parent
    assert kv.computed_len(2) == 10
    assert kv.usage == 4 / 8
    kv.close(2)
    assert kv.usage == 3 / 8
    kv.close(1)
    assert kv.usage == 0.0


def test_a_sequence_takes_over_the_fork_that_came_true() -> None:
    kv = KVCache(num_blocks=8, block_size=4)
    fill(kv, 1, text_of(0, 11))
    front = list(kv.block_table(1))[:2]
    kv.fork(1, 2, 9)
    kv.reserve(2, 14)
    own = list(kv.block_table(2))[2:]
    kv.adopt(1, 2)
    assert 2 not in kv
    assert list(kv.block_table(1)) == [*front, *own]
    assert kv.computed_len(1) == 9
    assert kv.truncate(1, 5) == 4, "it is an ordinary sequence again"
    kv.close(1)
    assert kv.usage == 0.0


def test_what_a_fork_borrows_is_not_given_away() -> None:
    kv = KVCache(num_blocks=8, block_size=4, enable_prefix_cache=False)
    fill(kv, 1, text_of(0, 8))
    assert kv.fork(1, 2, 8) == kv.fork(1, 3, 4) == []
    for change in (lambda: kv.close(1), lambda: kv.truncate(1, 6)):
        with pytest.raises(ValueError, match="handle 1 has open forks"):
            change()
    with pytest.raises(ValueError, match="handle 2 is not the only fork of 1"):
        kv.adopt(1, 2)
    with pytest.raises(ValueError, match="handle 1 is not the only fork of 2"):
        kv.adopt(2, 1)
    kv.close(3)
    kv.close(2)
    assert kv.truncate(1, 6) == 6
    kv.close(1)
    assert kv.usage == 0.0
