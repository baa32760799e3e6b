"""The sections `target` and its time limits."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from outrider_cluster.sections.base import CudaSettings, KvSettings, Scaled, Section, with_paged_blocks

__all__ = ["GroupTimeouts", "TargetSettings"]


class GroupTimeouts(Section):
    """How long a tensor-parallel group may take; all in seconds, all above zero."""

    start_s: PositiveFloat = 600.0
    """From creating the rank actors to a served engine, loading the weights included."""
    collective_s: PositiveFloat = 30.0
    """One collective operation; a hung peer shows after this long."""
    heartbeat_interval_s: PositiveFloat = 1.0
    """How often the front asks every rank."""
    heartbeat_s: PositiveFloat = 10.0
    """A rank that has not answered for this long counts as hung."""
    rebuild_backoff_s: PositiveFloat = 1.0
    """Pause before the second rebuild in a row; doubles up to `rebuild_backoff_max_s`."""
    rebuild_backoff_max_s: PositiveFloat = 30.0
    """Longest pause. A group that served for this long clears the record of failures; after five in a row Serve
    may try another place."""

    @validator(mode="after")
    def _ordered(self) -> "GroupTimeouts":
        if self.heartbeat_s <= self.heartbeat_interval_s:
            raise ValueError(f"heartbeat_s {self.heartbeat_s} must exceed heartbeat_interval_s")
        if self.rebuild_backoff_max_s < self.rebuild_backoff_s:
            raise ValueError(f"rebuild_backoff_max_s {self.rebuild_backoff_max_s} is below rebuild_backoff_s")
        return self


class TargetSettings(Scaled):
    """The target: one tensor-parallel group per replica."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks per replica, all on one node."""
    kv: KvSettings = KvSettings()
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory (of the system's, without GPUs) that the memory plan may spend; what
    does not fit into it is refused at the start."""
    max_num_seqs: PositiveInt = 64
    """Most sequences in one step."""
    max_num_batched_tokens: PositiveInt = 2048
    """Most token rows in one step: prefill chunks, plain rows and draft rows together."""
    max_waiting_seqs: NonNegativeInt = 256
    """Sequences that may wait for admission; more are refused."""
    prefill_chunk_tokens: PositiveInt = 512
    """Most prompt tokens of one sequence in one step, so that running streams never stall longer."""
    max_draft_tokens_limit: int = Field(default=16, ge=1, le=64)
    """Upper bound of K for every setting and request."""
    enable_prefix_cache: bool = True
    """Reuse the KV of prompts that begin alike."""
    threads_per_rank: PositiveInt = 1
    """CPU threads of one rank's matrix products."""
    cpus_per_rank: NonNegativeFloat = 1.0
    """CPUs that Ray reserves per rank."""
    gpus_per_rank: Literal[0, 1] = 0
    """1: each rank has its own GPU."""
    cuda: CudaSettings = CudaSettings()
    timeouts: GroupTimeouts = GroupTimeouts()

    @validator(mode="before")
    @classmethod
    def _paged_blocks(cls, section: Any) -> Any:
        return with_paged_blocks(section, on_gpu=isinstance(section, dict) and bool(section.get("gpus_per_rank")))
