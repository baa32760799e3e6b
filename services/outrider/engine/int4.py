"""Four-bit weights with bfloat16 activations: a model's own quantised copy is a fast draft of it.

Weights are quantised in groups of 32 along the input, each with a scale and a zero point of its
own. That is also the grid of GGUF's Q4_1, so a model converted from Q4_1 comes back almost as it
was: only scale and zero point are rounded to bfloat16.
"""

import torch
from torch import Tensor, nn

from outrider.core.errors import CompatibilityError

__all__ = ["GROUP_SIZE", "Int4Linear", "quantize"]

GROUP_SIZE = 32
"""Weights that share a scale; larger groups are no faster here, and less exact."""

_LEVELS = 15
_MIDDLE = 8  # the kernel computes (level - 8) * scale + zero
_OUT_MULTIPLE = 16


class Int4Linear(nn.Module):
    """A linear layer over packed four-bit weights. Rows and results are bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise `weight` [out, in]. Raises `CompatibilityError` for sizes that cannot be packed."""
        super().__init__()
        out_features, in_features = weight.shape
        if in_features % GROUP_SIZE or out_features % _OUT_MULTIPLE:
            raise CompatibilityError(
                f"int4 needs layers with inputs in multiples of {GROUP_SIZE} and outputs in multiples of "
                f"{_OUT_MULTIPLE}; this model has one of {out_features} x {in_features}"
            )
        levels, scales, zeros = quantize(weight.detach().float())
        self.weight: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.scales_and_zeros = torch.stack((scales.t(), zeros.t()), dim=-1).contiguous()  # [groups, out, 2]
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)
        self._out_features = out_features

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., in] to [..., out]."""
        flat = rows.reshape(-1, rows.shape[-1])
        output: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            flat, self.weight, GROUP_SIZE, self.scales_and_zeros
        )
        if self.bias is not None:
            output = output + self.bias
        return output.view(*rows.shape[:-1], self._out_features)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise `weight` [out, in], float32.

    Returns levels 0 … 15, int32 [out, in], and scales and zeros, bfloat16 [out, in / 32], with
    weight ≈ (levels - 8) * scale + zero. Scale and zero are rounded first, and the levels chosen
    for the rounded ones.
    """
    grouped = weight.unflatten(1, (-1, GROUP_SIZE))  # [out, groups, 32]
    low, high = grouped.aminmax(dim=-1)
    scales = ((high - low) / _LEVELS).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    zeros = (low + _MIDDLE * scales.float()).to(torch.bfloat16)
    steps = (grouped - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    levels = (steps.round() + _MIDDLE).clamp_(0, _LEVELS)
    return levels.flatten(1).to(torch.int32), scales, zeros
