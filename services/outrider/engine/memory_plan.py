"""What a device's memory goes to, and how many sequences it then holds. Arithmetic only.

Planned is the device that carries most: the GPU of rank 0, which alone turns hidden states into
logits. All ranks have as many KV blocks as that one can hold. On a CPU all ranks share one memory.

    usable   = memory x gpu_memory_utilization
    fixed    = weights + logits + workspace + CUDA graphs + runtime + one spare block (+ a co-located draft's)
    blocks   = (usable - fixed) / bytes of one block (+ the draft's block for the same tokens)
    sequences at a context of c tokens = blocks / ceil(c / block_size)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from outrider.core.errors import ConfigError
from outrider.engine.model_sizes import ModelSizes

__all__ = ["GIB", "DraftLoad", "MemoryItem", "MemoryPlan", "MemorySettings", "blocks_in", "plan_memory"]

GIB = 1 << 30
_LOGIT_BYTES = 4
_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": 0.5 + 4 / 32}
"""Bytes of a weight; int4 has a scale and a zero point of two bytes each for every 32 weights."""
_MOST_UTILIZATION = 0.97

WeightType = Literal["float32", "bfloat16", "float16", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """One model on one kind of device. Raises `ConfigError` naming the field that cannot work."""

    memory_bytes: int
    """Memory of one GPU; on a CPU, of the whole system."""
    gpu_memory_utilization: float = 0.9
    """Share of the memory that may be used; on a CPU, of the system's memory."""
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of weights, activations and KV."""
    quantization: Literal["none", "int4"] = "none"
    """int4: the decoder layers' linear weights have four bits."""
    tensor_parallel_size: int = 1
    max_model_len: int = 8192
    """The pool holds at least one sequence of this length."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_draft_tokens: int = 5
    """Largest K: every sequence has logits for 1 + K rows."""
    block_size: int = 16
    num_blocks: int | None = None
    """Blocks asked for; None: as many as fit."""
    kv_share: float = 1.0
    """Share of the usable memory that a pool of as many blocks as fit takes at most, unless one sequence
    of `max_model_len` needs more. Below 1 where the memory is not the engine's alone."""
    feature_bytes: int = 0
    """Bytes of the features that are stored for each position of the pool; 0 without a draft that reads them."""
    cuda_graph_bytes: int = GIB
    """Allowance for captured graphs. Nothing on a CPU."""
    runtime_bytes: int = GIB
    """Allowance per process for the CUDA context, libraries and communication buffers."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "tensor_parallel_size", "max_model_len", "max_num_seqs", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"num_blocks: {self.num_blocks} is below 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization: {self.gpu_memory_utilization} is outside (0, 1]")
        if not 0 < self.kv_share <= 1:
            raise ConfigError(f"kv_share: {self.kv_share} is outside (0, 1]")
        if self.num_draft_tokens < 0:
            raise ConfigError(f"num_draft_tokens: {self.num_draft_tokens} is below 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}"
            )

    @property
    def usable_bytes(self) -> int:
        """What the plan may spend."""
        return int(self.memory_bytes * self.gpu_memory_utilization)

    @property
    def ranks_on_device(self) -> int:
        """Ranks whose memory is this device's."""
        return self.tensor_parallel_size if self.device == "cpu" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoad:
    """A draft in one process that shares the device with the target."""

    sizes: ModelSizes
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: Literal["none", "int4"] = "none"
    max_num_batched_tokens: int = 512
    num_blocks: int | None = None
    """Blocks of its own pool; None: as many as the target's, so that it follows every sequence."""

    def settings(self, target: MemorySettings) -> MemorySettings:
        """The draft's settings on the target's device: it needs logits for one row a sequence."""
        return replace(
            target,
            dtype=self.dtype,
            quantization=self.quantization,
            tensor_parallel_size=1,
            num_draft_tokens=0,
            max_num_batched_tokens=max(self.max_num_batched_tokens, target.max_num_seqs),
            num_blocks=self.num_blocks,
            cuda_graph_bytes=target.cuda_graph_bytes // 4,
        )


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the budget."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The budget of one device."""

    settings: MemorySettings
    items: tuple[MemoryItem, ...]
    """Everything but KV."""
    block_bytes: int
    """Bytes on this device of one KV block, a co-located draft's for the same tokens included."""
    num_blocks: int

    @property
    def fixed_bytes(self) -> int:
        """Sum of the items."""
        return sum(one.num_bytes for one in self.items)

    @property
    def kv_bytes(self) -> int:
        """What the KV pool takes on this device."""
        return self.num_blocks * self.block_bytes

    @property
    def left_bytes(self) -> int:
        """What remains of the usable memory."""
        return self.settings.usable_bytes - self.fixed_bytes - self.kv_bytes

    def max_sequences(self, context: int) -> int:
        """Sequences of `context` tokens, prompt and output together, that the pool holds at once."""
        return self.num_blocks // -(-context // self.settings.block_size)

    def summary(self) -> str:
        """One line for the log of a start."""
        parts = ", ".join(f"{one.name} {one.num_bytes / GIB:.2f}" for one in self.items)
        length = self.settings.max_model_len
        return (
            f"memory plan, GiB of {self.settings.usable_bytes / GIB:.2f} usable: {parts}, KV {self.kv_bytes / GIB:.2f} "
            f"({self.num_blocks} blocks of {self.settings.block_size}), left {self.left_bytes / GIB:.2f}; "
            f"holds {self.max_sequences(length)} sequences of {length} tokens"
        )


def plan_memory(sizes: ModelSizes, settings: MemorySettings, draft: DraftLoad | None = None) -> MemoryPlan:
    """The budget of the device that carries most; `draft`: a co-located one.

    Raises `ConfigError` with the number to change when the device cannot hold everything and one
    sequence of `max_model_len`, or the blocks that were asked for.
    """
    if settings.max_model_len > sizes.max_positions:
        raise ConfigError(f"max_model_len: {settings.max_model_len} is above the model's {sizes.max_positions}")
    items = _items(sizes, settings, draft)
    block = _block_bytes(sizes, settings, draft)
    free = settings.usable_bytes - sum(one.num_bytes for one in items)
    if free < _blocks_needed(settings) * block:
        raise ConfigError(_refusal(sizes, settings, draft))
    num_blocks = settings.num_blocks or max(
        _blocks_needed(settings), min(free, int(settings.usable_bytes * settings.kv_share)) // block
    )
    return MemoryPlan(settings=settings, items=items, block_bytes=block, num_blocks=num_blocks)


def blocks_in(kv_bytes: int, sizes: ModelSizes, settings: MemorySettings) -> int:
    """Blocks in a pool of `kv_bytes` per rank; 0 when not even one fits."""
    positions = sizes.num_layers * settings.block_size
    one = 2 * positions * sizes.key_channels(settings.tensor_parallel_size) * _DTYPE_BYTES[settings.dtype]
    return int(kv_bytes // one)


def _items(sizes: ModelSizes, settings: MemorySettings, draft: DraftLoad | None) -> tuple[MemoryItem, ...]:
    items = _own_items(sizes, settings)
    if draft is not None:
        own = draft.settings(settings)
        items += [MemoryItem(f"draft {one.name}", one.num_bytes) for one in _own_items(draft.sizes, own)]
        if draft.num_blocks is not None:
            items.append(MemoryItem("draft KV", draft.num_blocks * _own_block_bytes(draft.sizes, own)))
    return tuple(one for one in items if one.num_bytes)


def _own_items(sizes: ModelSizes, settings: MemorySettings) -> list[MemoryItem]:
    ranks, here = settings.tensor_parallel_size, settings.ranks_on_device
    element = _DTYPE_BYTES[settings.dtype]
    weight = _DTYPE_BYTES["int4"] if settings.quantization == "int4" else element
    # On a CPU a tied head gets a packed copy of the table: the largest product of a small model.
    tables = 1 if sizes.tied_head and settings.device == "cuda" else 2
    # The step gives every sequence 1 + K rows as long as all rows fit into it.
    logits = min(settings.max_num_seqs * (1 + settings.num_draft_tokens), settings.max_num_batched_tokens)
    logits *= sizes.vocab_size
    channels = max(3 * sizes.mlp_channels(ranks), 3 * sizes.query_channels(ranks) + 2 * sizes.key_channels(ranks))
    activations = settings.max_num_batched_tokens * (3 * sizes.hidden_size + channels) * element
    # Beside the logits: what the head wrote, unless it was float32 already, and the laws made of them.
    sampling = logits * (_LOGIT_BYTES + (0 if settings.dtype == "float32" else element))
    return [
        MemoryItem("sharded weights", int(here * sizes.num_layers * sizes.layer_weights(ranks) * weight)),
        MemoryItem("replicated weights", int(here * (tables * sizes.table_weights + sizes.norm_weights) * element)),
        MemoryItem("logits", logits * _LOGIT_BYTES),
        MemoryItem("workspace", int(here * activations + sampling)),
        MemoryItem("CUDA graphs", settings.cuda_graph_bytes if settings.device == "cuda" else 0),
        MemoryItem("runtime", here * settings.runtime_bytes),
        # What the padding rows of a recorded step write to.
        MemoryItem("spare KV block", _own_block_bytes(sizes, settings) if settings.device == "cuda" else 0),
    ]


def _block_bytes(sizes: ModelSizes, settings: MemorySettings, draft: DraftLoad | None) -> int:
    own = settings.ranks_on_device * _own_block_bytes(sizes, settings) + settings.block_size * settings.feature_bytes
    if draft is None or draft.num_blocks is not None:
        return own
    return own + _own_block_bytes(draft.sizes, draft.settings(settings))


def _own_block_bytes(sizes: ModelSizes, settings: MemorySettings) -> int:
    # Keys and values of all layers, and once more those of one layer: attention gathers them.
    layers = sizes.num_layers + 1
    positions = layers * settings.block_size
    return int(2 * positions * sizes.key_channels(settings.tensor_parallel_size) * _DTYPE_BYTES[settings.dtype])


def _blocks_needed(settings: MemorySettings) -> int:
    longest = -(-settings.max_model_len // settings.block_size)
    return longest if settings.num_blocks is None else settings.num_blocks


def _refusal(sizes: ModelSizes, settings: MemorySettings, draft: DraftLoad | None) -> str:
    def missing(changed: MemorySettings) -> int:
        fixed = sum(one.num_bytes for one in _items(sizes, changed, draft))
        return fixed + _blocks_needed(changed) * _block_bytes(sizes, changed, draft) - changed.usable_bytes

    needed = settings.usable_bytes + missing(settings)
    what = "one sequence of max_model_len" if settings.num_blocks is None else f"num_blocks {settings.num_blocks}"
    advice = _advice(sizes, settings, needed, lambda changed: missing(changed) <= 0)
    budget = ", ".join(f"{one.name} {one.num_bytes / GIB:.2f}" for one in _items(sizes, settings, draft))
    return (
        f"memory: {missing(settings) / GIB:.2f} GiB are missing: {needed / GIB:.2f} GiB are needed with {what}, and "
        f"{settings.usable_bytes / GIB:.2f} GiB are usable ({budget}). To fit, "
        + (", or ".join(advice) if advice else f"take devices with at least {_device_needed(settings, needed)} GiB")
    )


def _advice(
    sizes: ModelSizes, settings: MemorySettings, needed: int, fits: Callable[[MemorySettings], bool]
) -> list[str]:
    """Every knob that would be enough on its own, with its value."""
    advice = []
    utilization = math.ceil(100 * needed / settings.memory_bytes) / 100
    if utilization <= _MOST_UTILIZATION:
        advice.append(f"raise gpu_memory_utilization to {utilization:.2f}")
    lower: list[tuple[str, int, int]] = [
        ("max_num_batched_tokens", settings.max_num_seqs, settings.max_num_batched_tokens),
        ("max_num_seqs", 1, settings.max_num_seqs),
    ]
    if settings.num_blocks is None:
        lower.insert(0, ("max_model_len", settings.block_size, settings.max_model_len))
    else:
        lower.insert(0, ("num_blocks", -(-settings.max_model_len // settings.block_size), settings.num_blocks))
    for knob, low, high in lower:
        # The smaller the value the less memory: bisect for the largest that fits.
        below, above = low - 1, high
        while above - below > 1:
            middle = (below + above) // 2
            if fits(replace(settings, **{knob: middle})):  # type: ignore[arg-type]
                below = middle
            else:
                above = middle
        if below >= low:
            advice.append(f"lower {knob} to {below}")
    more = range(settings.tensor_parallel_size + 1, sizes.kv_heads + 1)
    wider = (ranks for ranks in more if sizes.kv_heads % ranks == 0)
    enough = next((ranks for ranks in wider if fits(replace(settings, tensor_parallel_size=ranks))), None)
    if enough is not None and settings.device == "cuda":
        advice.append(f"raise tensor_parallel_size to {enough}")
    return advice


def _device_needed(settings: MemorySettings, needed: int) -> int:
    return math.ceil(needed / settings.gpu_memory_utilization / GIB)
