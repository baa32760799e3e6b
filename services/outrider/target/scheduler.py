"""Which sequences run in a step, with how many rows, on which KV blocks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.core.proposal import Proposal
from outrider.core.verdict import Verdict
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.sequence_kv import KVCache, PrefixCacheCounters
from outrider.target.config import TargetConfig
from outrider.target.running import Round, RunningSequence
from outrider.target.waiting_line import WaitingLine

__all__ = ["ScheduledRow", "Scheduler", "StepBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """One sequence in one step: a prefill chunk, or its last token and the proposed block."""

    running: RunningSequence
    forward: ForwardSlice
    proposal: Proposal | None = None

    @property
    def decides(self) -> bool:
        """Whether this row commits tokens (a prefill chunk in the middle does not)."""
        return self.forward.num_logits > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The rows of one step, in forward order."""

    rows: tuple[ScheduledRow, ...]
    decodes_only: bool
    """True when no row prefills."""

    @property
    def deciding(self) -> list[ScheduledRow]:
        """Rows that get a verdict, in the order of their logits."""
        return [row for row in self.rows if row.decides]

    @property
    def num_rows(self) -> int:
        """Token rows of the forward."""
        return sum(len(row.forward.token_ids) for row in self.rows)

    @property
    def forward(self) -> ForwardBatch:
        """The ragged forward of this step."""
        return ForwardBatch(slices=tuple(row.forward for row in self.rows))


class Scheduler:
    """Continuous batching over paged KV. Only this class admits, preempts and ends sequences."""

    def __init__(self, config: TargetConfig, kv: KVCache) -> None:
        self._config = config
        self._kv = kv
        self._waiting = WaitingLine()
        self._running: list[RunningSequence] = []  # oldest first
        self._refused: tuple[int, int] | None = None
        """Handle and free blocks when the first in line last found no room."""
        self.num_preemptions = 0

    @property
    def running(self) -> Sequence[RunningSequence]:
        """Admitted sequences, oldest first. Valid until the next call that changes the scheduler."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._waiting)

    @property
    def oldest_arrival(self) -> float | None:
        """When the sequence arrived that has waited longest for its first admission; None: nobody waits."""
        waiting = [one.arrived_at for one in self._waiting if one.admitted_at is None]
        return min(waiting, default=None)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks in use."""
        return self._kv.usage

    @property
    def prefix_cache(self) -> PrefixCacheCounters:
        """Hits of the prefix cache."""
        return self._kv.counters

    def all(self) -> Iterator[RunningSequence]:
        """Every sequence, running or waiting."""
        yield from self._running
        yield from self._waiting

    def can_submit(self, key_id: str = "") -> bool:
        """Whether the waiting line has room for a sequence of this API key."""
        free_seats = self._config.max_num_seqs - len(self._running)
        return self._waiting.has_room(key_id, self._config.max_waiting_seqs + free_seats)

    def fits_alone(self, length: int) -> bool:
        """Whether a sequence of this final length fits into an empty pool."""
        return length <= self._kv.capacity_tokens

    def submit(self, running: RunningSequence) -> None:
        """Put a sequence in the line of its API key: higher priority first, then order of arrival."""
        self._waiting.add(running)

    def admit(self, now: float) -> list[RunningSequence]:
        """Move waiting sequences into the batch while seats and blocks last; return the new ones.

        The line is strict: nobody overtakes the first in line when it does not fit yet.
        """
        admitted = []
        while self._waiting and self._has_free_seat():
            candidate = self._waiting.first(self._running)
            cached = self._open(candidate)
            if cached is None:
                break
            self._waiting.admit(candidate)
            if candidate.admitted_at is None:
                candidate.admitted_at = now
                candidate.cached_prompt_tokens = min(cached, candidate.sequence.prompt_len)
            self._running.append(candidate)
            self._running.sort(key=lambda one: one.handle)
            admitted.append(candidate)
        return admitted

    def remove(self, running: RunningSequence) -> None:
        """Take a sequence out, wherever it stands, and free its KV."""
        if running in self._running:
            self._running.remove(running)
            self._kv.close(running.handle)
        else:
            self._waiting.remove(running)

    def expired(self, now: float) -> list[RunningSequence]:
        """Sequences whose deadline has passed."""
        return [one for one in self.all() if one.deadline is not None and now >= one.deadline]

    def decoding(self) -> list[RunningSequence]:
        """Running sequences that decode in the next step: all of their text but the last token is in KV."""
        return [one for one in self._running if self._pending(one) == 1]

    def schedule(self, proposals: Mapping[int, Proposal]) -> StepBatch:
        """Build the step: decode and verify rows first, then prefill chunks within the token budget.

        Reserves the blocks that the step writes. When they run out, drafted tokens go first, then
        the youngest sequences are preempted (recomputed later); the oldest always runs. While
        anything decodes, all prefill of the step together is one chunk at most.
        """
        decoding = self._secure_decoding()
        budget = self._config.max_num_batched_tokens
        # Every running sequence keeps one row, whatever the blocks before it ask for.
        spare = budget - len(self._running)
        rows: list[ScheduledRow] = []
        for running in decoding:
            row = self._decode_row(running, proposals.get(running.handle), spare)
            rows.append(row)
            spare -= len(row.forward.token_ids) - 1
        budget -= sum(len(row.forward.token_ids) for row in rows)
        prefill = self._prefill_rows(min(budget, self._config.prefill_chunk_tokens) if rows else budget)
        return StepBatch(rows=(*rows, *prefill), decodes_only=bool(rows) and not prefill)

    def commit(self, batch: StepBatch, verdicts: Iterable[Verdict], now: float) -> list[Round]:
        """Apply verdicts in batch order: commit text, roll KV back to it, free what has finished."""
        rounds = []
        pending = iter(verdicts)
        for row in batch.rows:
            running, sequence = row.running, row.running.sequence
            end = row.forward.start + len(row.forward.token_ids)
            if not row.decides:
                self._kv.advance(running.handle, sequence.token_ids, end)
                continue
            if running.prefilled_at is None:
                running.prefilled_at = now
            base_len = sequence.committed_len
            commit = sequence.commit(next(pending))
            if running.first_token_at is None:
                running.first_token_at = now
            # The last committed token has no KV yet; rejected rows are overwritten by later steps.
            self._kv.advance(running.handle, sequence.token_ids, base_len + commit.num_accepted)
            if commit.finish is not None:
                self.remove(running)
            rounds.append(Round(running=running, proposal=row.proposal, commit=commit))
        return rounds

    def _has_free_seat(self) -> bool:
        return len(self._running) < self._config.max_num_seqs

    def _pending(self, running: RunningSequence) -> int:
        """Committed tokens without KV; 1 means that the sequence decodes."""
        return running.sequence.committed_len - self._kv.computed_len(running.handle)

    def _open(self, candidate: RunningSequence) -> int | None:
        """Open KV for all of the text, with room for one more token; None while there is none.

        Reserved now: otherwise several admissions of one step would count the same blocks.
        """
        refusal = (candidate.handle, self._kv.num_free_blocks)
        if self._refused is not None and refusal[0] == self._refused[0] and refusal[1] <= self._refused[1]:
            # Nothing was freed since: a long text need not be hashed again in every step.
            return None
        cached = self._kv.try_open(candidate.handle, candidate.sequence.token_ids, spare_tokens=1)
        self._refused = refusal if cached is None else None
        return cached

    def _secure_decoding(self) -> list[RunningSequence]:
        """Reserve the next slot of every decoding sequence, oldest first; return those that have it.

        This comes before any drafted token gets a block: speculation must not preempt anybody.
        """
        decoding: list[RunningSequence] = []
        for running in list(self._running):
            if running not in self._running or self._pending(running) != 1:
                continue
            length = running.sequence.committed_len
            while running in self._running and not self._kv.can_reserve(running.handle, length):
                self._preempt(self._running[-1])
            if running in self._running:
                self._kv.reserve(running.handle, length)
                decoding.append(running)
        return decoding

    def _decode_row(self, running: RunningSequence, proposal: Proposal | None, spare: int) -> ScheduledRow:
        sequence = running.sequence
        block = proposal.trimmed(max(0, spare)) if proposal is not None else None
        length = sequence.committed_len + (len(block) if block is not None else 0)
        if block is not None and not (len(block) and self._kv.can_reserve(running.handle, length)):
            block = None
        drafted = block.token_ids if block is not None else ()
        self._kv.reserve(running.handle, sequence.committed_len + len(drafted))
        return ScheduledRow(
            running=running,
            proposal=block,
            forward=ForwardSlice(
                token_ids=(sequence.token_ids[-1], *drafted),
                start=sequence.committed_len - 1,
                block_table=self._kv.block_table(running.handle),
                num_logits=1 + len(drafted),
            ),
        )

    def _prefill_rows(self, budget: int) -> list[ScheduledRow]:
        """Prefill chunks, oldest sequence first, of `budget` tokens together.

        Of equal prompts that arrive together only the oldest is computed, and the others take its
        blocks over: a sequence waits where that saves it half of its chunk or more.
        """
        rows: list[ScheduledRow] = []
        under_way: dict[bytes, ScheduledRow] = {}
        for running in self._running:
            if budget <= 0:
                break
            if self._pending(running) <= 1:
                continue
            self._catch_up(running)
            row = self._prefill_row(running, budget)
            digest = self._kv.next_block_digest(running.handle, running.sequence.token_ids)
            older = under_way.setdefault(digest, row) if digest is not None else row
            if older is not row and 2 * self._saved(row, older) >= len(row.forward.token_ids):
                continue
            rows.append(row)
            budget -= len(row.forward.token_ids)
        return rows

    def _catch_up(self, running: RunningSequence) -> None:
        gained = self._kv.catch_up(running.handle, running.sequence.token_ids)
        if running.prefilled_at is None:
            cached = running.cached_prompt_tokens + gained
            running.cached_prompt_tokens = min(cached, running.sequence.prompt_len)

    def _saved(self, row: ScheduledRow, older: ScheduledRow) -> int:
        """Tokens of `row` that it would find cached after `older`, whose text is equal so far, has run."""
        size, start = self._kv.block_size, row.forward.start
        text, other = row.running.sequence.token_ids, older.running.sequence.token_ids
        end = min(older.forward.start + len(older.forward.token_ids), len(text) - 1)
        position = start - start % size
        while position + size <= end and text[position : position + size] == other[position : position + size]:
            position += size
        return position - start

    def _prefill_row(self, running: RunningSequence, budget: int) -> ScheduledRow:
        sequence = running.sequence
        start = self._kv.computed_len(running.handle)
        end = min(start + min(budget, self._config.prefill_chunk_tokens), sequence.committed_len)
        return ScheduledRow(
            running=running,
            forward=ForwardSlice(
                token_ids=sequence.token_ids[start:end],
                start=start,
                block_table=self._kv.block_table(running.handle),
                num_logits=1 if end == sequence.committed_len else 0,
            ),
        )

    def _preempt(self, running: RunningSequence) -> None:
        """Free a sequence's KV and put it back in line; its text and its draft stay.

        It is older than all of its key that wait with its priority, so it comes first among them.
        """
        self.num_preemptions += 1
        self._running.remove(running)
        self._kv.close(running.handle)
        self._waiting.add(running)
