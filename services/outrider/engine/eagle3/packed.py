"""A head's weights as serving wants them: merged, in the engine's type, packed for a few rows."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from outrider.engine.eagle3.model import Eagle3Head, rotate
from outrider.engine.linear import DenseLinear, PackedLinear, can_pack

__all__ = ["PackedHead"]


class PackedHead:
    """The arithmetic of `Eagle3Head` over flat rows, without its fusing layer, which runs at the target."""

    def __init__(
        self, head: Eagle3Head, table: Tensor, *, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`table` is the embedding [vocab, hidden]; `vocab_size` the columns of the logits."""
        factory = PackedLinear if can_pack(device, dtype) else DenseLinear

        def packed(*weights: Tensor) -> torch.nn.Module:
            return factory(torch.cat([one.detach() for one in weights]).to(device=device, dtype=dtype), None)

        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        self.shape = head.shape
        self.dtype = dtype
        self.device = device
        self.scaling = head.shape.head_dim**-0.5
        self._table = table.detach().to(device=device, dtype=dtype)
        self._qkv = packed(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self._o = packed(attention.o_proj.weight)
        self._gate_up = packed(mlp.gate_proj.weight, mlp.up_proj.weight)
        self._down = packed(mlp.down_proj.weight)
        self._lm_head = packed(head.lm_head.weight)
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm)
        self._embedding_norm, self._hidden_norm, self._mlp_norm, self._norm = (
            one.to(device=device, dtype=dtype) for one in norms
        )
        self._vocab_size = vocab_size
        self._target_ids = head.target_ids.to(device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[total] to [total, hidden]."""
        rows: Tensor = embedding(token_ids, self._table)
        return rows

    def project(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [total, heads, head_dim], keys and values [total, kv_heads, head_dim], not rotated."""
        shape = self.shape
        rows = torch.cat((self._embedding_norm(embeddings), self._hidden_norm(hidden)), dim=-1)
        qkv = self._qkv(rows).unflatten(-1, (-1, shape.head_dim))
        query, key, value = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        return query, key, value

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding of queries and keys; cos and sin [total, head_dim]."""
        both = rotate(torch.cat((query, key), dim=1), cos, sin)
        return both[:, : self.shape.heads], both[:, self.shape.heads :]

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [total, hidden]; see `Eagle3Head.finish`."""
        middle = hidden + self._o(attended)
        gate, up = self._gate_up(self._mlp_norm(middle)).chunk(2, dim=-1)
        output: Tensor = middle + self._down(silu(gate) * up)
        return output

    def logits(self, output: Tensor) -> Tensor:
        """Logits in the target's ids, float32 [n, vocab]: -inf where the head has none."""
        drafted = self._lm_head(self._norm(output)).float()
        logits: Tensor = drafted.new_full((drafted.shape[0], self._vocab_size), -torch.inf)
        logits[:, self._target_ids] = drafted
        return logits
