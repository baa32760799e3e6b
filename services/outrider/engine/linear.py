"""Linear layers that keep their weights the way the processor wants to read them.

A decode step reads every weight once for a handful of rows. The stock layer repacks the weight, or
runs a loop per row; oneDNN's reordered weights make six rows cost about what one row costs, which
is what makes verifying a block of draft tokens nearly free.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["DenseLinear", "LinearFactory", "PackedLinear", "can_pack"]

# oneDNN chooses a layout for this many rows. Hints of 6 and of 64 measure alike, and are as good for
# one row as a hint of 1, which is twice as slow for six.
_ROWS_HINT = 16

# What oneDNN has prepared for a product, by weight shape and number of rows, it keeps, and PyTorch's layer above it
# keeps it once more: 1024 entries each, a third of a MiB apiece. Under a load whose batches are ever of other sizes a
# process of 2 GiB goes on growing for an hour, by hundreds of MiB. This many are five shapes at 25 numbers of rows. A
# step of tens of rows that finds none of its own takes 2 to 5 % longer.
_PREPARED_PRODUCTS = 128
_CAPACITIES = {
    "LRU_CACHE_CAPACITY": _PREPARED_PRODUCTS,
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": 2 * _PREPARED_PRODUCTS,  # a product has two entries
}

LinearFactory = Callable[[Tensor, Tensor | None], nn.Module]
"""Makes a layer from weight [out, in] and bias [out]. May keep the tensors or copy them."""


class DenseLinear(nn.Module):
    """A linear layer that keeps the weight as it is: for devices with no better layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., in] to [..., out]."""
        return linear(rows, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A linear layer over oneDNN's reordered weight, for float32 and bfloat16 on the CPU.

    Keeps only the reordered copy: drop the original and the layer takes no more memory than it.
    The result is not bit-equal to `DenseLinear`, because sums are taken in another order.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # Read at the first use in a process; there is no other way to say it from here.
        for name, capacity in _CAPACITIES.items():
            os.environ.setdefault(name, str(capacity))
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., in] to [..., out]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return output


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` works for weights like these, in this build and on this processor."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
