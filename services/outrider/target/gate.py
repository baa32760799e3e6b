"""The speculation gate: whether the next round of each sequence speculates, how far, and why.

Policy comes from the router as `GateSettings` and may change at any step. Every answer is a
`RoundPlan` with a reason, so that metrics, logs and clients can say why speculation is off.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from outrider.core.policy import GateSettings, RoundPlan
from outrider.core.speculation import SpeculationMode, SpeculationPreference, SpeculationReason
from outrider.target.proposers import DraftTimes
from outrider.target.running import Round, RunningSequence
from outrider.target.tuner import SpeculationTuner

__all__ = ["ProposerView", "SpeculationGate"]

_SMOOTHING = 0.2
_PROBE_SMOOTHING = 0.5  # a probe is rare, so it has to count for more
_ROUNDS_BEFORE_JUDGING = 4
_MAX_DRAFT_ROWS = 256  # branches times sequences: beyond it a draft step is no longer cheap


class ProposerView(Protocol):
    """What the gate asks of the proposers."""

    @property
    def times(self) -> DraftTimes:
        """What blocks cost."""
        ...

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

    def __init__(self, settings: GateSettings, *, max_draft_tokens_limit: int, tuner: SpeculationTuner) -> None:
        self._settings = settings
        self._classes = {one.traffic_class: one for one in settings.classes}
        self._limit = max_draft_tokens_limit
        self._tuner = tuner
        self._closed_by_load = False

    @property
    def settings(self) -> GateSettings:
        """Settings in force."""
        return self._settings

    def update(self, settings: GateSettings) -> None:
        """Replace the settings; the next plan follows them."""
        self._settings = settings
        self._classes = {one.traffic_class: one for one in settings.classes}

    def observe_load(self, num_running: int) -> None:
        """Move the batch-size latch: closes above the threshold, opens at threshold - hysteresis."""
        threshold = self._settings.batch_size_threshold
        if threshold is None:
            self._closed_by_load = False
        elif num_running > threshold:
            self._closed_by_load = True
        elif num_running <= max(0, threshold - self._settings.batch_size_hysteresis):
            self._closed_by_load = False

    def observe_rounds(self, rounds: Sequence[Round]) -> None:
        """Update the recent acceptance of each sequence from its finished round."""
        self._tuner.observe(rounds)
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
        operator, most = self._for_class(request.traffic_class)
        if operator is SpeculationPreference.OFF or most == 0:
            return SpeculationReason.OPERATOR_OFF
        if wish is SpeculationPreference.OFF or request.speculation.max_tokens == 0:
            return SpeculationReason.CLIENT_OFF
        if SpeculationPreference.ON in (wish, operator):
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
        able = []
        for running in sequences:
            reason = self._reason(running, proposers)
            if reason is None:
                able.append(running)
            else:
                running.plan, running.ahead = self.off(reason), None
                running.rounds_since_probe += 1
        if self._settings.mode is None:
            self._tuner.choose(able, self._settings, proposers.times, drafts_ahead=proposers.drafts_ahead)
        mode = self._mode(proposers)
        if mode is SpeculationMode.CACHED:
            self._plan_cached(able, proposers)
        else:
            for running in able:
                k = self._num_draft_tokens(running)
                running.ahead = None
                if k:
                    running.plan = _on(SpeculationMode.SEQUENTIAL, k)
                else:
                    self._leave_out(running)

    def _plan_cached(self, able: Sequence[RunningSequence], proposers: ProposerView) -> None:
        """A block in hand costs nothing; waiting for one delays every row, so it has to pay for all."""
        branches = max(1, min(self._settings.max_branches, _MAX_DRAFT_ROWS // max(1, len(able))))
        hits = [one for one in able if proposers.has_block(one)]
        misses = [one for one in able if not proposers.has_block(one)]
        wait = self._tuner.wait_tokens(hits, misses, self._settings, proposers.times)
        for running in able:
            k = self._num_draft_tokens(running)
            if k == 0:
                self._leave_out(running)
                continue
            waits = wait > 0 and not proposers.has_block(running)
            running.plan = _on(SpeculationMode.SEQUENTIAL, min(k, wait)) if waits else _on(SpeculationMode.CACHED, k)
            running.ahead = replace(_on(SpeculationMode.CACHED, k), branch_budget=branches)

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
        if self._settings.mode is None and self._tuner.mode is SpeculationMode.OFF:
            return SpeculationReason.DOES_NOT_PAY
        return SpeculationReason.ON

    def engine_mode(self, reason: SpeculationReason, proposers: ProposerView) -> SpeculationMode:
        """The mode that goes with `engine_reason`."""
        if reason is not SpeculationReason.ON:
            return SpeculationMode.OFF
        return self._mode(proposers)

    def _mode(self, proposers: ProposerView) -> SpeculationMode:
        mode = self._settings.mode if self._settings.mode is not None else self._tuner.mode
        if mode is SpeculationMode.CACHED and not proposers.drafts_ahead:
            return SpeculationMode.SEQUENTIAL
        return mode

    def _for_class(self, traffic_class: str) -> tuple[SpeculationPreference, int]:
        """The operator's preference and most draft tokens for requests of this class."""
        settings, own = self._settings, self._classes.get(traffic_class)
        if own is None:
            return settings.preference, settings.max_num_draft_tokens
        most = settings.max_num_draft_tokens
        if own.max_num_draft_tokens is not None:
            most = min(most, own.max_num_draft_tokens)
        return settings.preference if own.preference is None else own.preference, most

    def _leave_out(self, running: RunningSequence) -> None:
        """The estimates say that this sequence is faster without."""
        running.plan, running.ahead = self.off(SpeculationReason.DOES_NOT_PAY), None
        running.rounds_since_probe += 1

    def _reason(self, running: RunningSequence, proposers: ProposerView) -> SpeculationReason | None:
        reason = self.policy(running) or proposers.availability(running)
        if reason is None and running.sequence.remaining_tokens <= 1:
            # The verify step itself yields one token: a draft token could never be committed.
            return SpeculationReason.LAST_TOKEN
        return reason

    def _num_draft_tokens(self, running: RunningSequence) -> int:
        wanted = running.sequence.request.speculation.max_tokens
        k = self._settings.max_num_draft_tokens
        if self._settings.mode is None:
            k = self._tuner.num_draft_tokens(running, self._settings)
        _, most = self._for_class(running.sequence.request.traffic_class)
        k = min(k, most, self._limit, running.sequence.remaining_tokens - 1)
        return k if wanted is None else min(k, wanted)

    def _acceptance_too_low(self, running: RunningSequence) -> bool:
        rate = running.recent_acceptance
        if rate is None or running.sequence.stats.speculative_rounds < _ROUNDS_BEFORE_JUDGING:
            return False
        # The tuner weighs acceptance against cost itself, where it is in charge.
        if self._settings.mode is None or rate >= self._settings.min_acceptance_rate:
            return False
        return running.rounds_since_probe < self._settings.probe_interval_rounds


def _on(mode: SpeculationMode, num_draft_tokens: int) -> RoundPlan:
    return RoundPlan(mode=mode, num_draft_tokens=num_draft_tokens, reason=SpeculationReason.ON)
