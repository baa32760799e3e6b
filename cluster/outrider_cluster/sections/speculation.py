"""The section `speculation`: the gate's policy, and how a target waits and copies."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from outrider.core.policy import ClassPolicy, GateSettings
from outrider.core.speculation import SpeculationMode, SpeculationPreference
from outrider_cluster.sections.base import Section

__all__ = ["ClassSettings", "NgramSettings", "SpeculationSettings"]


def _in_words(value: object) -> object:
    # In YAML 1.1 the bare words on and off are booleans.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


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


Preference = Annotated[Literal["auto", "off", "on"], BeforeValidator(_in_words)]


class ClassSettings(Section):
    """What is different for the requests of one `traffic_class`."""

    preference: Preference | None = None
    """In place of everyone's."""
    max_num_draft_tokens: int | None = Field(default=None, ge=0, le=64)
    """Most draft tokens per round, where that is less than everyone's."""


class SpeculationSettings(Section):
    """Policy of the gate, which changes live, within one engine step; `max_draft_wait_ms` and `ngram`
    belong to the engine loop, and a change of them rolls the targets."""

    preference: Preference = "auto"
    """off: never; on: whenever possible, past the policy below; auto: by the policy."""
    mode: Literal["auto", "sequential", "cached"] = "sequential"
    """How blocks are obtained. sequential: drafted on request, while the target waits; cached: drafted
    ahead for likely outcomes, while the target verifies; auto: whatever the measured times, acceptance
    and hit rate say is fastest now, plain decoding included."""
    max_branches: PositiveInt = 64
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
    classes: dict[Annotated[str, Field(min_length=1, max_length=64)], ClassSettings] = Field(default_factory=dict)
    """By the `traffic_class` that requests name: what is different for them."""
    max_draft_wait_ms: PositiveFloat = 50.0
    """Longest planned wait for a block that was asked for. The wait follows the measured round trip;
    when it is over, the row goes on without a block."""
    ngram: NgramSettings = NgramSettings()

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
            classes=tuple(
                ClassPolicy(
                    traffic_class=name,
                    preference=None if one.preference is None else SpeculationPreference(one.preference),
                    max_num_draft_tokens=one.max_num_draft_tokens,
                )
                for name, one in sorted(self.classes.items())
            ),
        )
