"""What is computed when, and what gives way: batches, prefill, fairness, room, idleness."""

from dataclasses import replace

import pytest
from tests.unit.draft.bench import Bench, Peer, hello

from outrider.core.errors import ConfigError
from outrider.core.link import (
    Busy,
    CloseSequence,
    DraftProposal,
    DraftStats,
    Drain,
    Evicted,
    OpenAck,
    OpenNack,
    RefusalReason,
)
from outrider.draft.config import DraftConfig, DraftIdentity

PROMPT = [5, 7, 11, 2, 9, 30, 41]
LONG = [(7 * i + 3) % 64 for i in range(100)]


def owing_links(bench: Bench, ks_by_link: dict[int, dict[int, int]]) -> list[Peer]:
    """Sequences with different prompts that each wait for a block; the batches so far are forgotten."""
    peers = [bench.peer(link_id) for link_id in ks_by_link]
    for peer in peers:
        for handle in ks_by_link[peer.link_id]:
            peer.open(handle, [*PROMPT, handle, peer.link_id])
    for peer in peers:
        peer.judge(*(peer.row(handle, 3, k=k) for handle, k in ks_by_link[peer.link_id].items()))
    bench.engine.batches.clear()
    return peers


def owing(bench: Bench, ks: dict[int, int]) -> Peer:
    """The same on one link."""
    return owing_links(bench, {1: ks})[0]


def test_one_batch_for_all_and_it_shrinks() -> None:
    bench = Bench()
    peer = owing(bench, {1: 4, 2: 1, 3: 2})
    assert peer.received == []
    bench.step()
    assert bench.engine.batches == [[1, 1, 1], [1, 1], [1], [1]]
    proposals = peer.take(DraftProposal)
    assert {one.handle: len(one.proposal) for one in proposals} == {1: 4, 2: 1, 3: 2}
    for one in proposals:
        assert list(one.proposal.token_ids) == peer.oracle(one.handle, len(one.proposal))


def test_after_a_full_accept_two_rows_are_run() -> None:
    """The draft's own last token has no KV yet, nor has the bonus token."""
    bench = Bench()
    peer = owing(bench, {1: 3})
    block = peer.blocks()[1]
    bench.engine.batches.clear()
    peer.judge(peer.row(1, 9, k=3, judged=block, num_accepted=3))
    bench.step()
    assert bench.engine.batches == [[2], [1], [1]]


def test_off_keeps_the_text_and_costs_no_forward() -> None:
    bench = Bench()
    peer = owing(bench, {1: 0})
    for token_id in range(10):
        peer.judge(peer.row(1, token_id))
    bench.settle()
    assert bench.engine.batches == []
    peer.judge(peer.row(1, 12, k=2))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 2)
    assert bench.engine.batches == [[12], [1]]


def test_all_blocks_of_a_link_travel_in_one_message() -> None:
    bench = Bench()
    first, second = owing_links(bench, {1: {1: 2, 2: 2}, 2: {1: 2}})
    outbound = bench.drafter.step()
    assert [(link_id, [type(one) for one in events]) for link_id, events in outbound] == [
        (first.link_id, [DraftProposal, DraftProposal]),
        (second.link_id, [DraftProposal]),
    ]


def test_prefill_goes_in_chunks_between_rounds() -> None:
    bench = Bench(prefill_chunk_tokens=20)
    peer = owing(bench, {1: 2})
    peer.say(peer.opening(2, LONG))
    kinds = []
    while not peer.take(OpenAck):
        bench.step()
        blocks = {one.handle: one.proposal for one in peer.take(DraftProposal)}
        kinds.append("round" if blocks else "chunk")
        if blocks:
            assert list(blocks[1].token_ids) == peer.oracle(1, 2)
            peer.judge(peer.row(1, 9, k=2, judged=blocks[1], num_accepted=1))
    assert kinds == ["round", "chunk"] * 5
    assert max(len(rows) for rows in bench.engine.batches) == 1
    assert max(rows[0] for rows in bench.engine.batches) == 20
    peer.judge(peer.row(2, 3, k=4))
    assert list(peer.blocks()[2].token_ids) == peer.oracle(2, 4)


def test_a_common_beginning_is_computed_once() -> None:
    bench = Bench(prefill_chunk_tokens=512)
    peer = bench.peer()
    peer.say(*(peer.opening(handle, [*LONG, handle]) for handle in (1, 2, 3)))
    bench.settle()
    assert bench.engine.batches == [[101], [1], [1]]
    peer.judge(*(peer.row(handle, 3, k=3) for handle in (1, 2, 3)))
    for handle, block in peer.blocks().items():
        assert list(block.token_ids) == peer.oracle(handle, 3)


def test_links_take_turns_in_prefill() -> None:
    bench = Bench(prefill_chunk_tokens=25)
    first, second = bench.peer(1), bench.peer(2)
    first.say(*(first.opening(handle, [handle, *LONG[:-1]]) for handle in (1, 2, 3)))
    second.say(second.opening(1, [40, *LONG[:-1]]))
    for _ in range(8):
        bench.step()
    assert [one.handle for one in first.take(OpenAck)] == [1]
    assert [one.handle for one in second.take(OpenAck)] == [1]


def test_links_take_turns_in_rounds() -> None:
    bench = Bench(max_round_seqs=2)
    first, second = owing_links(bench, {1: dict.fromkeys(range(1, 7), 1), 2: {1: 1, 2: 1}})
    served = []
    for _ in range(4):
        bench.step()
        served.append((len(first.take(DraftProposal)), len(second.take(DraftProposal))))
    assert served == [(1, 1), (1, 1), (2, 0), (2, 0)]


def test_within_a_link_the_longest_waiting_comes_first() -> None:
    bench = Bench(max_round_seqs=1)
    peer = bench.peer()
    for handle in (1, 2, 3):
        peer.open(handle, [*PROMPT, handle])
    for handle in (3, 1, 2):
        bench.clock.time += 0.001
        peer.judge(peer.row(handle, 3, k=1))
    order = []
    for _ in range(3):
        bench.step()
        order += [one.handle for one in peer.take(DraftProposal)]
    assert order == [3, 1, 2]


def test_a_verdict_between_forwards_supersedes_the_round() -> None:
    bench = Bench()
    peer = owing(bench, {1: 6, 2: 3})
    polls = []

    def poll() -> None:
        polls.append(len(bench.engine.batches))
        if len(polls) == 2:
            peer.judge(peer.row(1, 44, k=2))

    bench.step(poll)
    assert bench.engine.batches == [[1, 1], [1, 1], [1]], "sequence 1 is dropped, sequence 2 goes on"
    assert polls == [1, 2]
    assert [one.handle for one in peer.take(DraftProposal)] == [2]
    assert bench.drafter.counters.superseded == 1
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 2)


@pytest.mark.parametrize("leave", ["close", "disconnect"])
def test_a_sequence_that_ends_between_forwards_takes_nothing_along(leave: str) -> None:
    bench = Bench()
    peer, other = owing_links(bench, {1: {1: 6}, 2: {1: 3}})

    def poll() -> None:
        if leave == "close":
            peer.say(CloseSequence(handle=1))
        else:
            bench.drafter.disconnect(1)

    bench.step(poll)
    assert peer.take(DraftProposal) == []
    assert list(other.blocks()[1].token_ids) == other.oracle(1, 3)
    other.say(CloseSequence(handle=1))
    assert bench.kv.usage == 0


def test_a_text_longer_than_the_draft_is_refused_then_given_up() -> None:
    bench = Bench(max_model_len=20)
    peer = bench.peer()
    peer.say(peer.opening(1, LONG[:21]))
    bench.settle()
    (nack,) = peer.take(OpenNack)
    assert (nack.handle, nack.reason) == (1, RefusalReason.CONTEXT_TOO_LONG)
    peer.open(2, LONG[:14])
    lengths = []
    peer.judge(peer.row(2, 3, k=5))
    while len(peer.texts[2]) < 20:
        block = peer.blocks()[2]
        assert list(block.token_ids) == peer.oracle(2, len(block))
        lengths.append(len(block))
        peer.judge(peer.row(2, 9, k=5, judged=block, num_accepted=0))
    lengths.append(len(peer.blocks()[2]))
    assert lengths == [5, 5, 4, 3, 2, 1]
    peer.judge(peer.row(2, 9, k=5))
    bench.settle()
    assert peer.take(Evicted) == [Evicted(handle=2, reason=RefusalReason.CONTEXT_TOO_LONG)]
    assert bench.kv.usage == 0


def test_an_opening_without_room_is_refused_and_nobody_else_suffers() -> None:
    bench = Bench(num_blocks=4)
    peer = owing(bench, {1: 2})
    peer.say(peer.opening(2, [9] * 12))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 2)
    assert [(one.handle, one.reason) for one in peer.take(OpenNack)] == [(2, RefusalReason.NO_SPACE)]


def test_an_idle_sequence_makes_room_for_another() -> None:
    bench = Bench(num_blocks=6, reclaim_idle_s=1.0)
    peer = bench.peer()
    peer.open(1, PROMPT)
    bench.clock.time += 0.5
    peer.open(2, [8, *PROMPT])
    bench.clock.time += 0.6
    peer.open(3, [9] * 9)
    assert peer.take(Evicted) == [Evicted(handle=1, reason=RefusalReason.NO_SPACE)]
    peer.judge(peer.row(3, 3, k=2))
    assert list(peer.blocks()[3].token_ids) == peer.oracle(3, 2)


def test_a_sequence_that_outgrows_the_room_is_given_up_alone() -> None:
    bench = Bench(num_blocks=5)
    first, second = bench.peer(1), bench.peer(2)
    first.open(1, PROMPT)
    second.open(1, [8, *PROMPT])
    evicted = []
    for _ in range(20):
        for peer in (first, second):
            if peer.link_id not in evicted:
                peer.judge(peer.row(1, 3, k=2))
        bench.settle()
        for peer in (first, second):
            for proposal in peer.take(DraftProposal):
                assert list(proposal.proposal.token_ids) == peer.oracle(1, 2)
            evicted += [peer.link_id for _ in peer.take(Evicted)]
    assert len(evicted) == len(set(evicted)) == 2, "the second goes on until it alone needs too much"
    assert bench.kv.usage == 0


def test_max_num_seqs_is_kept_unless_one_is_idle() -> None:
    bench = Bench(max_num_seqs=2)
    peer = bench.peer()
    peer.open(1, PROMPT)
    peer.open(2, PROMPT)
    peer.say(peer.opening(3, PROMPT))
    bench.settle()
    (nack,) = peer.take(OpenNack)
    assert (nack.handle, nack.reason) == (3, RefusalReason.NO_SPACE)
    assert "max_num_seqs" in nack.detail
    bench.clock.time += 2.0
    peer.open(3, PROMPT)
    assert [one.handle for one in peer.take(Evicted)] == [1]


def test_what_hears_nothing_is_freed() -> None:
    bench = Bench(idle_timeout_s=10.0)
    peer = bench.peer()
    peer.open(1, PROMPT)
    peer.open(2, [8, *PROMPT])
    bench.clock.time += 9.0
    peer.judge(peer.row(2, 3, k=1))
    bench.clock.time += 2.0
    bench.drafter.tick()
    bench.settle()
    assert peer.take(Evicted) == [Evicted(handle=1, reason=RefusalReason.IDLE)]
    assert [one.handle for one in peer.take(DraftProposal)] == [2]


def test_a_draft_with_too_much_to_do_says_so() -> None:
    bench = Bench(max_queued_rows=2, busy_retry_after_s=0.5)
    peer = bench.peer()
    for handle in range(1, 5):
        peer.open(handle, [*PROMPT, handle])
    peer.judge(peer.row(1, 3, k=1), peer.row(2, 3, k=1))
    assert not peer.take(Busy)
    peer.judge(peer.row(3, 3, k=1))
    peer.judge(peer.row(4, 3, k=1))
    bench.deliver(bench.drafter.flush())
    assert peer.take(Busy) == [Busy(retry_after_s=0.5)], "once in that time"
    assert sorted(peer.blocks()) == [1, 2, 3, 4]


def test_step_time_is_measured_before_the_first_link_and_reported() -> None:
    bench = Bench(stats_interval_steps=3)
    bench.drafter.warm_up()
    assert bench.kv.usage == 0
    ack = bench.drafter.connect(9, hello())
    assert ack.step_ms == pytest.approx(2.0)
    assert (ack.incarnation, ack.draft_model, ack.max_model_len) == (5, "draft", 512)
    assert ack.kv_capacity_tokens == 1024
    bench.drafter.disconnect(9)
    peer = bench.peer()
    peer.open(1, PROMPT)
    for _ in range(2):
        peer.judge(peer.row(1, 3, k=1))
        bench.step()
    (stats,) = peer.take(DraftStats)
    assert stats.step_ms == pytest.approx(2.0)
    assert replace(stats, step_ms=0.0) == DraftStats(
        open_sequences=1, kv_usage=bench.kv.usage, step_ms=0.0, queued_rows=0, drift_total=0
    )


def test_a_draining_draft_finishes_what_it_holds() -> None:
    bench = Bench()
    peer = owing(bench, {1: 2})
    bench.drafter.drain("scaling down")
    peer.say(peer.opening(2, PROMPT))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 2)
    assert peer.take(Drain) == [Drain(reason="scaling down")]
    assert [one.reason for one in peer.take(OpenNack)] == [RefusalReason.DRAINING]


def test_nothing_to_do_is_no_work() -> None:
    bench = Bench()
    peer = bench.peer()
    assert not bench.drafter.has_work
    peer.open(1, PROMPT)
    assert not bench.drafter.has_work
    assert bench.drafter.step() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("prefill_chunk_tokens", 0),
        ("max_catch_up_tokens", 1),
        ("q_top_k", 0),
        ("idle_timeout_s", 0.0),
        ("idle_timeout_s", -1.0),
        ("busy_retry_after_s", float("inf")),
        ("reclaim_idle_s", float("nan")),
    ],
)
def test_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(DraftConfig(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"incarnation": 0}, {"vocab_size": 0}], ids=str)
def test_identity_is_refused_by_name(changes: dict[str, int]) -> None:
    identity = DraftIdentity(incarnation=1, model="draft", vocab_size=64, tokenizer_fingerprint=b"")
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(identity, **changes)  # type: ignore[arg-type]


def test_a_small_batch_goes_round_the_links() -> None:
    bench = Bench(max_round_seqs=1)
    peers = owing_links(bench, {link_id: {1: 1, 2: 1} for link_id in (1, 2, 3)})
    order = []
    for _ in range(6):
        bench.step()
        order += [peer.link_id for peer in peers for _ in peer.take(DraftProposal)]
    assert order == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("busy_with", ["prefill", "block"])
def test_a_sequence_that_waits_for_the_draft_is_not_idle(busy_with: str) -> None:
    bench = Bench(max_num_seqs=1)
    peer = bench.peer()
    if busy_with == "prefill":
        peer.say(peer.opening(1, PROMPT))
    else:
        peer.open(1, PROMPT)
        peer.judge(peer.row(1, 3, k=2))
    bench.clock.time += 5.0
    peer.say(peer.opening(2, PROMPT))
    bench.settle()
    assert [one.handle for one in peer.take(OpenNack)] == [2]
    assert peer.take(Evicted) == []


def test_catching_up_leaves_the_last_token_to_the_round() -> None:
    """Run by both, it would take the block that it filled along: published blocks are never written again."""
    bench = Bench(block_size=4, max_catch_up_tokens=2)
    peer = bench.peer()
    peer.open(1, PROMPT)
    bench.engine.batches.clear()
    while len(peer.texts[1]) < 15:
        peer.judge(peer.row(1, 3))
    peer.judge(peer.row(1, 3, k=2))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 2)
    assert bench.engine.batches == [[8], [1], [1]]
