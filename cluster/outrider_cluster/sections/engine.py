"""What runs the model: `engine`, `model`, and the formula model's section."""

from enum import Enum

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from outrider_cluster.sections.base import DType, Section

__all__ = ["EngineKind", "ModelSettings", "ScriptedSettings"]


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
