"""What an engine is built from. Standard library only: settings are checked before torch is loaded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.core.errors import ConfigError
from outrider.engine.models.prepare import default_cache_dir

if TYPE_CHECKING:
    from outrider.engine.emulated.engine import EmulatedConfig
    from outrider.engine.scripted import ScriptedConfig

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "PAGED_BLOCK_SIZE",
    "Attention",
    "CudaGraphs",
    "DType",
    "EngineConfig",
    "EngineKind",
    "Quantization",
]

EngineKind = Literal["torch", "eagle3", "scripted", "emulated"]
DType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int4"]
Attention = Literal["auto", "varlen", "gather"]
CudaGraphs = Literal["off", "lazy", "startup"]

DEFAULT_BLOCK_SIZE = 16
"""Token positions per block where any number will do."""
PAGED_BLOCK_SIZE = 256
"""What the pages of torch's paged kernel are multiples of: see `engine.paged_kernels`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to build one engine. Raises `ConfigError` naming the field that cannot work."""

    model: str
    """A packaged model's name, a model folder, or a hub id; unused by `scripted` and `emulated`."""
    kind: EngineKind = "torch"
    """`torch` runs a model; `eagle3` runs a draft head over the features of its target; `scripted` is
    the fake that one computes by hand; `emulated` takes the time of hardware that is not there, and
    makes up its text."""
    head_of: str | None = None
    """Of an `eagle3` engine: its target, as `model`; the head shares its embedding and tokenizer."""
    feature_head: str | None = None
    """Of a target: the EAGLE-3 head that its features are stored for, as `model`; None: for none."""
    scripted: "ScriptedConfig | None" = None
    """Sizes and formula of a `scripted` engine, which takes nothing else from here."""
    emulated: "EmulatedConfig | None" = None
    """Device, text and sizes of an `emulated` engine, which takes nothing else from here."""
    cache_dir: Path = field(default_factory=default_cache_dir)
    """Where packaged models are prepared."""
    device: str = "cpu"
    """A torch device."""
    dtype: DType = "float32"
    """Type of weights, activations and KV. Logits are float32 always."""
    quantization: Quantization = "none"
    """`int4` keeps the decoder layers in four bits: for a draft, never for a target."""
    block_size: int | None = None
    """Token positions per KV block; None: 256 where torch's paged attention runs, else 16."""
    num_blocks: int | None = None
    """KV blocks in the pool. Give this or `kv_bytes`, before the engine is built."""
    kv_bytes: int | None = None
    """Bytes per rank for the KV pool; as many blocks as fit. Give this or `num_blocks`."""
    max_model_len: int | None = None
    """Positions of the longest sequence; without it, what the model was trained for."""
    tensor_parallel_size: int = 1
    """Ranks that share the model, one process each."""
    threads: int = 1
    """Threads of the matrix products. More than the free cores makes a step many times slower."""
    peer_timeout_s: float = 30.0
    """Seconds after which a rank that waits for another in the middle of a step gives the group up."""
    attention: Attention = "auto"
    """`varlen` is torch's paged kernel, on CUDA in 16 bits; `gather` copies keys and values together
    and runs anywhere; `auto` takes the first where it works."""
    cuda_graphs: CudaGraphs = "lazy"
    """When decode steps are recorded, which takes up to a second each: at their first use, all of them
    at start-up, or never. Only with the paged kernel."""
    graph_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Sequences of the recorded steps. A step is padded to the next recorded number of rows."""
    graph_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """Rows per sequence of the recorded steps: 1 for plain and draft steps, 1 + K for verify steps."""

    def __post_init__(self) -> None:
        if (self.kind == "scripted") != (self.scripted is not None):
            raise ConfigError("kind, scripted: a scripted engine, and no other, needs its own section")
        if (self.kind == "emulated") != (self.emulated is not None):
            raise ConfigError("kind, emulated: an emulated engine, and no other, needs its own section")
        if (self.kind == "eagle3") != (self.head_of is not None):
            raise ConfigError("kind, head_of: an eagle3 engine, and no other, is the head of a target")
        if self.feature_head is not None and self.kind != "torch":
            raise ConfigError(f"feature_head: an engine of kind {self.kind} has no features")
        if self.kind == "eagle3":
            self._check_eagle3()
        if self.kind in ("torch", "eagle3"):
            self._check_torch()

    def _check_torch(self) -> None:
        for name in ("tensor_parallel_size", "threads", "peer_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        for name in ("block_size", "num_blocks", "kv_bytes", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}: {value} is not above 0")
        if self.num_blocks is not None and self.kv_bytes is not None:
            raise ConfigError("num_blocks, kv_bytes: give only one of them")
        for name in ("graph_batch_sizes", "graph_widths"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be numbers above 0")
        if self.quantization == "int4":
            self._check_int4()
        if self._wants_pages:
            self._check_pages()

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or its default for this device and attention."""
        return self.block_size or (PAGED_BLOCK_SIZE if self._wants_pages else DEFAULT_BLOCK_SIZE)

    @property
    def _wants_pages(self) -> bool:
        return self.attention == "varlen" or (self.attention == "auto" and self._pages_on_cuda)

    def _check_eagle3(self) -> None:
        if self.quantization != "none" or self.tensor_parallel_size > 1:
            raise ConfigError("kind: an eagle3 head runs in one process and is not quantised")
        if self.attention == "varlen":
            raise ConfigError("attention: an eagle3 head gathers its keys; set attention to gather or auto")

    @property
    def _pages_on_cuda(self) -> bool:
        return self.kind == "torch" and self.device.startswith("cuda") and self.dtype != "float32"

    def _check_pages(self) -> None:
        if not self._pages_on_cuda:
            raise ConfigError(f"attention: varlen needs cuda and 16 bits, not {self.device} and {self.dtype}")
        if self.tokens_per_block % PAGED_BLOCK_SIZE:
            raise ConfigError(
                f"block_size: torch's paged attention takes multiples of {PAGED_BLOCK_SIZE}, not {self.block_size}; "
                f"leave it out, or set attention to gather, which is slow"
            )

    def _check_int4(self) -> None:
        if self.dtype != "bfloat16":
            raise ConfigError("quantization: int4 has bfloat16 activations; set dtype to bfloat16")
        if not self.device.startswith("cpu"):
            raise ConfigError(f"quantization: int4 runs on the CPU only, not on {self.device}")
        if self.tensor_parallel_size > 1:
            raise ConfigError("quantization: int4 is for a draft in one process; set tensor_parallel_size to 1")
