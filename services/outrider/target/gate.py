"""The speculation gate: whether the next round of each sequence speculates, how far, and why.

Policy comes from the router as `GateSettings` and may change at any step. Every answer is a
`RoundPlan` with a reason, so that metrics, logs and clients can say why speculation is off.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from outrider.core.policy import GateSettings, RoundPlan
from outrider.core.speculation import SpeculationMode, SpeculationPreference, SpeculationReason
from outrider.target.running import Round, RunningSequence

__all__ = ["ProposerView", "SpeculationGate"]

_SMOOTHING = 0.2
_PROBE_SMOOTHING = 0.5  # a probe is rare, so it has to count for more
_ROUNDS_BEFORE_JUDGING = 4
_MAX_DRAFT_ROWS = 256  # branches times sequences: beyond it a draft step is no longer cheap


class ProposerView(Protocol):
    """What the gate asks of the proposers."""

    @property
    def drafts_ahead(self) -> bool:
        """Whether blocks can be pushed for outcomes of a step that still runs."""
        ...

    def availability(self, running: RunningSequence) -> SpeculationReason | None:
        """Why no proposer can serve a sequence now; None when one can."""
        ...

    def has_block(self, running: RunningSequence) -> bool:
        """Whether the block for the present text is here already."""
        ...


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

    def plan(self, sequences: Sequence[RunningSequence], proposers: ProposerView) -> None:
        """Set what the next round of each sequence does, and what is drafted ahead during it."""
        ahead = self._settings.mode is SpeculationMode.CACHED and proposers.drafts_ahead
        branches = max(1, min(self._settings.max_branches, _MAX_DRAFT_ROWS // max(1, len(sequences))))
        for running in sequences:
            reason = self._reason(running, proposers)
            if reason is not None:
                running.plan, running.ahead = self.off(reason), None
                running.rounds_since_probe += 1
                continue
            # A block in hand costs nothing. Waiting for one delays every row of the batch, and pays
            # when there is only this one.
            waits = not ahead or (len(sequences) == 1 and not proposers.has_block(running))
            mode = SpeculationMode.SEQUENTIAL if waits else SpeculationMode.CACHED
            k = self._num_draft_tokens(running)
            running.plan = RoundPlan(mode=mode, num_draft_tokens=k, reason=SpeculationReason.ON)
            running.ahead = (
                RoundPlan(
                    mode=SpeculationMode.CACHED,
                    num_draft_tokens=k,
                    reason=SpeculationReason.ON,
                    branch_budget=branches,
                )
                if ahead
                else None
            )

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

    def engine_mode(self, reason: SpeculationReason, proposers: ProposerView) -> SpeculationMode:
        """The mode that goes with `engine_reason`."""
        if reason is not SpeculationReason.ON:
            return SpeculationMode.OFF
        ahead = self._settings.mode is SpeculationMode.CACHED and proposers.drafts_ahead
        return SpeculationMode.CACHED if ahead else SpeculationMode.SEQUENTIAL

    def _reason(self, running: RunningSequence, proposers: ProposerView) -> SpeculationReason | None:
        reason = self.policy(running) or proposers.availability(running)
        if reason is None and running.sequence.remaining_tokens <= 1:
            # The verify step itself yields one token: a draft token could never be committed.
            return SpeculationReason.LAST_TOKEN
        return reason

    def _num_draft_tokens(self, running: RunningSequence) -> int:
        wanted = running.sequence.request.speculation.max_tokens
        k = min(self._settings.max_num_draft_tokens, self._limit, running.sequence.remaining_tokens - 1)
        return k if wanted is None else min(k, wanted)

    def _acceptance_too_low(self, running: RunningSequence) -> bool:
        rate = running.recent_acceptance
        if rate is None or running.sequence.stats.speculative_rounds < _ROUNDS_BEFORE_JUDGING:
            return False
        if rate >= self._settings.min_acceptance_rate:
            return False
        return running.rounds_since_probe < self._settings.probe_interval_rounds
