"""Self-tuning: mode and K from what is measured online. Every estimate has a way back from being wrong."""

from collections import Counter
from collections.abc import Sequence

from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationMode
from outrider.target.objective import Choice, Estimates, Group, best_of_mode, best_wait, expected_tokens
from outrider.target.proposers import DraftTimes, ProposerCounters
from outrider.target.running import Round, RunningSequence
from outrider.target.step_times import VerifyTimes

__all__ = ["SpeculationTuner"]

_PRIOR_ACCEPTANCE = 0.7
_PRIOR_TRIALS = 4.0  # what the prior counts for at the start; it fades like everything seen
_PRIOR_WEIGHT = 6.0  # trials that the batch's mean counts for in a sequence's own estimate
_FORGETTING = 0.96  # per round
_PROBE_FORGETTING = 0.75  # probes are rare, so old rounds fade faster
_PRIOR_HIT_RATE = 0.8
_PRIOR_HIT_LENGTH = 7.0  # of the blocks behind which outcomes hit that often
_HIT_SMOOTHING = 0.05
_HIT_RECOVERY = 0.003  # per step outside cached mode, back to the prior
_STEPS_PER_CHOICE = 4
_PROBE_ROWS = 8  # sequences of a plain batch that a probe speculates for: enough to see acceptance rise
_STICKINESS = 1.03  # another mode has to be this much better
_MIN_GAIN = 1.05  # a draft's device and its energy are not free: less over plain is not worth them
_ACCEPTANCE_STEPS = 20  # acceptance is rounded to 1/20, so that alike rows share a group


class SpeculationTuner:
    """Chooses by `objective.best_of_mode` every few steps; remembers the choice in between."""

    def __init__(self, verify_times: VerifyTimes, counters: ProposerCounters) -> None:
        self._verify_times = verify_times
        self._counters = counters
        self._trials = _PRIOR_TRIALS
        self._hits = _PRIOR_ACCEPTANCE * _PRIOR_TRIALS
        self._hit_rate = _PRIOR_HIT_RATE
        self._hit_length = _PRIOR_HIT_LENGTH
        self._seen_lookups = self._seen_hits = 0
        self._choice: Choice | None = None
        self._weighed: frozenset[Group] = frozenset()
        self._age = 0
        self._plain_steps = 0
        self._probing = False
        self._probes_left = 0

    @property
    def mode(self) -> SpeculationMode:
        """The mode in force."""
        return self._choice.mode if self._choice is not None else SpeculationMode.OFF

    @property
    def acceptance(self) -> float:
        """Chance that a draft token is accepted if those before it are, over the batch."""
        return self._hits / self._trials

    def observe(self, rounds: Sequence[Round]) -> None:
        """Learn from the rounds of one step."""
        keep = _PROBE_FORGETTING if self._probing else _FORGETTING
        judged = [(one.running, one.commit.num_accepted, len(one.proposal)) for one in rounds if one.proposal]
        if judged:
            self._hits, self._trials = self._hits * keep, self._trials * keep
        for running, accepted, verified in judged:
            trials = accepted + (accepted < verified)
            running.learn_acceptance(accepted, trials, keep)
            self._hits += accepted / len(judged)
            self._trials += trials / len(judged)
        self._observe_hits()

    def choose(
        self, rows: Sequence[RunningSequence], settings: GateSettings, times: DraftTimes, *, drafts_ahead: bool
    ) -> None:
        """Renew the choice when it is due: every few steps, or when the batch has changed much."""
        self._age += 1
        due = self._choice is None or self._age >= _STEPS_PER_CHOICE
        self._probing = False
        if due and rows:
            self._age = 0
            groups = Counter(self._group(one, settings) for one in rows)
            self._weighed = frozenset(groups)
            self._choice = self._best(groups, self._estimates(times), drafts_ahead=drafts_ahead)
        if self.mode is not SpeculationMode.OFF:
            self._plain_steps = 0
            return
        self._plain_steps += 1
        if self._plain_steps >= settings.probe_interval_rounds:
            self._plain_steps = 0
            self._probing = True
            self._probes_left = _PROBE_ROWS

    def num_draft_tokens(self, running: RunningSequence, settings: GateSettings) -> int:
        """K for one sequence under the choice in force; a probe asks for few.

        A row that the choice has left out is probed once in a while, or its acceptance would never
        be seen to rise.
        """
        if self._probing:
            self._probes_left -= 1
            return min(2, settings.max_num_draft_tokens) if self._probes_left >= 0 else 0
        if self._choice is None:
            return 0
        group = self._group(running, settings)
        k = self._choice.num_draft_tokens.get(group, 0 if group in self._weighed else self._longest())
        left_out = k == 0 and self.mode is not SpeculationMode.OFF
        if left_out and running.rounds_since_probe >= settings.probe_interval_rounds:
            return min(1, settings.max_num_draft_tokens)
        return k

    def wait_tokens(
        self,
        hits: Sequence[RunningSequence],
        misses: Sequence[RunningSequence],
        settings: GateSettings,
        times: DraftTimes,
    ) -> int:
        """Draft tokens worth waiting for on behalf of rows whose outcome was not drafted ahead."""
        if not misses:
            return 0
        if self._verify_times.predict(1) == 0.0:
            return settings.max_num_draft_tokens if not hits and len(misses) == 1 else 0
        estimates = self._estimates(times)
        return best_wait(
            hit_rows=sum(1 + settings.max_num_draft_tokens for _ in hits),
            hit_tokens=sum(expected_tokens(self._acceptance_of(one), settings.max_num_draft_tokens) for one in hits),
            misses=Counter(self._group(one, settings) for one in misses),
            estimates=estimates,
        )

    def _best(self, groups: Counter[Group], estimates: Estimates, *, drafts_ahead: bool) -> Choice:
        modes = [SpeculationMode.OFF, SpeculationMode.SEQUENTIAL]
        if drafts_ahead:
            modes.append(SpeculationMode.CACHED)
        choices = {mode: best_of_mode(groups, estimates, mode) for mode in modes}
        best = max(choices.values(), key=lambda one: one.tokens_per_s)
        plain = choices[SpeculationMode.OFF]
        if best.tokens_per_s < _MIN_GAIN * plain.tokens_per_s:
            return plain
        same = choices.get(self.mode) if self._choice is not None else None
        return same if same is not None and best.tokens_per_s <= _STICKINESS * same.tokens_per_s else best

    def _longest(self) -> int:
        chosen = self._choice.num_draft_tokens.values() if self._choice is not None else ()
        return max(chosen, default=0)

    def _estimates(self, times: DraftTimes) -> Estimates:
        return Estimates(
            verify_s=self._verify_times.predict,
            draft_step_s=times.step_s,
            hop_s=times.hop_s,
            hit_rate=self._hit_rate,
            hit_length=self._hit_length,
        )

    def _group(self, running: RunningSequence, settings: GateSettings) -> Group:
        rounded = round(self._acceptance_of(running) * _ACCEPTANCE_STEPS) / _ACCEPTANCE_STEPS
        wanted = running.sequence.request.speculation.max_tokens
        limit = min(settings.max_num_draft_tokens, max(0, running.sequence.remaining_tokens - 1))
        return Group(rounded, limit if wanted is None else min(limit, wanted))

    def _acceptance_of(self, running: RunningSequence) -> float:
        hits = running.acceptance_hits + _PRIOR_WEIGHT * self.acceptance
        return hits / (running.acceptance_trials + _PRIOR_WEIGHT)

    def _observe_hits(self) -> None:
        lookups = self._counters.lookups - self._seen_lookups
        hits = self._counters.hits - self._seen_hits
        self._seen_lookups, self._seen_hits = self._counters.lookups, self._counters.hits
        if lookups:
            self._hit_rate += _HIT_SMOOTHING * (hits / lookups - self._hit_rate)
            if self.mode is SpeculationMode.CACHED and (longest := self._longest()):
                self._hit_length += _HIT_SMOOTHING * (longest - self._hit_length)
        else:
            self._hit_rate += _HIT_RECOVERY * (_PRIOR_HIT_RATE - self._hit_rate)
            self._hit_length += _HIT_RECOVERY * (_PRIOR_HIT_LENGTH - self._hit_length)
