"""A draft equal to its target must be accepted in full: every block is what the model itself says."""

import random

import pytest
from tests.unit.draft.bench import GREEDY, Bench, Peer

from outrider.core.link import DraftProposal
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import ProposalSource, VerificationRule

SAMPLED = SamplingParams(temperature=1.0)
PENALIZED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, frequency_penalty=1.5, repetition_penalty=1.3)
PROMPT = [5, 7, 11, 2, 9, 30, 41]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("k", range(1, 9))
def test_full_accepts_over_a_long_output(k: int, sampling: SamplingParams) -> None:
    """A hole at the draft's own last token would show from the second round on."""
    peer = Bench().peer()
    peer.open(1, PROMPT, sampling=sampling)
    peer.judge(peer.row(1, peer.oracle(1, 1)[0], k=k))
    for _ in range(96 // (k + 1)):
        block = peer.blocks()[1]
        assert (block.base_len, block.source, block.laws) == (len(peer.texts[1]), ProposalSource.DRAFT, ())
        *expected, bonus = peer.oracle(1, k + 1)
        assert list(block.token_ids) == expected
        peer.judge(peer.row(1, bonus, k=k, judged=block, num_accepted=k))


@pytest.mark.parametrize("num_accepted", range(6))
def test_rollback_at_every_position(num_accepted: int) -> None:
    peer = Bench().peer()
    peer.open(1, PROMPT)
    peer.judge(peer.row(1, 3, k=5))
    for _ in range(12):
        block = peer.blocks()[1]
        assert list(block.token_ids) == peer.oracle(1, 5)
        # Neither the draft's next token nor the target's favourite: the text goes its own way.
        recovered = (block.token_ids[min(num_accepted, 4)] + 17) % 64
        peer.judge(peer.row(1, recovered, k=5, judged=block, num_accepted=num_accepted))
    assert peer.bench.drafter.counters.resyncs == 0


def one_random_round(rng: random.Random, peer: Peer, handle: int, blocks: dict[int, object]) -> None:
    """A verdict of any kind: on the block, on the n-gram's, plain, or speculation off for a while."""
    k = rng.choice([0, 1, 2, 3, 5, 8])
    next_token_id = rng.randrange(64)
    block = blocks.pop(handle, None)
    if isinstance(block, DraftProposal) and rng.random() < 0.7:
        accepted = rng.randint(0, len(block.proposal))
        peer.judge(peer.row(handle, next_token_id, k=k, judged=block.proposal, num_accepted=accepted))
    elif rng.random() < 0.5:
        peer.judge(peer.row(handle, next_token_id, k=k, accepted=[rng.randrange(64) for _ in range(rng.randint(1, 6))]))
    else:
        peer.judge(peer.row(handle, next_token_id, k=k))


@pytest.mark.parametrize("seed", range(4))
def test_any_history_drafts_what_the_text_says(seed: int) -> None:
    """Several sequences with equal beginnings over two links, with different K and all kinds of verdicts."""
    rng = random.Random(seed)
    bench = Bench(max_catch_up_tokens=6, prefill_chunk_tokens=5, stats_interval_steps=10_000)
    peers = [bench.peer(link_id) for link_id in (1, 2)]
    for peer in peers:
        for handle in (1, 2, 3):
            # Equal handles on both links, and common prompts: the prefix cache is in play.
            peer.open(handle, PROMPT * 3 + [handle], sampling=rng.choice([GREEDY, SAMPLED]), noise_key=handle)
    blocks: dict[int, dict[int, object]] = {1: {}, 2: {}}
    num_checked = 0
    for _ in range(40):
        for peer in peers:
            for handle in (1, 2, 3):
                if rng.random() < 0.8:
                    one_random_round(rng, peer, handle, blocks[peer.link_id])
        bench.settle()
        for peer in peers:
            for event in peer.take(DraftProposal):
                assert event.proposal.base_len == len(peer.texts[event.handle])
                assert list(event.proposal.token_ids) == peer.oracle(event.handle, len(event.proposal))
                blocks[peer.link_id][event.handle] = event
                num_checked += 1
            assert peer.received == []
    assert num_checked > 50
    assert bench.kv.counters.hit_tokens > 0


def test_uncommitted_tokens_never_reach_another_sequence() -> None:
    """Replay A, B, A: what was drafted and rejected for one text is not found as KV of another."""
    bench = Bench(block_size=2)
    peer = bench.peer()
    for handle in (1, 2, 3):
        peer.open(handle, PROMPT)
        peer.judge(peer.row(handle, 3, k=8))
        block = peer.blocks()[handle]
        assert list(block.token_ids) == peer.oracle(handle, 8)
        recovered = (block.token_ids[1] + handle) % 64
        peer.judge(peer.row(handle, recovered, k=8, judged=block, num_accepted=1))
        assert list(peer.blocks()[handle].token_ids) == peer.oracle(handle, 8)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
def test_rejection_rule_carries_the_law_of_each_token(sampling: SamplingParams) -> None:
    peer = Bench(q_top_k=6).peer()
    peer.open(1, PROMPT, sampling=sampling, rule=VerificationRule.REJECTION)
    peer.judge(peer.row(1, 3, k=4))
    block = peer.blocks()[1]
    assert len(block.laws) == len(block.token_ids) == 4
    assert list(block.token_ids) == peer.oracle(1, 4)
    for token_id, law in zip(block.token_ids, block.laws, strict=True):
        assert token_id in law.token_ids
        assert len(law.token_ids) == len(law.probs) <= 6
        assert sum(law.probs) == pytest.approx(1.0, abs=1e-6)


def test_a_rejection_block_can_be_adopted_round_after_round() -> None:
    peer = Bench().peer()
    peer.open(1, PROMPT, sampling=SAMPLED, rule=VerificationRule.REJECTION)
    peer.judge(peer.row(1, 3, k=3))
    for num_accepted in (3, 0, 2, 3, 1):
        block = peer.blocks()[1]
        assert list(block.token_ids) == peer.oracle(1, 3)
        peer.judge(peer.row(1, 8, k=3, judged=block, num_accepted=num_accepted))
