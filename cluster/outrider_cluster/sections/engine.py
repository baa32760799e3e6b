"""What runs the model: `engine`, `model`, and the formula model's section."""

from enum import Enum
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from outrider_cluster.sections.base import DType, Section

__all__ = ["DeviceName", "EmulatedSettings", "EngineKind", "ModelSettings", "ScriptedSettings"]


DeviceName = Literal["h100-tp4-llama-70b", "h100-llama-1b"]
"""A profile of `outrider.engine.emulated`."""


class EngineKind(Enum):
    """What runs the model."""

    TORCH = "torch"
    """A real model."""
    SCRIPTED = "scripted"
    """A model computed by a formula: for tests and for trying a deployment without weights."""
    EMULATED = "emulated"
    """Step times of hardware that is not there, and a made-up text: for sizing, scaling and drills."""

    @property
    def has_weights(self) -> bool:
        """Whether there is a model to load, to tokenize for and to count the bytes of."""
        return self is EngineKind.TORCH


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


class EmulatedSettings(Section):
    """The devices and the text of `engine: emulated` (see `outrider.engine.emulated`)."""

    target_profile: DeviceName = "h100-tp4-llama-70b"
    """Hardware and model whose step times the target takes."""
    draft_profile: DeviceName = "h100-llama-1b"
    """The same for the draft."""
    acceptance: float = Field(default=0.85, ge=0, le=1)
    """Chance that the draft's first guess is the target's token."""
    confidence_spread: float = Field(default=0.5, ge=0, le=1)
    """How much the draft knows about its mistakes; 0: nothing."""
    slowdown: PositiveFloat = 1.0
    """Every step takes so many times as long: many engines on few cores then wait for their devices,
    as they do in production, and not for one another."""
    vocab_size: int = Field(default=128, ge=16)
    """Size of the made-up vocabulary, and of the logits."""
