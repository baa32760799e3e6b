"""Shard a model over the ranks of a group with DeepSpeed's AutoTP.

DeepSpeed decides who holds which part of which weight, uneven shards included. Its layers are then
replaced by plain ones over the same shards: so the sums run on our own communicator, with its own
time-out, and the layers can be merged and packed like any others. The output head stays whole,
because AutoTP would cut it along the hidden size and add up full rows of logits on every rank.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.errors import CompatibilityError
from outrider.engine.rank_group import RankGroup

__all__ = ["SummedLinear", "shard_model"]


class SummedLinear(nn.Module):
    """The row-parallel half of a sharded pair: each rank's product, added up over the group."""

    def __init__(self, inner: nn.Linear, bias: nn.Parameter | None, group: RankGroup) -> None:
        super().__init__()
        self.inner = inner
        self.bias = bias
        self._group = group

    def forward(self, rows: Tensor) -> Tensor:
        """This rank's part of the rows [..., in / ranks] to the whole result [..., out]."""
        output = self._group.sum(self.inner(rows))
        # The bias is whole on every rank: it is added once, after the sum.
        return output if self.bias is None else output + self.bias


def shard_model(model: PreTrainedModel, group: RankGroup, dtype: torch.dtype) -> None:
    """Keep this rank's shard of every decoder layer, in place. All ranks of the group call it.

    Raises `CompatibilityError` when AutoTP leaves a layer whole or a rank without a part.
    """
    head = model.get_output_embeddings()
    model.set_output_embeddings(nn.Identity())
    _autotp(model, group, dtype)
    model.set_output_embeddings(head)
    for layer in model.get_decoder().layers:
        _replace_sharded(layer, group)
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and not getattr(module, "is_shard", False):
                raise CompatibilityError(f"AutoTP did not shard layer {name!r} of this architecture")


def _autotp(model: PreTrainedModel, group: RankGroup, dtype: torch.dtype) -> None:
    rank, size = str(group.rank), str(group.world_size)
    # DeepSpeed reads these even when it is told everything; this process is one rank only.
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_SIZE=size)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Its shared-memory all-reduce compiles for a minute, spins for ever when a peer dies and leaks;
    # and our sums do not go through DeepSpeed.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    # torch.distributed is up already, so this only wraps it (and asks MPI nothing).
    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False)
    deepspeed.init_inference(
        model,
        tensor_parallel={"tp_size": group.world_size},
        dtype=dtype,
        replace_with_kernel_inject=False,
    )


def _replace_sharded(parent: nn.Module, group: RankGroup) -> None:
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    for name, child in list(parent.named_children()):
        if isinstance(child, LinearAllreduce):
            setattr(parent, name, SummedLinear(_shard(child.weight, None), child.bias, group))
        elif isinstance(child, LinearLayer):
            setattr(parent, name, _shard(child.weight, child.bias))
        else:
            _replace_sharded(child, group)


def _shard(weight: Any, bias: Any) -> nn.Linear:
    if 0 in weight.shape:
        raise CompatibilityError(
            "AutoTP leaves a rank without a part of some layer: the model is too small for so many"
        )
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.data.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.data.contiguous(), requires_grad=False)
    linear.is_shard = True  # type: ignore[assignment]
    return linear
