"""The memory plan against arithmetic done by hand, from config.json alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.engine.tiny_models import CONFIGS, random_model

from outrider.core.errors import ConfigError
from outrider.engine.memory_plan import GIB, DraftLoad, MemoryPlan, MemorySettings, plan_memory
from outrider.engine.model_sizes import ModelSizes
from outrider.engine.shape import ModelShape
from outrider.engine.sizing import block_bytes, largest_shard

LLAMA_3_1_70B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA_3_2_1B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
BIG, SMALL, TINY = (ModelSizes.of_config(one) for one in (LLAMA_3_1_70B, LLAMA_3_2_1B, SMOLLM2_135M))

# Four cards of 80 GB; K = 7 as in the reference deployment.
CARD = MemorySettings(
    memory_bytes=80 * 10**9,
    gpu_memory_utilization=0.9,
    tensor_parallel_size=4,
    max_model_len=32768,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    num_draft_tokens=7,
    block_size=16,
)


def items(plan: MemoryPlan) -> dict[str, int]:
    return {one.name: one.num_bytes for one in plan.items}


def test_the_published_numbers_of_weights() -> None:
    for sizes, count in ((BIG, 70_553_706_496), (SMALL, 1_235_814_400), (TINY, 134_515_008)):
        tables = 1 if sizes.tied_head else 2
        whole = tables * sizes.table_weights + sizes.norm_weights + sizes.num_layers * sizes.layer_weights(1)
        assert whole == count


def test_llama_70b_on_four_cards() -> None:
    plan = plan_memory(BIG, CARD)
    # q and o 8192 x 8192, k and v 8192 x 1024, gate, up and down 8192 x 28672: a quarter on each rank.
    layer = (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 4
    rows = 64 * (1 + 7)
    # Three copies of the hidden state, then gate, up and their product of a quarter of the channels.
    activations = 4096 * (3 * 8192 + 3 * 28672 // 4) * 2
    assert items(plan) == {
        "sharded weights": 80 * layer * 2,  # 34.2 GB
        "replicated weights": (2 * 128256 * 8192 + 161 * 8192) * 2,  # 4.2 GB: AutoTP leaves table, head, norms whole
        "logits": rows * 128256 * 4,
        "workspace": activations + rows * 128256 * (2 + 4),
        "CUDA graphs": GIB,
        "runtime": GIB,
        "spare KV block": 16 * 81 * 1024,
    }
    assert items(plan)["sharded weights"] == 34_225_520_640
    assert items(plan)["replicated weights"] == 4_205_330_432
    # A token costs 2 x 80 layers x 2 KV heads x 128 channels x 2 bytes = 80 KiB, and 1 KiB to gather a layer's.
    assert plan.block_bytes == 16 * 81 * 1024
    fixed = 34_225_520_640 + 4_205_330_432 + 262_668_288 + (377_487_360 + 394_002_432) + 2 * GIB + 1_327_104
    assert plan.fixed_bytes == fixed == 41_613_819_904
    assert plan.num_blocks == (72_000_000_000 - 41_613_819_904) // 1_327_104 == 22_896
    assert plan.left_bytes == 72_000_000_000 - fixed - 22_896 * 1_327_104 >= 0
    assert [plan.max_sequences(context) for context in (2048, 8192, 32768)] == [178, 44, 11]


def test_llama_70b_with_a_1b_draft_on_the_same_cards() -> None:
    plan = plan_memory(BIG, CARD, DraftLoad(sizes=SMALL))
    alone = plan_memory(BIG, CARD)
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    own = {name: size for name, size in items(plan).items() if name.startswith("draft ")}
    assert own == {
        "draft sharded weights": 16 * layer * 2,
        "draft replicated weights": (128256 * 2048 + 33 * 2048) * 2,  # tied: one table
        "draft logits": 64 * 128256 * 4,
        "draft workspace": 512 * (3 * 2048 + 3 * 8192) * 2 + 64 * 128256 * (2 + 4),
        "draft CUDA graphs": GIB // 4,
        "draft runtime": GIB,
        "draft spare KV block": 16 * 34 * 1024,
    }
    assert own["draft sharded weights"] + own["draft replicated weights"] == 2 * 1_235_814_400
    # The draft follows every sequence: 2 x 16 layers x 8 KV heads x 64 channels x 2 bytes = 32 KiB a token more.
    assert plan.block_bytes == 16 * (81 + 34) * 1024
    assert plan.fixed_bytes == alone.fixed_bytes + sum(own.values()) == 45_541_724_160
    assert plan.num_blocks == (72_000_000_000 - 45_541_724_160) // 1_884_160 == 14_042
    assert [plan.max_sequences(context) for context in (2048, 8192, 32768)] == [109, 27, 6]


def test_a_shared_memory_gives_a_pool_its_share_and_never_less_than_one_sequence() -> None:
    whole = plan_memory(BIG, CARD)
    share = plan_memory(BIG, replace(CARD, kv_share=0.1))
    assert share.num_blocks == 7_200_000_000 // share.block_bytes < whole.num_blocks
    least = plan_memory(BIG, replace(CARD, kv_share=0.001))
    assert least.num_blocks == -(-CARD.max_model_len // 16)
    with pytest.raises(ConfigError, match="kv_share: 0"):
        replace(CARD, kv_share=0)


def test_the_draft_on_its_own_card() -> None:
    plan = plan_memory(SMALL, DraftLoad(sizes=SMALL).settings(CARD))
    assert plan.block_bytes == 16 * 34 * 1024
    assert "draft sharded weights" not in items(plan)
    assert plan.max_sequences(8192) > plan_memory(BIG, CARD).max_sequences(8192), "it follows every sequence"


def test_a_70b_does_not_fit_on_two_cards_and_the_knob_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sharded weights 63\.75.*raise tensor_parallel_size to 4") as refusal:
        plan_memory(BIG, replace(CARD, tensor_parallel_size=2))
    assert "memory: " in str(refusal.value)
    assert "lower" not in str(refusal.value), "no smaller batch makes room for weights"


@pytest.mark.parametrize(
    ("changes", "knob"),
    [
        ({"memory_bytes": 50 * 10**9, "max_model_len": 65536}, "max_model_len"),
        ({"memory_bytes": 50 * 10**9, "max_num_batched_tokens": 60000, "max_num_seqs": 8}, "max_num_batched_tokens"),
        (
            {"memory_bytes": 50 * 10**9, "max_num_seqs": 800, "max_num_batched_tokens": 8192, "max_model_len": 2048},
            "max_num_seqs",
        ),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({"num_blocks": 30_000}, "num_blocks"),
    ],
)
def test_the_number_in_the_refusal_is_the_largest_that_works(changes: dict[str, Any], knob: str) -> None:
    settings = replace(CARD, **changes)
    with pytest.raises(ConfigError) as refusal:
        plan_memory(BIG, settings)
    words = str(refusal.value).rstrip(".").split()
    value: Any = float(words[words.index(knob, words.index("fit,")) + 2].rstrip(","))
    step: float = 0.01 if knob == "gpu_memory_utilization" else -1
    value = value if knob == "gpu_memory_utilization" else int(value)
    plan_memory(BIG, replace(settings, **{knob: value}))
    with pytest.raises(ConfigError):
        plan_memory(BIG, replace(settings, **{knob: value - step}))


def test_what_no_knob_can_mend_names_the_memory_needed() -> None:
    with pytest.raises(ConfigError, match="take devices with at least 27 GiB"):
        plan_memory(BIG, replace(CARD, tensor_parallel_size=8, memory_bytes=10 * 10**9))


def test_on_a_laptop_all_ranks_and_the_draft_share_the_system_memory() -> None:
    """Two uneven fp32 ranks (2 + 1 KV heads) and an int4 draft, as in the laptop preset."""
    settings = MemorySettings(
        memory_bytes=16 * GIB,
        gpu_memory_utilization=0.5,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        num_draft_tokens=4,
        num_blocks=512,
        runtime_bytes=GIB // 2,
    )
    plan = plan_memory(TINY, settings, DraftLoad(sizes=TINY, quantization="int4", num_blocks=512))
    table = 49152 * 576
    layer = 576 * (2 * 6 * 64 + 2 * 2 * 64) + 3 * 576 * 768
    budget = items(plan)
    assert budget["sharded weights"] == 2 * 30 * layer * 4, "every rank counts as the larger one"
    assert budget["replicated weights"] == 2 * (2 * table + 61 * 576) * 4, "the table, and a packed copy as the head"
    assert budget["logits"] == 8 * 5 * 49152 * 4
    assert budget["runtime"] == GIB
    whole_layer = 576 * (2 * 9 * 64 + 2 * 3 * 64) + 3 * 576 * 1536
    assert budget["draft sharded weights"] == 30 * whole_layer * 5 // 8
    assert budget["draft KV"] == 512 * 2 * 31 * 16 * 3 * 64 * 2
    assert "CUDA graphs" not in budget
    assert plan.kv_bytes == 512 * 2 * (2 * 31 * 16 * 2 * 64 * 4)
    assert plan.max_sequences(2048) == 4
    assert plan.left_bytes > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_as_transformers_makes_them(name: str) -> None:
    model = random_model(CONFIGS[name])
    sizes = ModelSizes.of_config(model.config.to_dict())
    tables = 1 if sizes.tied_head else 2
    ours = tables * sizes.table_weights + sizes.norm_weights + sizes.num_layers * sizes.layer_weights(1)
    # Biases and norms of single heads are known, and too small for a budget.
    small = (".bias", "q_norm.weight", "k_norm.weight")
    assert ours == sum(one.numel() for key, one in model.named_parameters() if not key.endswith(small))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_block_costs_what_the_engine_allocates(ranks: int) -> None:
    shape = ModelShape(num_layers=30, heads=9, kv_heads=3, head_dim=64, vocab_size=49152, max_positions=8192)
    allocated = block_bytes(largest_shard(shape, ranks), block_size=16, dtype=torch.bfloat16)
    plan = plan_memory(TINY, replace(CARD, max_model_len=8192, tensor_parallel_size=ranks))
    assert plan.block_bytes * 30 == allocated * 31


@given(
    context=st.integers(1, 32768),
    seqs=st.integers(1, 256),
    tokens=st.integers(256, 16384),
    k=st.integers(0, 16),
    memory=st.integers(48, 140),
)
def test_a_plan_never_spends_more_than_it_has(context: int, seqs: int, tokens: int, k: int, memory: int) -> None:
    settings = replace(
        CARD,
        memory_bytes=memory * GIB,
        max_model_len=context,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        num_draft_tokens=k,
    )
    try:
        plan = plan_memory(BIG, settings, DraftLoad(sizes=SMALL))
    except ConfigError:
        return
    assert 0 <= plan.left_bytes < plan.block_bytes
    assert plan.max_sequences(context) >= 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization: 0.0"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization: 1.1"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0"),
        ({"block_size": 0}, "block_size: 0"),
        ({"num_blocks": 0}, "num_blocks: 0"),
        ({"num_draft_tokens": -1}, "num_draft_tokens: -1"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens: 63 is below max_num_seqs 64"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(CARD, **changes)


def test_ranks_and_lengths_are_checked_against_the_model() -> None:
    with pytest.raises(ConfigError, match="16 ranks cannot share 8 KV heads"):
        plan_memory(BIG, replace(CARD, tensor_parallel_size=16))
    with pytest.raises(ConfigError, match="max_model_len: 200000 is above the model's 131072"):
        plan_memory(BIG, replace(CARD, max_model_len=200000))


@pytest.mark.parametrize(("key", "value"), [("hidden_size", None), ("vocab_size", "many"), ("num_hidden_layers", 0)])
def test_a_config_without_a_count_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}"):
        ModelSizes.of_config({**LLAMA_3_1_70B, key: value})


def test_the_line_for_the_log_says_what_the_plan_holds() -> None:
    line = plan_memory(BIG, CARD).summary()
    assert "\n" not in line
    assert "KV 28.30 (22896 blocks of 16)" in line
    assert line.endswith("holds 11 sequences of 32768 tokens")
