"""One deployment's settings: read from YAML, checked as a whole. Reads the environment, and nobody else does."""

import os
import secrets
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from outrider.core.errors import ConfigError
from outrider.engine.models.heads import is_head
from outrider.engine.models.prepare import default_cache_dir
from outrider.rpc.channel_options import MAX_MESSAGE_BYTES
from outrider_cluster.sections import (
    SELF_DRAFT,
    DataPlaneSettings,
    DraftSettings,
    EmulatedSettings,
    EngineKind,
    HttpSettings,
    ModelSettings,
    PortSettings,
    RaySettings,
    RouterSettings,
    ScriptedSettings,
    Section,
    SecuritySettings,
    SpeculationSettings,
    TargetSettings,
    TelemetrySettings,
)
from outrider_cluster.yaml_source import YamlSource, field_problem

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "EMULATED_PREFIX",
    "Environment",
    "Settings",
    "default_settings",
    "load_settings",
    "parse_settings",
    "prepare_environment",
    "settings_of",
]

_DEFAULT_PRESET = "laptop.yaml"

EMULATED_PREFIX = "emulated"
"""How the served name of an emulated engine begins: in every response, metric and status."""


class Settings(Section):
    """Everything that one deployment needs."""

    engine: EngineKind = EngineKind.TORCH
    """torch: a real model; scripted: the formula model, for tests; emulated: the step times of other
    hardware and a made-up text, which the served name has to say."""
    model: ModelSettings
    target: TargetSettings
    draft: DraftSettings | None = None
    """Absent: no draft model, plain decoding (and n-gram proposals where they are on)."""
    speculation: SpeculationSettings = SpeculationSettings()
    router: RouterSettings = RouterSettings()
    scripted: ScriptedSettings = ScriptedSettings()
    emulated: EmulatedSettings = EmulatedSettings()
    grpc: PortSettings = PortSettings()
    http: HttpSettings = HttpSettings()
    data_plane: DataPlaneSettings = DataPlaneSettings()
    security: SecuritySettings = SecuritySettings()
    ray: RaySettings = Field(default_factory=RaySettings)
    telemetry: TelemetrySettings = TelemetrySettings()

    @property
    def active_draft(self) -> DraftSettings | None:
        """The draft's settings when there is a draft."""
        return self.draft if self.draft is not None and self.draft.enabled else None

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        problems = (
            self._batch_problem(),
            self._kv_problem(),
            self._draft_problem(),
            self._time_problem(),
            self._scaling_problem(),
            self._node_problem(),
            self._emulation_problem(),
        )
        for problem in problems:
            if problem is not None:
                raise ValueError(problem)
        return self

    def _batch_problem(self) -> str | None:
        rows, seqs = self.target.max_num_batched_tokens, self.target.max_num_seqs
        if rows < seqs:
            return (
                f"target.max_num_batched_tokens {rows} is below target.max_num_seqs {seqs}: "
                "a step holds at least one row per running sequence"
            )
        limit = self.target.max_draft_tokens_limit
        if self.speculation.max_num_draft_tokens > limit:
            return (
                f"speculation.max_num_draft_tokens {self.speculation.max_num_draft_tokens} is above "
                f"target.max_draft_tokens_limit {limit}"
            )
        if rows < 1 + self.speculation.max_num_draft_tokens:
            return (
                f"target.max_num_batched_tokens {rows} cannot hold one sequence's verify step of "
                f"1 + speculation.max_num_draft_tokens {self.speculation.max_num_draft_tokens} rows"
            )
        return None

    def _kv_problem(self) -> str | None:
        kv, length = self.target.kv, self.model.max_model_len
        if kv.num_blocks is not None and kv.num_blocks * kv.block_size < length:
            return (
                f"target.kv holds {kv.num_blocks} blocks of {kv.block_size} = {kv.num_blocks * kv.block_size} "
                f"positions, fewer than model.max_model_len {length}: not even one full sequence"
            )
        return None

    def _time_problem(self) -> str | None:
        router = self.router
        if router.default_timeout_s > router.max_timeout_s:
            return (
                f"router.default_timeout_s {router.default_timeout_s:g} is above "
                f"router.max_timeout_s {router.max_timeout_s:g}"
            )
        return None

    def _scaling_problem(self) -> str | None:
        draft = self.active_draft
        if draft is not None and draft.autoscaling is not None and self.target.autoscaling is None:
            return "draft.autoscaling: drafts follow the targets, whose number is fixed; set draft.num_replicas"
        return None

    def _node_problem(self) -> str | None:
        if self.ray.address is not None:
            return None
        for name in ("router", "target", "draft"):
            section = getattr(self, name)
            if section is not None and section.node_labels:
                return f"{name}.node_labels: the one node of a cluster that is started here has none; set ray.address"
        return None

    def _draft_problem(self) -> str | None:
        draft = self.active_draft
        if draft is None:
            return None
        if self.target.gpus_per_rank and not draft.num_gpus:
            return (
                "target.gpus_per_rank is 1 but draft.num_gpus is 0: a draft on a CPU cannot keep ahead of a GPU target"
            )
        if draft.method == "eagle3":
            return self._head_problem(draft)
        if is_head(draft.model):
            return f"draft.method: {draft.model!r} is an EAGLE-3 head; set draft.method to eagle3"
        if not self.engine.has_weights and draft.quantization != "none":
            return f"draft.quantization: the {self.engine.value} engine has no weights to quantise"
        return None

    def _head_problem(self, draft: DraftSettings) -> str | None:
        if draft.model == SELF_DRAFT:
            return "draft.model: method eagle3 needs the folder or hub id of a head"
        if not self.engine.has_weights:
            return f"draft.method: the {self.engine.value} engine has no features for an eagle3 head"
        if draft.quantization != "none":
            return "draft.quantization: an eagle3 head is not quantised"
        if self.speculation.mode == "cached":
            return "speculation.mode: an eagle3 head drafts on request; set sequential or auto"
        return None

    def _emulation_problem(self) -> str | None:
        if self.engine.has_weights:
            return None
        draft = self.active_draft
        if self.target.kv.num_blocks is None or (draft is not None and draft.kv.num_blocks is None):
            return f"engine {self.engine.value} has no bytes to count: set kv.num_blocks for target and draft"
        name = self.model.public_name
        if self.engine is EngineKind.EMULATED and not name.startswith(EMULATED_PREFIX):
            return (
                f"model.served_name: {name!r} must begin with {EMULATED_PREFIX!r}: "
                "nothing that an emulated engine reports may pass for a measurement"
            )
        if self.engine is EngineKind.EMULATED and self.target.tensor_parallel_size > 1:
            return "target.tensor_parallel_size: an emulated group is one process; its profile has the ranks"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the process's environment decides. Read once, at the edge."""

    cache_dir: Path
    """Where prepared models live (OUTRIDER_CACHE_DIR)."""
    auth_token: str = field(repr=False)
    """Shared secret of the data plane (OUTRIDER_AUTH_TOKEN); empty: none."""
    api_key: str = field(default="", repr=False)
    """What the commands show to a deployment that asks for keys (OUTRIDER_API_KEY); empty: nothing."""
    tls: str = ""
    """How the commands check a gateway that speaks TLS (OUTRIDER_TLS): `system`, or a PEM file of authorities;
    empty: they call in the clear."""

    @classmethod
    def read(cls) -> "Environment":
        """Read the variables now."""
        cache_dir = os.environ.get("OUTRIDER_CACHE_DIR")
        return cls(
            cache_dir=Path(cache_dir).expanduser() if cache_dir else default_cache_dir(),
            auth_token=os.environ.get("OUTRIDER_AUTH_TOKEN", ""),
            api_key=os.environ.get("OUTRIDER_API_KEY", ""),
            tls=os.environ.get("OUTRIDER_TLS", ""),
        )


def prepare_environment(settings: Settings) -> None:
    """Give this process and its children the defaults that Outrider needs; what is set stays.

    Call it before anything imports Ray, torch or tokenizers: they read these when they are imported.
    """
    defaults = {
        # Threads that spin beside each other slow one another down by an order of magnitude.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # Ray runs its workers at nice 15 otherwise, behind every other process of the machine.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A thread of Serve's that calls after the end would start another cluster.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        # Serve's proxy would take messages of 2 GiB from anybody.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(MAX_MESSAGE_BYTES),
        "RAY_AUTH_MODE": "token",
    }
    if settings.ray.address is None:
        # A cluster of our own: only its own processes know the token. Ray would write one to the home.
        defaults |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def load_settings(path: Path) -> Settings:
    """Read a file. Raises `ConfigError` with file, line and field of every problem."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from error
    return parse_settings(text, origin=str(path))


def default_settings() -> Settings:
    """The embedded configuration: the packaged model with a self-draft, on a laptop's CPU."""
    return parse_settings(
        files("outrider_cluster").joinpath("presets", _DEFAULT_PRESET).read_text(encoding="utf-8"),
        origin=_DEFAULT_PRESET,
    )


def parse_settings(text: str, *, origin: str) -> Settings:
    """Settings from YAML text; `origin` names it in errors. Raises `ConfigError`."""
    source = YamlSource(text, origin)
    try:
        return Settings.model_validate(source.value)
    except ValidationError as error:
        problems = [source.describe(one["loc"], _in_words(one)) for one in error.errors(include_url=False)]
        raise ConfigError("\n".join(problems)) from error


def settings_of(value: object, *, origin: str) -> Settings:
    """Settings from the content of a configuration that is no text any more; `origin` names it in errors.

    Raises `ConfigError` with the field of every problem.
    """
    try:
        return Settings.model_validate(value)
    except ValidationError as error:
        problems = [field_problem(one["loc"], _in_words(one)) for one in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{origin}: {one}" for one in problems)) from error


def _in_words(problem: "ErrorDetails") -> str:
    """What is wrong with one field; unknown keys are answered with the nearest known one."""
    if problem["type"] == "missing":
        return "is missing"
    if problem["type"] != "extra_forbidden":
        return problem["msg"]
    *path, key = problem["loc"]
    section: type[BaseModel] | None = Settings
    for name in path:
        known = section.model_fields.get(str(name)) if section is not None else None
        kinds = (known.annotation, *get_args(known.annotation)) if known is not None else ()
        section = next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)
    near = get_close_matches(str(key), section.model_fields, n=1) if section is not None else []
    return f"unknown key; did you mean {near[0]}?" if near else "unknown key"
