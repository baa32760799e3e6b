"""Tiny random EAGLE-3 heads in the published format, and what the paper's formulas say about them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE = 64, 4, 2, 16, 96
VOCAB, DRAFT_VOCAB = 128, 48
EPS, THETA = 1e-5, 10_000.0
LAYERS = (0, 1, 2)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True},
}


def random_weights(*, draft_vocab: int = DRAFT_VOCAB, seed: int = 3) -> dict[str, Tensor]:
    """All tensors of a published head but the embedding."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=generator)

    ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(MIDDLE, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(MIDDLE, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, MIDDLE),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": 3 * matrix(draft_vocab, HIDDEN),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": known,
    }


def save_random_head(folder: Path, *, pickled: bool = False, **changes: Any) -> dict[str, Tensor]:
    """Write a head's folder; `changes` to its configuration. Returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(draft_vocab=changes.get("draft_vocab_size", DRAFT_VOCAB))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return weights


def reference_logits(
    weights: dict[str, Tensor], table: Tensor, tokens: Sequence[int], fused: Tensor
) -> tuple[Tensor, Tensor]:
    """The head on one text, from its formulas, row by row and without a cache.

    Pair i is token i + 1 with what came out of position i: `fused` [n, hidden] for the first n, then
    the head's own output. Returns logits [len(tokens) - 1, draft_vocab] and outputs [.., hidden].
    """

    def rms(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weights[name]

    def turned(x: Tensor, position: int) -> Tensor:
        # x [heads, head_dim] as complex numbers: dimension j belongs to j + head_dim / 2.
        half = HEAD_DIM // 2
        angle = position * THETA ** (-torch.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=1)

    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    logits: list[Tensor] = []
    mid = "midlayer."
    for i, token in enumerate(tokens[1:]):
        hidden = fused[i] if i < len(fused) else outputs[-1]
        x = torch.cat((rms(table[token], mid + "input_layernorm.weight"), rms(hidden, mid + "hidden_norm.weight")))
        query = turned((weights[mid + "self_attn.q_proj.weight"] @ x).view(HEADS, HEAD_DIM), i)
        keys.append(turned((weights[mid + "self_attn.k_proj.weight"] @ x).view(KV_HEADS, HEAD_DIM), i))
        values.append((weights[mid + "self_attn.v_proj.weight"] @ x).view(KV_HEADS, HEAD_DIM))
        heads = []
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            scores = torch.stack([query[h] @ key[kv] for key in keys]) / math.sqrt(HEAD_DIM)
            heads.append(scores.softmax(0) @ torch.stack([value[kv] for value in values]))
        middle = hidden + weights[mid + "self_attn.o_proj.weight"] @ torch.cat(heads)
        y = rms(middle, mid + "post_attention_layernorm.weight")
        gate = weights[mid + "mlp.gate_proj.weight"] @ y
        up = weights[mid + "mlp.up_proj.weight"] @ y
        outputs.append(middle + weights[mid + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
        logits.append(weights["lm_head.weight"] @ rms(outputs[-1], "norm.weight"))
    return torch.stack(logits), torch.stack(outputs)
