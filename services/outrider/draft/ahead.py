"""Drafting ahead: while the target verifies a block, draft the next one for each likely outcome.

One round serves all sequences in flight: one forward for the guesses that are still missing, then
every branch of every sequence in lockstep. Branches share the KV of their common prefix.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from outrider.core.link import OutcomeTable
from outrider.core.ports import Clock
from outrider.decoding.propose import ProposeRow, propose
from outrider.draft.branch import Branch, BranchDrafter
from outrider.draft.config import DraftConfig
from outrider.draft.counters import DraftCounters
from outrider.draft.fan_out import Candidate, TableTime, best_fan_out
from outrider.draft.forked_text import ForkedText
from outrider.draft.link import Link
from outrider.draft.outcomes import Guess, InFlight, Outcome, OutcomeBranch, likely_outcomes
from outrider.draft.residents import Residents
from outrider.draft.sequence import DraftSequence
from outrider.draft.timing import StepTimer
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine, wait_of

__all__ = ["AheadDrafter"]

_TOLERANCE = 0.25
"""Of a step: what is added to a table may be this much later than tokens that are just in time."""
_SPARE_STEPS = 2
"""A table goes out this many steps before its last tokens would be late: a late one costs a whole block."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A sequence whose table is being made, and the step in flight that it is for."""

    link: Link
    sequence: DraftSequence
    in_flight: InFlight

    @property
    def current(self) -> bool:
        """False once a verdict or another launch has come."""
        return self.sequence.in_flight is self.in_flight

    def useful_s(self, now: float) -> float:
        """Until tokens of the table would be late; infinite when its target has named no time."""
        if self.in_flight.budget_s <= 0.0:
            return math.inf
        return self.in_flight.launched_at + self.in_flight.budget_s - self.link.margin.seconds - now


class AheadDrafter:
    """Makes outcome tables. Owns no state: everything hangs on the sequences."""

    def __init__(
        self,
        *,
        engine: ModelEngine,
        residents: Residents,
        branches: BranchDrafter,
        config: DraftConfig,
        clock: Clock,
        timer: StepTimer,
        counters: DraftCounters,
    ) -> None:
        self._engine = engine
        self._wait = wait_of(engine)
        self._residents = residents
        self._branches = branches
        self._config = config
        self._clock = clock
        self._timer = timer
        self._counters = counters

    @property
    def has_work(self) -> bool:
        """True when a table is wanted that has not been drafted."""
        return bool(self._waiting())

    def run(self, poll: Callable[[], None]) -> None:
        """Draft the tables that are wanted now and queue them. `poll` may bring verdicts in between."""
        flights = self._waiting()
        for one in flights:
            one.in_flight.done = True  # whatever happens, it is not tried again
        flights = self._guess(flights)
        poll()
        flights = [one for one in flights if one.current]
        planned = self._plan(flights)
        if planned:
            self._branches.draft(
                [made.branch for _, made in planned],
                num_valid_ids=min(flight.link.vocab_size for flight, _ in planned),
                keep_wanted=lambda branches: self._keep(branches, flights, poll),
                while_running=lambda: self._send_finished(flights, poll),
            )
            self._pace_all(flights, len(planned))  # with what the last step has added
        self._send_finished(flights, poll)
        self._branches.settle()

    def look_beyond(self, branches: Sequence[Branch], num_valid_ids: int) -> None:
        """Run the last token of finished blocks too, in time that would be idle.

        Whichever of them the target takes: what may follow it is then known when its verify starts, which
        saves the next table its first forward. The blocks themselves have been sent.
        """
        going = [one for one in branches if one.wanted and not one.ended and self._has_room(one)]
        for one in going:
            one.num_draft_tokens = len(one.token_ids) + 1
        self._branches.draft(going, num_valid_ids=num_valid_ids, keep_wanted=lambda active: active)

    def _has_room(self, branch: Branch) -> bool:
        """Make room for the last token's KV; False when there is none."""
        kv, length = self._residents.kv, len(branch.written) + len(branch.pending)
        if length > self._engine.limits.max_model_len or not kv.can_reserve(branch.kv_key, length):
            return False
        kv.reserve(branch.kv_key, length)
        return True

    def _waiting(self) -> list[_Flight]:
        # One that is far behind is prefilled first, in chunks: its rows would hold up everybody's tables.
        return [
            _Flight(link, sequence, sequence.in_flight)
            for link in self._residents.links.values()
            for sequence in link.sequences.values()
            if sequence.in_flight is not None
            and sequence.wants_table
            and sequence.num_unwritten <= self._config.max_catch_up_tokens
        ]

    def _guess(self, flights: Sequence[_Flight]) -> list[_Flight]:
        """Fill in the guesses that no block has left behind, by one forward over the tokens in flight."""
        ready, missing = [], []
        for one in flights:
            if not one.current:
                continue  # freed just now, in favour of another
            in_flight, sequence = one.in_flight, one.sequence
            in_flight.guesses = sequence.known_guesses(in_flight.token_ids)
            if len(in_flight.guesses) > len(in_flight.token_ids):
                ready.append(one)
                continue
            length = in_flight.base_len + len(in_flight.token_ids)
            # The row of the token before the first missing guess is run again if it was already.
            first_row = in_flight.base_len + len(in_flight.guesses) - 1
            fits = length <= self._engine.limits.max_model_len
            if fits and self._residents.prepare(sequence, length, keep=first_row):
                missing.append(one)
                ready.append(one)
        missing = [one for one in missing if one.current]
        if missing:
            self._run_guesses(missing)
        return ready

    def _run_guesses(self, missing: Sequence[_Flight]) -> None:
        slices, rows = [], []
        for one in missing:
            sequence, in_flight = one.sequence, one.in_flight
            text = [*sequence.text, *in_flight.token_ids]
            wanted = len(in_flight.token_ids) + 1 - len(in_flight.guesses)
            slices.append(
                ForwardSlice(
                    token_ids=text[len(sequence.written) :],
                    start=len(sequence.written),
                    block_table=self._residents.kv.block_table(sequence.kv_key),
                    num_logits=wanted,
                )
            )
            rows += [self._guess_row(sequence, text[: len(text) - wanted + 1 + row]) for row in range(wanted)]
        logits = self._engine.forward(ForwardBatch(slices=tuple(slices)))
        if self._wait is not None:
            self._wait()
        tokens = iter(propose(logits, rows, min(one.link.vocab_size for one in missing)))
        for forward, one in zip(slices, missing, strict=True):
            one.sequence.written.extend(forward.token_ids)
            for _ in range(forward.num_logits):
                token = next(tokens)
                one.in_flight.guesses.append(Guess(ranked=token.ranked_token_ids, margin=token.margin))

    def _guess_row(self, sequence: DraftSequence, prefix: list[int]) -> ProposeRow:
        opening = sequence.opening
        return ProposeRow(
            sampling=opening.sampling,
            prefix=prefix,
            prompt_len=opening.prompt_len,
            noise_key=opening.noise_key,
            rule=opening.rule,
            q_top_k=self._config.q_top_k,
            num_ranked=self._config.num_ranked,
        )

    def _plan(self, flights: Sequence[_Flight]) -> list[tuple[_Flight, OutcomeBranch]]:
        """Choose the outcomes, within the budgets of rows and time, and fork their branches."""
        chosen: list[tuple[_Flight, Outcome]] = []
        for one in flights:
            budget, model = one.in_flight.branch_budget, self._residents.model
            one.in_flight.block_len = one.in_flight.num_draft_tokens
            chosen += [
                (one, each) for each in likely_outcomes(one.in_flight, model, one.sequence.eos_token_ids, budget)
            ]
        chosen.sort(key=lambda candidate: -candidate[1].probability)
        chosen = chosen[: self._config.max_branch_rows]
        planned: list[tuple[_Flight, OutcomeBranch]] = []
        copies: list[tuple[int, int]] = []
        for flight, outcome in chosen[: self._fan_out(flights, chosen)]:
            made = self._fork(flight, outcome, copies)
            if made is not None:
                planned.append((flight, made))
        if copies:
            self._engine.copy_blocks(copies)
        return planned

    def _fan_out(self, flights: Sequence[_Flight], chosen: Sequence[tuple[_Flight, Outcome]]) -> int:
        """How many of the outcomes to draft for."""
        now, places = self._clock.now(), {id(one): place for place, one in enumerate(flights)}
        tables = [TableTime(one.in_flight.num_draft_tokens, one.useful_s(now)) for one in flights]
        most = self._timer.most_to_try if any(math.isfinite(one.left_s) for one in tables) else None
        return best_fan_out(
            [Candidate(places[id(flight)], outcome.probability) for flight, outcome in chosen[:most]],
            tables,
            step_s=lambda count: self._timer.expected_ms(count) / 1e3,
            acceptance=self._residents.model.first_rate,
        )

    def _fork(self, flight: _Flight, outcome: Outcome, copies: list[tuple[int, int]]) -> OutcomeBranch | None:
        """A branch with the sequence's KV up to the outcome's accepted length; None without room.

        Adds the blocks to copy before its first forward to `copies`.
        """
        sequence, in_flight, kv = flight.sequence, flight.in_flight, self._residents.kv
        shared = in_flight.base_len + outcome.num_accepted
        most = self._engine.limits.max_model_len
        k = min(in_flight.num_draft_tokens, most - shared)
        length = shared + k  # the prefix, the next token, and all drafted tokens but the last
        if k < 1 or len(sequence.written) < shared:
            return None
        # One token more than the block: see `look_beyond`.
        beyond = length < most and kv.can_fork(sequence.kv_key, shared, length + 1)
        if not beyond and not kv.can_fork(sequence.kv_key, shared, length):
            return None
        key = self._residents.new_kv_key()
        copies += kv.fork(sequence.kv_key, key, shared)
        kv.reserve(key, length + beyond)
        branch = sequence.new_branch(
            kv_key=key,
            written=ForkedText(sequence.text, in_flight.base_len, in_flight.token_ids[: outcome.num_accepted]),
            pending=[outcome.next_token_id],
            num_draft_tokens=k + beyond,
        )
        made = OutcomeBranch(outcome=outcome, branch=branch, block_id=flight.link.next_block_id())
        in_flight.branches[outcome.num_accepted, outcome.next_token_id] = made
        return made

    def _keep(self, branches: list[Branch], flights: Sequence[_Flight], poll: Callable[[], None]) -> list[Branch]:
        """Branches to go on with: those of steps that still run.

        `poll` may end some.
        """
        self._pace_all(flights, len(branches))
        if self._wait is None:
            self._send_finished(flights, poll)  # now, for the next forward keeps the thread
        poll()
        return [one for one in branches if one.wanted and not one.complete]

    def _pace_all(self, flights: Sequence[_Flight], num_branches: int) -> None:
        step_s, now = self._timer.expected_ms(num_branches) / 1e3, self._clock.now()
        for flight in flights:
            self._pace(flight, step_s=step_s, now=now)

    def _pace(self, flight: _Flight, *, step_s: float, now: float) -> None:
        """Decide how much of a table goes out now, and whether another step is worth making.

        A short block beats a late one: when the time is short the table goes out with what its branches
        have, with time to spare. Drafting goes on, and what is added follows as long as it may be in time.
        One token more is made, whose guesses the next table needs; then the device has to be free for the
        verdict.
        """
        in_flight = flight.in_flight
        branches = [made.branch for made in in_flight.branches.values()]
        if in_flight.budget_s <= 0.0 or not branches:
            return
        growing = [one for one in branches if not one.complete]
        useful_s = flight.useful_s(now)
        if useful_s >= _SPARE_STEPS * step_s:
            in_flight.block_len = in_flight.num_draft_tokens
        elif useful_s >= -_TOLERANCE * step_s or not in_flight.sent_len:
            length = min((len(one.token_ids) for one in growing), default=max(len(one.token_ids) for one in branches))
            in_flight.block_len = max(1, min(length, in_flight.num_draft_tokens))
        if useful_s < (1 - _TOLERANCE) * step_s:
            for one in growing:
                one.num_draft_tokens = min(one.num_draft_tokens, in_flight.block_len + 1)

    def _send_finished(self, flights: Sequence[_Flight], poll: Callable[[], None]) -> None:
        """Send the tables whose blocks are long enough now, best outcomes first."""
        sent = False
        for flight in flights:
            in_flight = flight.in_flight
            if in_flight.sent_len >= in_flight.block_len or not flight.current or not in_flight.branches:
                continue
            branches = [made.branch for made in in_flight.branches.values()]
            if all(one.complete or len(one.token_ids) >= in_flight.block_len for one in branches):
                self._send(flight)
                sent = True
        if sent:
            poll()  # takes them along

    def _send(self, flight: _Flight) -> None:
        """Queue the table, or what its blocks have gained since it was sent."""
        in_flight, sent_len = flight.in_flight, flight.in_flight.sent_len
        longer = [made for made in in_flight.branches.values() if len(made.branch.token_ids) > sent_len]
        in_flight.sent_len = in_flight.block_len
        if not sent_len:
            self._counters.tables += 1
            self._counters.outcomes += len(longer)
            self._residents.spans.drafted(flight.sequence.kv_key, what="table", size=len(longer))
        table = _table(flight, longer, with_laws=not flight.link.late_laws)
        # A greedy token's law says nothing that its id does not: such a block is judged by its ids.
        laws_follow = flight.link.late_laws and not flight.sequence.opening.sampling.greedy
        flight.sequence.remember_table(table, late_laws=[made.branch.laws for made in longer] if laws_follow else ())
        flight.link.send(table)


def _table(flight: _Flight, longer: Sequence[OutcomeBranch], *, with_laws: bool) -> OutcomeTable:
    """The columns of these outcomes. Made between two steps of the device: nothing is made for each block."""
    length = flight.in_flight.block_len
    blocks = [made.branch.token_ids[:length] for made in longer]
    return OutcomeTable(
        handle=flight.sequence.handle,
        base_len=flight.in_flight.base_len,
        parent_block_id=flight.in_flight.block_id,
        num_accepted=tuple([made.outcome.num_accepted for made in longer]),
        next_token_ids=tuple([made.outcome.next_token_id for made in longer]),
        block_ids=tuple([made.block_id for made in longer]),
        block_lens=tuple(map(len, blocks)),
        token_ids=tuple(chain.from_iterable(blocks)),
        laws=tuple(chain.from_iterable(made.branch.laws[:length] for made in longer)) if with_laws else (),
    )
