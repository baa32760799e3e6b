"""The speculation gate: whether the next round of each sequence speculates, how far, and why.

Policy comes from the router as `GateSettings` and may change at any step. Every answer is a
`RoundPlan` with a reason, so that metrics, logs and clients can say why speculation is off.
"""

from collections.abc import Callable, Iterable

from outrider.core.policy import GateSettings, RoundPlan
from outrider.core.speculation import SpeculationMode, SpeculationPreference, SpeculationReason
from outrider.target.running import Round, RunningSequence

__all__ = ["Availability", "SpeculationGate"]

Availability = Callable[[RunningSequence], SpeculationReason | None]
"""Why no proposer can serve a sequence now; None when one can."""

_SMOOTHING = 0.2
_PROBE_SMOOTHING = 0.5  # a probe is rare, so it has to count for more
_ROUNDS_BEFORE_JUDGING = 4


class SpeculationGate:
    """Decides mode and K per sequence and step. Costs O(1) per sequence; nothing when off."""

    def __init__(self, settings: GateSettings, *, max_draft_tokens_limit: int) -> None:
        self._settings = settings
        self._limit = max_draft_tokens_limit
        self._closed_by_load = False

    @property
    def settings(self) -> GateSettings:
        """Settings in force."""
        return self._settings

    def update(self, settings: GateSettings) -> None:
        """Replace the settings; the next plan follows them."""
        self._settings = settings

    def observe_load(self, num_running: int) -> None:
        """Move the batch-size latch: closes above the threshold, opens at threshold - hysteresis."""
        threshold = self._settings.batch_size_threshold
        if threshold is None:
            self._closed_by_load = False
        elif num_running > threshold:
            self._closed_by_load = True
        elif num_running <= max(0, threshold - self._settings.batch_size_hysteresis):
            self._closed_by_load = False

    def observe_rounds(self, rounds: Iterable[Round]) -> None:
        """Update the recent acceptance of each sequence from its finished round."""
        for one in rounds:
            if one.proposal is None:
                continue
            running = one.running
            rate = one.commit.num_accepted / len(one.proposal)
            probing = running.rounds_since_probe >= self._settings.probe_interval_rounds
            weight = _PROBE_SMOOTHING if probing else _SMOOTHING
            old = running.recent_acceptance
            running.recent_acceptance = rate if old is None else old + weight * (rate - old)
            running.rounds_since_probe = 0

    def policy(self, running: RunningSequence) -> SpeculationReason | None:
        """Why the policy keeps speculation off for a sequence; None when it allows it."""
        settings, request = self._settings, running.sequence.request
        wish = request.speculation.preference
        if settings.preference is SpeculationPreference.OFF or settings.max_num_draft_tokens == 0:
            return SpeculationReason.OPERATOR_OFF
        if wish is SpeculationPreference.OFF or request.speculation.max_tokens == 0:
            return SpeculationReason.CLIENT_OFF
        if SpeculationPreference.ON in (wish, settings.preference):
            return None
        if self._closed_by_load:
            return SpeculationReason.BATCH_TOO_LARGE
        limit = settings.max_temperature
        if limit is not None and request.sampling.temperature > limit:
            return SpeculationReason.TEMPERATURE
        if self._acceptance_too_low(running):
            return SpeculationReason.LOW_ACCEPTANCE
        return None

    def plan(self, sequences: Iterable[RunningSequence], availability: Availability) -> None:
        """Set `plan` of each sequence for its next round."""
        for running in sequences:
            running.plan = self._plan_one(running, availability)
            if running.plan.num_draft_tokens == 0:
                running.rounds_since_probe += 1

    def off(self, reason: SpeculationReason) -> RoundPlan:
        """A plain round."""
        return RoundPlan(mode=SpeculationMode.OFF, num_draft_tokens=0, reason=reason)

    def engine_reason(self, draft_problem: SpeculationReason | None) -> SpeculationReason:
        """The answer for an ordinary AUTO request on this engine right now."""
        if self._settings.preference is SpeculationPreference.OFF or self._settings.max_num_draft_tokens == 0:
            return SpeculationReason.OPERATOR_OFF
        if draft_problem is not None:
            return draft_problem
        if self._closed_by_load and self._settings.preference is not SpeculationPreference.ON:
            return SpeculationReason.BATCH_TOO_LARGE
        return SpeculationReason.ON

    def _plan_one(self, running: RunningSequence, availability: Availability) -> RoundPlan:
        reason = self.policy(running) or availability(running)
        remaining = running.sequence.remaining_tokens
        if reason is None and remaining <= 1:
            # The verify step itself yields one token: a draft token could never be committed.
            reason = SpeculationReason.LAST_TOKEN
        if reason is not None:
            return self.off(reason)
        wanted = running.sequence.request.speculation.max_tokens
        k = min(self._settings.max_num_draft_tokens, self._limit, remaining - 1)
        if wanted is not None:
            k = min(k, wanted)
        return RoundPlan(mode=SpeculationMode.SEQUENTIAL, num_draft_tokens=k, reason=SpeculationReason.ON)

    def _acceptance_too_low(self, running: RunningSequence) -> bool:
        rate = running.recent_acceptance
        if rate is None or running.sequence.stats.speculative_rounds < _ROUNDS_BEFORE_JUDGING:
            return False
        if rate >= self._settings.min_acceptance_rate:
            return False
        return running.rounds_since_probe < self._settings.probe_interval_rounds
