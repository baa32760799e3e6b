"""The sections of a configuration file. Unknown keys are refused; every field is documented.

Numbers that must be positive are checked here, so that a negative or zero time-out can never mean
"for ever" or "at once" further down.
"""

from enum import Enum
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)
from pydantic import model_validator as validator

from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationMode, SpeculationPreference

__all__ = [
    "SELF_DRAFT",
    "AutoscalingSettings",
    "DataPlaneSettings",
    "DraftSettings",
    "EngineKind",
    "KvSettings",
    "ModelSettings",
    "NgramSettings",
    "PortSettings",
    "RaySettings",
    "RouterSettings",
    "ScriptedSettings",
    "Section",
    "SpeculationSettings",
    "TargetSettings",
    "TelemetrySettings",
]

SELF_DRAFT = "self"
"""The draft's model name that stands for the target's own weights."""

Port = Annotated[int, Field(ge=0, le=65535)]
DType = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of every section: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class EngineKind(Enum):
    """What runs the model."""

    TORCH = "torch"
    """A real model."""
    SCRIPTED = "scripted"
    """A model computed by a formula: for tests and for trying a deployment without weights."""


class ModelSettings(Section):
    """The target model."""

    name: str = Field(min_length=1)
    """A packaged model's short name, a folder, or a hub id `owner/name`."""
    served_name: str | None = None
    """Name that clients use; default: `name`."""
    dtype: DType = "bfloat16"
    """Number format of weights and activations."""
    max_model_len: PositiveInt
    """Longest prompt and output together, in tokens. The draft's look-ahead needs none of it."""

    @property
    def public_name(self) -> str:
        """The name that clients use."""
        return self.served_name or self.name


class ScriptedSettings(Section):
    """The formula model of `engine: scripted` (see `outrider.engine.scripted`)."""

    vocab_size: int = Field(default=64, ge=8)
    seed: NonNegativeInt = 3
    slope: PositiveFloat = 0.5
    """Steepness of the law; the larger, the closer to greedy."""
    draft_agreement: float = Field(default=0.8, ge=0, le=1)
    """Share of the prefixes where the draft's favourite is the target's."""


class KvSettings(Section):
    """The KV pool. Give `num_blocks` or `cache_gib`, not both."""

    block_size: PositiveInt = 16
    """Token positions per KV block."""
    num_blocks: PositiveInt | None = None
    """Blocks in the pool."""
    cache_gib: PositiveFloat | None = None
    """Size of the pool per rank, in GiB; the number of blocks follows from the model."""

    @validator(mode="after")
    def _one_size(self) -> "KvSettings":
        if (self.num_blocks is None) == (self.cache_gib is None):
            raise ValueError("set exactly one of num_blocks and cache_gib")
        return self


class AutoscalingSettings(Section):
    """Replicas follow the load."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1
    target_load: PositiveFloat = 0.7
    """Wanted load per replica: running and waiting sequences over `max_num_seqs` for targets,
    open requests over `max_running_requests` for routers, engines per draft for drafts."""
    upscale_delay_s: NonNegativeFloat = 10.0
    downscale_delay_s: NonNegativeFloat = 300.0

    @validator(mode="after")
    def _ordered(self) -> "AutoscalingSettings":
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        return self


class Scaled(Section):
    """A deployment with a fixed or a following number of replicas."""

    num_replicas: PositiveInt | None = None
    """Fixed number of replicas; default: 1."""
    autoscaling: AutoscalingSettings | None = None
    """Set: the number of replicas follows the load between its bounds."""

    @validator(mode="after")
    def _one_of_both(self) -> "Scaled":
        if self.autoscaling is not None and self.num_replicas is not None:
            raise ValueError("set num_replicas or autoscaling, not both")
        return self


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
    kv: KvSettings
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
    timeouts: GroupTimeouts = GroupTimeouts()


class DraftSettings(Scaled):
    """The draft: an accelerator that the target never depends on."""

    enabled: bool = True
    model: str = Field(default=SELF_DRAFT, min_length=1)
    """As `model.name`; `self` drafts with the target's own weights, which with `quantization`
    gives a cheaper copy of the target where no smaller sibling exists."""
    dtype: DType = "bfloat16"
    quantization: Literal["none", "int4"] = "none"
    """int4: weights are quantised when they are loaded."""
    max_model_len: PositiveInt | None = None
    """Longest text that the draft holds; default: the target's. Longer texts decode plainly."""
    kv: KvSettings
    max_num_seqs: PositiveInt = 256
    """Most sequences that one replica holds, over all its targets."""
    threads: PositiveInt = 1
    num_cpus: NonNegativeFloat = 1.0
    num_gpus: Literal[0, 1] = 0


class NgramSettings(Section):
    """Proposals copied from the sequence's own text, where the draft has none."""

    enabled: bool = False
    prompt_lookup_min: PositiveInt = 2
    """Shortest run of tokens that is looked for."""
    prompt_lookup_max: PositiveInt = 4
    """Longest run of tokens that is looked for."""

    @validator(mode="after")
    def _ordered(self) -> "NgramSettings":
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ValueError(
                f"prompt_lookup_max {self.prompt_lookup_max} is below prompt_lookup_min {self.prompt_lookup_min}"
            )
        return self


class SpeculationSettings(Section):
    """Policy of the gate. Everything here changes live, within one engine step."""

    preference: Literal["auto", "off", "on"] = "auto"
    """off: never; on: whenever possible, past the policy below; auto: by the policy."""
    mode: Literal["auto", "sequential", "cached"] = "sequential"
    """How blocks are obtained. sequential: drafted on request, while the target waits; cached: drafted
    ahead for likely outcomes, while the target verifies; auto: whatever the measured times, acceptance
    and hit rate say is fastest now, plain decoding included."""
    max_branches: PositiveInt = 24
    """cached: most outcomes per sequence that the draft prepares for."""
    max_num_draft_tokens: int = Field(default=5, ge=0, le=64)
    """Most draft tokens per round, K."""
    batch_size_threshold: NonNegativeInt | None = 32
    """Off while more sequences than this are running; null: no threshold."""
    batch_size_hysteresis: NonNegativeInt = 2
    min_acceptance_rate: float = Field(default=0.4, ge=0, le=1)
    """Off for a sequence below this recent acceptance; probe rounds lead back."""
    max_temperature: NonNegativeFloat | None = None
    """Off for requests above this temperature; null: no limit."""
    probe_interval_rounds: PositiveInt = 32
    max_draft_wait_ms: PositiveFloat = 50.0
    """Longest planned wait for a block that was asked for. The wait follows the measured round trip;
    when it is over, the row goes on without a block."""
    ngram: NgramSettings = NgramSettings()

    @field_validator("preference", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        # In YAML 1.1 the bare words on and off are booleans.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    def gate(self) -> GateSettings:
        """The settings as the gate reads them."""
        return GateSettings(
            preference=SpeculationPreference(self.preference),
            mode=None if self.mode == "auto" else SpeculationMode(self.mode),
            max_branches=self.max_branches,
            max_num_draft_tokens=self.max_num_draft_tokens,
            batch_size_threshold=self.batch_size_threshold,
            batch_size_hysteresis=self.batch_size_hysteresis,
            min_acceptance_rate=self.min_acceptance_rate,
            max_temperature=self.max_temperature,
            probe_interval_rounds=self.probe_interval_rounds,
        )


class RouterSettings(Scaled):
    """The public ingress: admission and dispatch."""

    max_running_requests: PositiveInt = 256
    """Most requests that one router holds open; more are refused with RESOURCE_EXHAUSTED."""
    max_running_requests_per_key: PositiveInt = 256
    """The same for one API key, so that no caller takes the whole router."""
    max_running_tokens: PositiveInt = 8_000_000
    """Prompt and possible output tokens of all that is open."""
    default_timeout_s: PositiveFloat = 600.0
    """Time limit of a request that names none."""
    max_timeout_s: PositiveFloat = 3600.0
    """Longest time limit that a request may name."""
    directory_interval_s: PositiveFloat = 1.0
    """How often the replicas are looked up."""
    directory_timeout_s: PositiveFloat = 3.0
    """How long such a look-up may take; the last view stays in force."""
    num_cpus: NonNegativeFloat = 0.1


class PortSettings(Section):
    """A listening port of Serve's proxy."""

    port: Port = 0
    """0: a free one is chosen and reported."""


class DataPlaneSettings(Section):
    """The gRPC streams between routers, rank 0 and drafts."""

    host: str | None = None
    """Address to bind and publish; default: the node's address in the Ray cluster."""


class RaySettings(Section):
    """The Ray cluster."""

    address: str | None = None
    """Cluster to join (`auto` or host:port); null starts one in this process, and ends it with it."""
    num_cpus: PositiveInt | None = None
    """Logical CPUs of a cluster that is started here; default: what the settings need."""
    num_gpus: NonNegativeInt | None = None
    """Logical GPUs of a cluster that is started here; default: what Ray finds."""
    dashboard: bool = False
    """Serve Ray's dashboard on the loopback."""
    health_check_period_s: PositiveFloat = 2.0
    """How often Serve asks every replica."""
    health_check_timeout_s: PositiveFloat = 10.0
    """A replica that leaves the question open this long is replaced."""
    graceful_shutdown_s: PositiveFloat = 10.0
    """How long a leaving replica may finish what it runs."""


class TelemetrySettings(Section):
    """Where spans go. Metrics are always on Ray's Prometheus port."""

    exporter: Literal["none", "console", "otlp"] = "none"
    endpoint: str | None = None
    """OTLP over gRPC: host:port in plain text, https://host:port with TLS."""
    sampling_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces that begin here; one that a client began keeps the client's decision."""

    @validator(mode="after")
    def _endpoint(self) -> "TelemetrySettings":
        if (self.exporter == "otlp") != (self.endpoint is not None):
            raise ValueError("endpoint belongs to exporter otlp, which needs one")
        return self
