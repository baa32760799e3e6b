"""What `outrider distill` is asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider.core.errors import ConfigError
from outrider.distill.prompts import Conversation
from outrider.engine.config import DType
from outrider.engine.models.prepare import default_cache_dir

__all__ = ["DistillMethod", "DistillSettings", "StageMinutes"]

DistillMethod = Literal["draft_model", "eagle3"]

_DRAFT_LAYERS = 4
"""Of a draft model for which no number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMinutes:
    """The budget, stage by stage. Evaluation takes what it takes."""

    sample: float
    train: float

    @classmethod
    def of_total(cls, minutes: float) -> "StageMinutes":
        """Nearly as much for data as for training: with little of it, more training only learns it by heart."""
        return cls(sample=0.4 * minutes, train=0.45 * minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """Raises `ConfigError` naming the field that cannot work."""

    target: str
    """As `EngineConfig.model`."""
    output: Path
    """Becomes a standard Hugging Face folder; what the stages leave lies in `work` below it."""
    minutes: StageMinutes
    method: DistillMethod = "draft_model"
    prompts: tuple[Conversation, ...] = ()
    """Without any, the target makes user turns up behind its own chat template."""
    held_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By class, prompts that acceptance is measured on and that nothing is trained on."""
    device: str = "cpu"
    dtype: DType = "bfloat16"
    """Of sampling and evaluation; training keeps float32 weights and computes in bfloat16."""
    threads: int = 1
    num_layers: int | None = None
    """Of a draft model; None: `draft_layers` says how many."""
    hidden_size: int | None = None
    """Channels of the draft model; None: the target's, whose first layers it then starts from."""
    vocabulary_size: int = 5120
    """Ids that the draft can propose."""
    max_prompt_tokens: int = 256
    """Longer prompts are left out; so many times `num_slots` tokens of KV lie in memory."""
    max_new_tokens: int = 112
    num_slots: int = 64
    """Texts sampled at once."""
    top_k: int = 16
    """Log-probabilities kept of every position."""
    seed: int = 1
    cache_dir: Path = field(default_factory=default_cache_dir)
    command: str = "outrider distill"
    """For the model card."""

    def __post_init__(self) -> None:
        if self.num_layers is not None and self.num_layers < 1:
            raise ConfigError(f"num_layers: {self.num_layers} is below 1")
        for name in ("vocabulary_size", "max_prompt_tokens", "max_new_tokens", "num_slots", "top_k", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        for name, prompts in self.held_out.items():
            if not prompts:
                raise ConfigError(f"held_out: {name} has no prompts")
        if self.method == "eagle3":
            if self.num_layers is not None:
                raise ConfigError("num_layers (--layers): of a draft model; a head has one")
            if self.hidden_size is not None:
                raise ConfigError("hidden_size: of a draft model; a head has the target's channels")
        if not (self.minutes.sample > 0 and self.minutes.train > 0):
            raise ConfigError("minutes: every stage needs some time")

    @property
    def draft_layers(self) -> int:
        """Layers of a draft model."""
        return _DRAFT_LAYERS if self.num_layers is None else self.num_layers

    @property
    def work(self) -> Path:
        """What the stages leave to each other, and to a later run that resumes them."""
        return self.output / "work"
