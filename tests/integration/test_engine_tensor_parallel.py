"""A sharded model gives what the whole one gives; a dead rank is noticed, by all others."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.unit.engine.rank_processes import RankGroupUnderTest, rank_group
from tests.unit.engine.tiny_models import SIZES, plain_logits, random_tokens, save_random_model
from torch import Tensor
from transformers import LlamaConfig

from outrider.core.errors import EngineUnavailable
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.config import EngineConfig
from outrider.engine.rendezvous import join_rendezvous, open_rendezvous

# Three KV heads share unevenly over two ranks: 2 + 1. AutoTP cuts an MLP in pieces of 64.
THREE_KV_HEADS = {
    **SIZES,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "intermediate_size": 256,
}
TOKENS = random_tokens(40)
TABLE = [9, 2, 7, 0, 5, 11]


def rows(start: int, end: int, *, num_logits: int, tokens: list[int] = TOKENS) -> ForwardSlice:
    return ForwardSlice(token_ids=tokens[start:end], start=start, block_table=TABLE, num_logits=num_logits)


def run(group: RankGroupUnderTest, *slices: ForwardSlice) -> Tensor:
    answer = group.forward(ForwardBatch(slices=slices))
    assert isinstance(answer, list), answer
    return torch.tensor(answer)


def config(folder: Path, ranks: int, *, peer_timeout_s: float = 60.0) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        num_blocks=16,
        block_size=8,
        max_model_len=128,
        tensor_parallel_size=ranks,
        peer_timeout_s=peer_timeout_s,
    )


@pytest.mark.parametrize(("ranks", "tied"), [(2, True), (3, False)])
def test_logits_equal_the_whole_models(tmp_path: Path, ranks: int, tied: bool) -> None:
    plain = save_random_model(tmp_path, LlamaConfig(**THREE_KV_HEADS, attention_bias=True, tie_word_embeddings=tied))
    other = random_tokens(9, seed=5)
    with rank_group(config(tmp_path, ranks)) as group:
        run(group, rows(0, 30, num_logits=0))
        run(group, rows(30, 36, num_logits=6, tokens=[*TOKENS[:30], 1, 2, 3, 4, 5, 6]))  # all rejected
        second = ForwardSlice(token_ids=other, start=0, block_table=[3, 14], num_logits=2)
        mixed = run(group, rows(30, 36, num_logits=6), second)
        # More integers than one broadcast holds.
        long = run(group, *(ForwardSlice(token_ids=other, start=0, block_table=[3, 14], num_logits=1),) * 200)
        group.copy_blocks([(14, 6), (3, 1)])
        fork = run(group, ForwardSlice(token_ids=[7], start=9, block_table=[1, 6], num_logits=1))
        group.close()
        assert group.exit_codes() == [0] * ranks

    expected = torch.cat([plain_logits(plain, TOKENS[:36])[-6:], plain_logits(plain, other)[-2:]])
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(long, expected[-1:].expand(200, -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(fork, plain_logits(plain, [*other, 7])[-1:], rtol=0, atol=1e-4)


def test_a_dead_rank_ends_the_group(tmp_path: Path) -> None:
    save_random_model(tmp_path, LlamaConfig(**THREE_KV_HEADS))
    with rank_group(config(tmp_path, 3)) as group:
        outside = ForwardSlice(token_ids=[1], start=0, block_table=[16], num_logits=1)
        assert "block id" in group.forward(ForwardBatch(slices=(outside,)))
        run(group, rows(0, 8, num_logits=1))  # a refused batch has not disturbed the others

        group.processes[1].kill()
        group.processes[1].join()
        step = ForwardBatch(slices=(rows(8, 9, num_logits=1),))
        first, second = group.forward(step), group.forward(step)
        group.close()
        codes = group.exit_codes()

    assert first.startswith("EngineUnavailable: engine unavailable: rank 0 of 3 lost a tensor-parallel peer")
    assert second == first
    assert codes[0] == 0
    assert codes[2] not in (0, None), "a surviving rank ends too, and not as if all were well"


def test_a_hung_rank_ends_the_group(tmp_path: Path) -> None:
    save_random_model(tmp_path, LlamaConfig(**THREE_KV_HEADS))
    with rank_group(config(tmp_path, 2, peer_timeout_s=3.0)) as group:
        run(group, rows(0, 8, num_logits=1))
        hung = group.processes[1].pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        step = ForwardBatch(slices=(rows(8, 9, num_logits=1),))
        # The first hangs in its sums or, like the second, in handing over a command that nobody asks for.
        answers = [group.forward(step), group.forward(step)]

    for answer in answers:
        assert "lost a tensor-parallel peer" in answer
        assert "3000ms" in answer


def test_a_rank_that_does_not_come_is_named() -> None:
    opened = open_rendezvous(host="127.0.0.1", world_size=3, timeout_s=0.5)
    opened.store.set("outrider/rank/1", "here")
    with pytest.raises(EngineUnavailable, match=r"rank 0: ranks 2 of 3 did not come within 0\.5 s"):
        opened.wait_for_all()


def test_a_meeting_that_nobody_opens_is_given_up() -> None:
    opened = open_rendezvous(host="127.0.0.1", world_size=2, timeout_s=5.0)
    port = opened.port
    del opened
    with pytest.raises(EngineUnavailable, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port}"):
        join_rendezvous(rank=1, host="127.0.0.1", port=port, world_size=2, timeout_s=1.0)
