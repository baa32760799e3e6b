"""Policy of the speculation gate: owned by the router, applied by the target, changed live."""

from dataclasses import dataclass

from outrider.core.errors import ConfigError
from outrider.core.speculation import SpeculationMode, SpeculationPreference, SpeculationReason

__all__ = ["ClassPolicy", "GateSettings", "RoundPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPolicy:
    """What the gate does differently for the requests of one traffic class."""

    traffic_class: str
    preference: SpeculationPreference | None = None
    """In place of everyone's; None: as for everyone."""
    max_num_draft_tokens: int | None = None
    """Most draft tokens per round; None: as for everyone. Never more than that."""

    def __post_init__(self) -> None:
        if not self.traffic_class:
            raise ConfigError("classes: requests without a class follow the settings for everyone")
        if self.max_num_draft_tokens is not None and self.max_num_draft_tokens < 0:
            raise ConfigError(f"classes: max_num_draft_tokens {self.max_num_draft_tokens} is below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """When to speculate and how far. Takes effect within one engine step."""

    preference: SpeculationPreference = SpeculationPreference.AUTO
    """OFF: never; ON: whenever possible, past the policy rules below; AUTO: by those rules."""
    mode: SpeculationMode | None = SpeculationMode.SEQUENTIAL
    """How blocks are obtained: on request (SEQUENTIAL), drafted ahead for likely outcomes (CACHED),
    or as the gate's own estimates say, plain decoding included (None)."""
    max_branches: int = 64
    """Cached mode: most outcomes per sequence that the draft prepares for; it takes as many as pay."""
    max_num_draft_tokens: int = 5
    """Most draft tokens per round, K."""
    batch_size_threshold: int | None = 32
    """Speculation is off while more sequences than this are running; None: no threshold."""
    batch_size_hysteresis: int = 2
    """Back on when at most threshold - hysteresis are running."""
    min_acceptance_rate: float = 0.4
    """Off for a sequence whose recent acceptance is below this; probe rounds lead back."""
    max_temperature: float | None = None
    """Off for requests above this temperature; None: no limit."""
    probe_interval_rounds: int = 32
    """While low acceptance keeps a sequence off, every so many rounds one round speculates."""
    classes: tuple[ClassPolicy, ...] = ()
    """For requests of some traffic classes; each class at most once."""

    def __post_init__(self) -> None:
        if self.mode is SpeculationMode.OFF:
            raise ConfigError("mode: OFF is no way to obtain blocks; set preference to off instead")
        if self.max_branches < 1:
            raise ConfigError(f"max_branches: {self.max_branches} is below 1")
        if self.max_num_draft_tokens < 0:
            raise ConfigError(f"max_num_draft_tokens: {self.max_num_draft_tokens} is below 0")
        if self.batch_size_threshold is not None and self.batch_size_threshold < 0:
            raise ConfigError(f"batch_size_threshold: {self.batch_size_threshold} is below 0")
        if self.batch_size_hysteresis < 0:
            raise ConfigError(f"batch_size_hysteresis: {self.batch_size_hysteresis} is below 0")
        if not 0.0 <= self.min_acceptance_rate <= 1.0:
            raise ConfigError(f"min_acceptance_rate: {self.min_acceptance_rate} is outside [0, 1]")
        if self.max_temperature is not None and self.max_temperature < 0:
            raise ConfigError(f"max_temperature: {self.max_temperature} is below 0")
        if self.probe_interval_rounds < 1:
            raise ConfigError(f"probe_interval_rounds: {self.probe_interval_rounds} is below 1")
        names = [one.traffic_class for one in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"classes: {sorted(names)} name one twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What the gate decided for the next round of one sequence."""

    mode: SpeculationMode
    num_draft_tokens: int
    reason: SpeculationReason
    branch_budget: int = 0
