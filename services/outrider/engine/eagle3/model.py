"""The head's arithmetic, shared by serving and training. Attention between rows is the caller's.

At row p the head sees the embedding of token p and what came out of position p - 1: the target's
fused features where they are known, its own output where they are not. It predicts token p + 1:

    g = fc(low ; middle ; high)                               once for each of the target's rows
    x = [input_layernorm(embedding of token p) ; hidden_norm(g or own output of p - 1)]
    h = (g or own output) + o_proj(attention(q, k, v of x))
    out = h + mlp(post_attention_layernorm(h))                fed to row p + 1
    logits over the reduced vocabulary = lm_head(norm(out))

Parameters are named as in published checkpoints. (Li et al. 2025, arXiv 2503.01840, section 3.)
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from outrider.engine.eagle3.config import Eagle3Shape

__all__ = ["Eagle3Head", "RmsNorm", "rotate"]


class RmsNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., size] to the same shape, in the weight's type: autocast mixes types, which has no fused kernel."""
        return rms_norm(rows.to(self.weight.dtype), (rows.shape[-1],), self.weight, self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        width = 2 * shape.hidden_size
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class _Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)


class Eagle3Head(nn.Module):
    """The head without its embedding table, which is the target's, and without attention."""

    d2t: Tensor
    """What to add to a drafted id to get the target's; int64 [draft_vocab]."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.long))

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each drafted id, int64 [draft_vocab]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, features: Tensor) -> Tensor:
        """The target's three features side by side [..., 3 * target_hidden] to [..., hidden]."""
        output: Tensor = self.fc(features)
        return output

    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Both inputs of a row, [..., hidden] each, normed and side by side: [..., 2 * hidden]."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(hidden)), dim=-1)

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., heads, head_dim], keys and values [..., kv_heads, head_dim], not rotated."""
        attention, size = self.midlayer.self_attn, self.shape.head_dim
        parts = (attention.q_proj(rows), attention.k_proj(rows), attention.v_proj(rows))
        query, key, value = (one.unflatten(-1, (-1, size)) for one in parts)
        return query, key, value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., hidden] from its input and what attention gave [..., heads * head_dim]."""
        layer = self.midlayer
        middle = hidden + layer.self_attn.o_proj(attended)
        output: Tensor = middle + layer.mlp(layer.post_attention_layernorm(middle))
        return output

    def logits(self, output: Tensor) -> Tensor:
        """Logits over the reduced vocabulary: [..., hidden] to [..., draft_vocab]."""
        logits: Tensor = self.lm_head(self.norm(output))
        return logits


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: heads [..., rows, heads, head_dim], cos and sin [..., rows, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)
