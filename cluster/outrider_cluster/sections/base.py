"""The base of every section of a configuration file, and what several sections share.

Unknown keys are refused, every field is documented, and numbers that must be positive are checked
here, so that a negative or zero time-out can never mean "for ever" or "at once" further down.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from outrider.engine.config import PAGED_BLOCK_SIZE

__all__ = [
    "AutoscalingSettings",
    "CudaSettings",
    "DType",
    "KvSettings",
    "Port",
    "Scaled",
    "Section",
    "with_paged_blocks",
]


class Section(BaseModel):
    """Base of every section: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


Port = Annotated[int, Field(ge=0, le=65535)]
LabelWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$")]


DType = Literal["float32", "bfloat16", "float16"]


class AutoscalingSettings(Section):
    """Replicas follow the load."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1
    target_load: PositiveFloat = 0.7
    """Wanted load per replica: running and waiting sequences over `max_num_seqs` for targets,
    open requests over `max_running_requests` for routers, engines per draft for drafts."""
    target_kv_usage: float = Field(default=0.8, gt=0, le=1)
    """Targets: wanted share of KV blocks in use, where that is scarcer than seats."""
    target_queue_s: PositiveFloat = 2.0
    """Targets: longest wanted wait for a seat."""
    upscale_delay_s: NonNegativeFloat = 10.0
    """More replicas must have been wanted for this long. The speculation gate does not wait for it."""
    downscale_delay_s: NonNegativeFloat = 300.0
    """Fewer replicas must have been wanted for this long."""
    measure_interval_s: PositiveFloat = 5.0
    """How often replicas report their load."""
    look_back_s: PositiveFloat = 15.0
    """The load is the mean over this long."""

    @validator(mode="after")
    def _ordered(self) -> "AutoscalingSettings":
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        if self.look_back_s <= self.measure_interval_s:
            raise ValueError(
                f"look_back_s {self.look_back_s:g} must exceed measure_interval_s {self.measure_interval_s:g}: "
                "a mean needs more than one report"
            )
        return self


class Scaled(Section):
    """A deployment with a fixed or a following number of replicas."""

    num_replicas: PositiveInt | None = None
    """Fixed number of replicas; default: 1."""
    max_surge_percent: int = Field(default=0, ge=0, le=100)
    """Replicas, in percent and rounded up, that a rolling change may start before it ends old ones. 0:
    a replica ends before its successor starts, as it has to where every GPU is taken."""
    autoscaling: AutoscalingSettings | None = None
    """Set: the number of replicas follows the load between its bounds."""
    node_labels: dict[LabelWord, LabelWord] = Field(default_factory=dict)
    """Only nodes of the Ray cluster with all of these labels take a replica; default: any node with
    room. A cluster that is started here has no labels."""

    @validator(mode="after")
    def _one_of_both(self) -> "Scaled":
        if self.autoscaling is not None and self.num_replicas is not None:
            raise ValueError("set num_replicas or autoscaling, not both")
        return self


class KvSettings(Section):
    """The KV pool. Give `num_blocks` or `cache_gib`, or neither: then it gets what the memory plan has left,
    on a GPU all of it, on a CPU at most a quarter of the usable memory; a draft on a CPU follows its target."""

    block_size: PositiveInt = 16
    """Token positions per KV block; on a GPU the default is 256, which torch's paged attention wants."""
    num_blocks: PositiveInt | None = None
    """Blocks in the pool."""
    cache_gib: PositiveFloat | None = None
    """Size of the pool per rank, in GiB; the number of blocks follows from the model."""

    @validator(mode="after")
    def _one_size(self) -> "KvSettings":
        if self.num_blocks is not None and self.cache_gib is not None:
            raise ValueError("set only one of num_blocks and cache_gib")
        return self


class CudaSettings(Section):
    """How steps run on a GPU. Without one nothing of it applies."""

    attention: Literal["auto", "varlen", "gather"] = "auto"
    """`varlen`: torch's paged kernel, or no start; `gather`: a slow path that runs anywhere; `auto`: the
    first where it works."""
    graphs: Literal["off", "lazy", "startup"] = "lazy"
    """When CUDA graphs of decode and verify steps are recorded: at their first use, before serving, or never."""
    graph_batch_sizes: tuple[PositiveInt, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    """Sequences of the recorded steps; others are padded to the next."""
    graph_widths: tuple[PositiveInt, ...] = Field(default=(1, 2, 3, 4, 5, 6, 7, 8), min_length=1)
    """Rows per sequence of the recorded steps: 1 for plain steps, 1 + K for verify steps."""


def with_paged_blocks(section: Any, *, on_gpu: bool) -> Any:
    """The raw section with the block size that a GPU wants, where it names none itself."""
    if not on_gpu or not isinstance(section, dict):
        return section
    kv, cuda = section.get("kv", {}), section.get("cuda", {})
    gathers = isinstance(cuda, dict) and cuda.get("attention") == "gather"
    if gathers or not isinstance(kv, dict) or "block_size" in kv:
        return section
    return {**section, "kv": {"block_size": PAGED_BLOCK_SIZE, **kv}}
