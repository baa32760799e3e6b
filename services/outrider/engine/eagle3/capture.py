"""The target's side of a head: fuse the features of every row of a forward, and keep them by slot."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import CompatibilityError
from outrider.engine.base import EngineLimits
from outrider.engine.eagle3.config import Eagle3Shape, default_feature_layers
from outrider.engine.linear import DenseLinear, PackedLinear, can_pack

__all__ = ["FeatureCapture", "feature_layers", "slots_of"]


class FeatureCapture:
    """Implements `engine.features.FeatureSource` on the rank that decides.

    Whoever runs the layers hands over the input of each of `layers`, in order, by `take`: AutoTP
    leaves the whole hidden state on every rank, so there is nothing to gather. The features are
    fused as they come, because a layer may reuse the memory of its input.
    """

    def __init__(
        self,
        fusing: Tensor,
        layers: tuple[int, int, int],
        limits: EngineLimits,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`fusing` is the head's fc.weight [hidden, 3 * target_hidden]; allocates the pool."""
        self.layers = layers
        factory: Callable[[Tensor, Tensor | None], nn.Module] = PackedLinear if can_pack(device, dtype) else DenseLinear
        parts = fusing.to(device=device, dtype=dtype).chunk(3, dim=1)
        self._fusing = {layer: factory(part.contiguous(), None) for layer, part in zip(layers, parts, strict=True)}
        self._block_size = limits.block_size
        # One block more than the limits say: padding rows of a recorded step write there.
        slots = (limits.num_blocks + 1) * limits.block_size
        self._pool = torch.zeros(slots, fusing.shape[0], dtype=torch.bfloat16, device=device)
        self._sum: Tensor | None = None

    def attach(self, layers: nn.ModuleList) -> None:
        """Be handed the input of the decoder layers whenever transformers' modules run them."""
        for index in self.layers:
            layers[index].register_forward_pre_hook(_hook(self, index), with_kwargs=True)

    def take(self, layer: int, hidden: Tensor, slots: Tensor) -> None:
        """The input of a layer: hidden [total, hidden_size] of the rows whose KV goes to `slots` [total]."""
        part: Tensor = self._fusing[layer](hidden)
        self._sum = part if layer == self.layers[0] or self._sum is None else self._sum + part
        if layer == self.layers[-1]:
            self._pool.index_copy_(0, slots, self._sum.to(torch.bfloat16))
            self._sum = None

    @torch.inference_mode()
    def read(self, block_table: Sequence[int], start: int, end: int) -> bytes:
        """See `FeatureSource.read`."""
        slots = torch.tensor(slots_of(block_table, start, end, self._block_size), device=self._pool.device)
        return self._pool.index_select(0, slots).cpu().view(torch.int16).numpy().tobytes()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the features of whole blocks, one after the other, as the KV is copied."""
        blocks = self._pool.unflatten(0, (-1, self._block_size))
        for source, destination in pairs:
            blocks[destination].copy_(blocks[source])


def slots_of(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions start … end - 1. Raises `ValueError` when the blocks do not hold them."""
    if start < 0 or end > len(block_table) * block_size:
        raise ValueError(f"{len(block_table)} blocks of {block_size} do not hold positions {start}..{end - 1}")
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, end)]


def feature_layers(shape: Eagle3Shape, *, num_layers: int, hidden_size: int) -> tuple[int, int, int]:
    """The layers that a head reads of a target of this size. Raises `CompatibilityError` when they do not fit."""
    if shape.target_hidden_size != hidden_size:
        raise CompatibilityError(
            f"draft: the head reads features of width {shape.target_hidden_size}; the target has {hidden_size}"
        )
    layers = shape.feature_layers or default_feature_layers(num_layers)
    if layers[-1] >= num_layers:
        raise CompatibilityError(f"draft: the head reads layers {layers}; the target has {num_layers}")
    return layers


def _hook(capture: FeatureCapture, layer: int) -> Any:
    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        capture.take(layer, hidden.squeeze(0), kwargs["ragged"].slots)

    return take
