"""Events that come twice, late, out of order or wrong: never an error, never another sequence's harm."""

import random
from dataclasses import replace

import pytest
from tests.unit.draft.bench import GREEDY, Bench, Peer, hello, plan

from outrider.core.errors import CompatibilityError
from outrider.core.link import (
    CloseSequence,
    DraftProposal,
    Goodbye,
    Launch,
    NeedResync,
    OpenAck,
    OpenNack,
    PauseSequences,
    Ping,
    Pong,
    RefusalReason,
    ResumeSequences,
    Resync,
    TargetEvent,
    Verdicts,
)

PROMPT = [5, 7, 11, 2, 9, 30, 41]


def opened(k: int = 4, **config: object) -> Peer:
    """One sequence with a round owed."""
    peer = Bench(**config).peer()  # type: ignore[arg-type]
    peer.open(1, PROMPT)
    peer.judge(peer.row(1, 3, k=k))
    return peer


def repaired(peer: Peer, handle: int, have_len: int) -> bool:
    """Resync from `have_len`; whether drafting goes on as if nothing had been."""
    peer.resync(handle, have_len)
    peer.judge(peer.row(handle, 20, k=3))
    block = peer.blocks()[handle]
    acks = peer.take(OpenAck)
    return list(block.token_ids) == peer.oracle(handle, 3) and [one.handle for one in acks] == [handle]


def test_a_repeated_verdict_changes_nothing() -> None:
    peer = opened()
    block = peer.blocks()[1]
    row = peer.row(1, 9, k=4, judged=block, num_accepted=2)
    peer.judge(row, row)
    peer.judge(row)
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 4)
    peer.judge(row)
    assert peer.blocks() == {}
    assert peer.received == []


def test_an_old_verdict_changes_nothing() -> None:
    peer = opened()
    rows = []
    for token_id in (9, 10, 11):
        rows.append(peer.row(1, token_id, k=2, judged=peer.blocks()[1], num_accepted=1))
        peer.judge(rows[-1])
    block = peer.blocks()[1]
    peer.judge(rows[0], rows[1])
    assert peer.blocks() == {}
    peer.judge(peer.row(1, 12, k=2, judged=block, num_accepted=2))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 2)
    assert peer.received == []


def test_a_late_block_is_judged_by_its_tail() -> None:
    peer = opened()
    late = peer.blocks()[1]
    peer.judge(peer.row(1, late.token_ids[0]))  # the target went on alone, and drew the same
    peer.judge(peer.row(1, 50, k=3, judged=late, num_accepted=2))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 3)
    assert peer.received == []


def test_a_verdict_ahead_of_the_text_asks_for_what_is_missing() -> None:
    peer = opened()
    block = peer.blocks()[1]
    peer.row(1, 9, judged=block, num_accepted=2)  # never sent
    have_len = len(PROMPT) + 1
    peer.judge(peer.row(1, 10, k=3))
    peer.judge(peer.row(1, 11, k=3))
    assert peer.blocks() == {}, "no drafting until it is repaired"
    assert peer.take(NeedResync) == [NeedResync(handle=1, have_len=have_len)]
    assert repaired(peer, 1, have_len)


def test_a_verdict_on_an_unknown_block_asks_for_the_text_behind_its_base() -> None:
    peer = opened()
    block = peer.blocks()[1]
    base_len = len(peer.texts[1])
    peer.judge(replace(peer.row(1, 9, k=3, judged=block, num_accepted=2), block_id=999))
    assert peer.blocks() == {}
    assert peer.take(NeedResync) == [NeedResync(handle=1, have_len=base_len)]
    assert repaired(peer, 1, base_len)


def test_drift_is_found_counted_and_repaired_from_the_start() -> None:
    peer = opened()
    block = peer.blocks()[1]
    row = peer.row(1, 9, k=3, judged=block, num_accepted=2)
    peer.judge(replace(row, prefix_hash=row.prefix_hash ^ 1))
    assert peer.blocks() == {}
    assert peer.take(NeedResync) == [NeedResync(handle=1, have_len=0)]
    assert peer.bench.drafter.counters.drift == 1
    peer.resync(1, 4)  # not enough
    assert peer.blocks() == {}
    assert peer.take(NeedResync) == [NeedResync(handle=1, have_len=0)]
    assert repaired(peer, 1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"base_len": 0},
        {"base_len": -3},
        {"base_len": 10_000},
        {"num_accepted": -1},
        {"num_accepted": 5},
        {"num_accepted": 1 << 31},
        {"next_token_id": 64},
        {"next_token_id": -1},
        {"block_id": 0},
        {"block_id": 0, "accepted_token_ids": (1, 99)},
        {"block_id": 0, "accepted_token_ids": (1, 2, 3)},
    ],
    ids=str,
)
def test_a_bad_row_harms_its_own_sequence_only(changes: dict[str, object]) -> None:
    peer = opened()
    peer.open(2, PROMPT)
    block = peer.blocks()[1]
    bad = replace(peer.row(1, 9, k=4, judged=block, num_accepted=2), **changes)  # type: ignore[arg-type]
    peer.judge(bad, peer.row(2, 8, k=4))
    blocks = peer.blocks()
    assert list(blocks) == [2]
    assert list(blocks[2].token_ids) == peer.oracle(2, 4)
    (need,) = peer.take(NeedResync)
    assert need.handle == 1
    assert repaired(peer, 1, need.have_len)


@pytest.mark.parametrize(
    ("first_position", "token_ids"),
    [(-1, (1,)), (9, (1,)), (3, (64,)), (3, (-1,)), (0, ()), (2, (1, 2))],
)
def test_a_bad_resync_is_answered_by_the_length_that_is_sure(first_position: int, token_ids: tuple[int, ...]) -> None:
    peer = opened()
    peer.blocks()
    peer.say(Resync(handle=1, first_position=first_position, token_ids=token_ids))
    assert peer.blocks() == {}
    (need,) = peer.take(NeedResync)
    assert 0 <= need.have_len <= len(peer.texts[1])
    assert repaired(peer, 1, need.have_len)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": ()},
        {"token_ids": (1, 2, 3, 4, 5, 6, 64)},
        {"token_ids": (1, 2, 3, 4, 5, 6, -1)},
        {"prompt_len": 0},
        {"prompt_len": 8},
        {"noise_key": -1},
        {"noise_key": 1 << 64},
    ],
    ids=str,
)
def test_a_bad_opening_is_refused_by_name(changes: dict[str, object]) -> None:
    peer = Bench().peer()
    peer.say(replace(peer.opening(1, PROMPT), **changes))  # type: ignore[arg-type]
    peer.bench.settle()
    (nack,) = peer.take(OpenNack)
    assert (nack.handle, nack.reason) == (1, RefusalReason.INVALID)
    assert nack.detail.startswith(next(iter(changes)))
    assert peer.bench.kv.usage == 0


def test_unknown_handles_are_counted_and_dropped() -> None:
    peer = opened()
    before = peer.bench.drafter.counters.dropped_events
    stranger = replace(peer.row(1, 3), handle=9)
    peer.texts[1].pop()
    peer.say(
        Verdicts(step=1, rows=(stranger,)),
        Resync(handle=9, first_position=0, token_ids=(1,)),
        CloseSequence(handle=9),
        PauseSequences(handles=(9,)),
        ResumeSequences(handles=(9,)),
        Launch(step=1, rows=(), budget_us=100),
    )
    assert peer.bench.drafter.counters.dropped_events == before + 5
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 4)
    peer.bench.drafter.handle(55, [Ping(nonce=1)])
    assert peer.bench.drafter.counters.dropped_events == before + 6
    assert peer.received == []


def test_the_round_after_an_opening_brings_the_missing_text_first() -> None:
    """Rule 5: the target went on alone until OpenAck."""
    peer = Bench(max_catch_up_tokens=4, prefill_chunk_tokens=3).peer()
    peer.open(1, PROMPT)
    for token_id in range(20, 34):
        peer.row(1, token_id)
    peer.resync(1, len(PROMPT))
    peer.judge(peer.row(1, 34, k=5))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 5)
    assert peer.received == [], "no second OpenAck: nothing was out of step"


def test_a_plan_counts_when_a_resync_has_already_brought_its_text() -> None:
    peer = opened()
    block = peer.blocks()[1]
    row = peer.row(1, 9, k=3, judged=block, num_accepted=1)
    peer.resync(1, len(PROMPT))
    peer.judge(row)
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 3)
    peer.judge(row)
    peer.resync(1, 3)
    assert peer.blocks() == {}
    assert peer.received == []


def test_a_plan_counts_anew_when_other_text_reaches_the_same_length() -> None:
    peer = opened()
    peer.blocks()
    peer.texts[1][-1:] = []
    peer.row(1, 50)
    peer.resync(1, len(PROMPT))
    peer.texts[1][-1:] = []
    peer.judge(peer.row(1, 50, k=4))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 4)


def test_verdicts_during_prefill_are_kept() -> None:
    peer = Bench(prefill_chunk_tokens=2).peer()
    peer.say(peer.opening(1, PROMPT))
    peer.bench.step()
    peer.judge(peer.row(1, 9, k=2))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 2)
    assert peer.take(OpenAck) == [OpenAck(handle=1, have_len=len(PROMPT) + 1)]


def test_a_resync_may_replace_text_anywhere() -> None:
    peer = opened()
    peer.blocks()
    peer.texts[1][2:] = [33, 34, 35]
    peer.openings[1] = replace(peer.openings[1], prompt_len=2)
    peer.resync(1, 2)
    assert [one.have_len for one in peer.take(NeedResync)] == []
    peer.bench.settle()
    (need,) = peer.take(NeedResync)
    assert need.have_len == 2, "shorter than the prompt: refused"
    peer.texts[1][2:] = [33, 34, 35, 36, 37, 38]
    assert repaired(peer, 1, 2)


def test_a_repeated_opening_is_answered_again_and_another_text_starts_anew() -> None:
    peer = Bench().peer()
    peer.open(1, PROMPT)
    peer.say(peer.openings[1])
    peer.bench.settle()
    assert peer.take(OpenAck) == [OpenAck(handle=1, have_len=len(PROMPT))]
    peer.open(1, [*PROMPT, 50, 51])
    peer.judge(peer.row(1, 3, k=4))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 4)
    peer.say(CloseSequence(handle=1))
    assert peer.bench.kv.usage == 0


def test_two_links_may_use_equal_handles() -> None:
    bench = Bench()
    first, second = bench.peer(1), bench.peer(2)
    first.open(1, PROMPT)
    second.open(1, [40, 41, 42])
    first.judge(first.row(1, 3, k=4))
    second.judge(second.row(1, 4, k=2))
    bench.settle()
    for peer, k in ((first, 4), (second, 2)):
        block = peer.blocks()[1]
        assert block.block_id == 1
        assert list(block.token_ids) == peer.oracle(1, k)
    second.say(CloseSequence(handle=1))
    first.judge(first.row(1, 5, k=4))
    assert list(first.blocks()[1].token_ids) == first.oracle(1, 4)


def test_block_ids_never_repeat_on_a_link() -> None:
    peer = opened()
    peer.open(2, PROMPT)
    seen: list[int] = []
    for _ in range(5):
        blocks = peer.blocks()
        seen += [block.block_id for block in blocks.values()]
        peer.judge(*(peer.row(handle, 9, k=2) for handle in (1, 2)))
    assert sorted(seen) == list(range(1, len(seen) + 1))


def test_pause_and_resume() -> None:
    peer = Bench().peer()
    peer.open(1, PROMPT)
    peer.say(PauseSequences(handles=(1,)))
    peer.judge(peer.row(1, 3, k=4))
    assert peer.blocks() == {}
    assert peer.bench.kv.usage > 0
    peer.say(ResumeSequences(handles=(1,)))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 4)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_block_ends_behind_an_end_of_text(k: int) -> None:
    bench = Bench()
    peer = bench.peer()
    text = [*PROMPT, 3]
    opening = peer.opening(1, PROMPT)
    expected = bench.continuation(opening, text, 8)
    eos = next(token_id for i, token_id in enumerate(expected) if i >= 2 and token_id not in expected[:i])
    peer.open(1, PROMPT, eos_token_ids=(eos, 63))
    peer.judge(peer.row(1, 3, k=k))
    block = peer.blocks()[1]
    assert list(block.token_ids) == expected[: min(k, expected.index(eos) + 1)]
    # The target rejects the end: the sequence goes on.
    num_accepted = min(k, expected.index(eos))
    peer.judge(peer.row(1, (eos + 1) % 64, k=k, judged=block, num_accepted=num_accepted))
    follow_up = list(peer.blocks()[1].token_ids)
    assert follow_up == peer.oracle(1, k)[: len(follow_up)]


def test_num_draft_tokens_is_bounded_by_the_greeting_and_the_configuration() -> None:
    bench = Bench(max_num_draft_tokens=6)
    small, large = bench.peer(1, max_num_draft_tokens=3), bench.peer(2, max_num_draft_tokens=1 << 31)
    for peer, bound in ((small, 3), (large, 6)):
        peer.open(1, PROMPT)
        peer.judge(peer.row(1, 3, k=1 << 31))
        assert len(peer.blocks()[1].token_ids) == bound


def test_ids_that_the_target_does_not_have_are_never_drafted() -> None:
    peer = Bench().peer(vocab_size=40)
    peer.open(1, [5, 7, 11, 2])
    peer.judge(peer.row(1, 3, k=8))
    for _ in range(10):
        block = peer.blocks()[1]
        assert max(block.token_ids) < 40
        peer.judge(peer.row(1, 39, k=8, judged=block, num_accepted=7))
    peer.say(peer.opening(2, [5, 40]))
    peer.bench.settle()
    assert [one.reason for one in peer.take(OpenNack)] == [RefusalReason.INVALID]


def test_vocabularies_must_agree() -> None:
    drafter = Bench().drafter
    with pytest.raises(CompatibilityError, match="tokenizer_fingerprint"):
        drafter.connect(1, hello(tokenizer_fingerprint=b"other"))
    assert not drafter.has_link(1)


def test_ping_is_answered_without_a_step() -> None:
    peer = opened()
    peer.say(Ping(nonce=42))
    peer.bench.deliver(peer.bench.drafter.flush())
    assert peer.received == [Pong(nonce=42)]
    assert peer.bench.drafter.counters.rounds == 0


@pytest.mark.parametrize("leave", ["goodbye", "disconnect", "close"])
def test_leaving_frees_everything(leave: str) -> None:
    bench = Bench()
    peer, other = bench.peer(1), bench.peer(2)
    for handle in (1, 2, 3):
        peer.open(handle, [*PROMPT, handle])
        peer.judge(peer.row(handle, 3, k=4))
    peer.say(peer.opening(4, PROMPT * 3))
    bench.step()
    assert bench.kv.usage > 0
    if leave == "goodbye":
        peer.say(Goodbye(reason="the engine is rebuilt"), Ping(nonce=1))
    elif leave == "disconnect":
        bench.drafter.disconnect(1)
        bench.drafter.disconnect(1)
    else:
        peer.say(*(CloseSequence(handle=handle) for handle in (1, 2, 3, 4)))
    assert bench.kv.usage == 0
    assert bench.drafter.has_link(1) == (leave == "close")
    other.open(1, PROMPT)
    other.judge(other.row(1, 3, k=4))
    assert list(other.blocks()[1].token_ids) == other.oracle(1, 4)


def random_event(rng: random.Random, peer: Peer) -> TargetEvent:
    """Mostly nonsense, sometimes close to sense."""
    handle = rng.randrange(4)
    text = peer.texts.get(handle, [1])
    ids = tuple(rng.randrange(64, 99) if rng.random() < 0.05 else rng.randrange(64) for _ in range(rng.randrange(9)))
    kind = rng.randrange(10)
    if kind == 0:
        return peer.opening(handle, ids, prompt_len=rng.randrange(4), sampling=GREEDY)
    if kind == 1:
        return Resync(handle=handle, first_position=rng.randrange(-1, len(text) + 2), token_ids=ids)
    if kind == 2:
        return CloseSequence(handle=handle)
    if kind == 3:
        return PauseSequences(handles=(handle,)) if rng.random() < 0.5 else ResumeSequences(handles=(handle,))
    if not peer.texts.get(handle):
        return Ping(nonce=1)
    row = peer.row(handle, rng.randrange(64), k=rng.randrange(10), accepted=ids)
    if rng.random() < 0.5:
        row = replace(row, block_id=rng.randrange(20), base_len=row.base_len + rng.randrange(-2, 3), plan=plan(3))
    return Verdicts(step=1, rows=(row, row) if rng.random() < 0.2 else (row,))


@pytest.mark.parametrize("seed", range(20))
def test_no_history_of_events_stops_the_drafter_or_leaks_kv(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(num_blocks=24, max_model_len=48, prefill_chunk_tokens=3, max_num_seqs=3)
    peer, honest = bench.peer(1), bench.peer(2)
    honest.open(1, PROMPT)
    for _ in range(150):
        peer.say(*(random_event(rng, peer) for _ in range(rng.randrange(4))))
        if rng.random() < 0.5:
            bench.step()
        bench.clock.time += rng.choice([0.0, 2.0])
    honest.judge(honest.row(1, 3, k=4))
    bench.settle()
    for event in honest.take(DraftProposal):
        assert list(event.proposal.token_ids) == honest.oracle(1, 4)
    peer.say(Goodbye(reason="done"))
    honest.say(Goodbye(reason="done"))
    assert bench.kv.usage == 0
    assert len(bench.kv) == 0
