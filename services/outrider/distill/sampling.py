"""Sample texts from a target through its engine, many at once, each with seeds of its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.propose import ProposeRow, draw
from outrider.distill.records import PromptClass
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine

__all__ = ["SampleRequest", "SampledText", "Sampler", "blocks_needed"]

# Rows of one prefill: a long prompt should not hold a hundred running texts up.
_PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A prompt to be continued."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    noise_key: int
    prompt_class: PromptClass = PromptClass.GIVEN
    user_from: int | None = None
    """Where user text that the target made up begins in the prompt, if it did."""
    user_until: int = 0
    """Where that text ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledText:
    """A request, and the ids that continue its prompt, the end-of-text id included."""

    request: SampleRequest
    new_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and continuation."""
        return self.request.prompt_ids + self.new_ids


def blocks_needed(*, num_slots: int, max_len: int, block_size: int) -> int:
    """KV blocks of an engine that samples `num_slots` texts of `max_len` tokens at once."""
    return num_slots * -(-max_len // block_size)


@dataclass(slots=True)
class _Slot:
    request: SampleRequest
    block_table: tuple[int, ...]
    written: int = 0
    new_ids: list[int] = field(default_factory=list)

    @property
    def pending(self) -> list[int]:
        """What the next forward runs."""
        prompt = self.request.prompt_ids
        return list(prompt[self.written : self.written + _PREFILL_ROWS]) if not self.new_ids else self.new_ids[-1:]

    @property
    def prefix(self) -> list[int]:
        return [*self.request.prompt_ids, *self.new_ids]


class Sampler:
    """Keeps the slots of an engine full until the requests end. Owns all KV of the engine."""

    def __init__(
        self,
        engine: ModelEngine,
        *,
        num_slots: int,
        max_len: int,
        end_ids: frozenset[int],
        num_valid_ids: int | None = None,
        each_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_len` bounds prompt and continuation; the engine must have `blocks_needed` for it.

        `each_step` is called behind every forward.
        """
        limits = engine.limits
        per_slot = -(-max_len // limits.block_size)
        if per_slot * num_slots > limits.num_blocks:
            raise ValueError(f"{num_slots} texts of {max_len} tokens do not fit {limits.num_blocks} KV blocks")
        self._engine = engine
        self._max_len = max_len
        self._end_ids = end_ids
        self._num_valid_ids = num_valid_ids
        self._each_step = each_step
        self._tables = [tuple(range(slot * per_slot, (slot + 1) * per_slot)) for slot in range(num_slots)]

    def run(self, requests: Iterable[SampleRequest]) -> Iterator[SampledText]:
        """Continue every prompt; texts come as they end. A prompt longer than the limit is left out.

        The text of a request depends on its noise key, not on what runs beside it, up to rounding.
        """
        waiting = (one for one in requests if len(one.prompt_ids) < self._max_len and one.max_new_tokens > 0)
        free = list(reversed(self._tables))
        running: list[_Slot] = []
        while True:
            while free and (request := next(waiting, None)) is not None:
                running.append(_Slot(request, free.pop()))
            if not running:
                return
            self._step(running)
            self._each_step()
            for slot in [one for one in running if self._has_ended(one)]:
                running.remove(slot)
                free.append(slot.block_table)
                yield SampledText(request=slot.request, new_ids=tuple(slot.new_ids))

    def _step(self, running: list[_Slot]) -> None:
        """One forward: a chunk of prompts, and a row of every text that has begun."""
        drawing, slices, rows = [], [], 0
        for slot in running:
            pending = slot.pending
            if not slot.new_ids and rows + len(pending) > _PREFILL_ROWS and rows:
                continue
            rows += 0 if slot.new_ids else len(pending)
            slot.written += len(pending)
            draws = bool(slot.new_ids) or slot.written == len(slot.request.prompt_ids)
            slices.append(
                ForwardSlice(
                    token_ids=pending,
                    start=slot.written - len(pending),
                    block_table=slot.block_table,
                    num_logits=int(draws),
                )
            )
            if draws:
                drawing.append(slot)
        logits = self._engine.forward(ForwardBatch(slices=tuple(slices)))  # [drawing, vocab]
        for slot, token_id in zip(drawing, self._draw(logits, [_row(slot) for slot in drawing]), strict=True):
            slot.new_ids.append(token_id)

    def _draw(self, logits: Tensor, rows: Sequence[ProposeRow]) -> list[int]:
        """A token for each row. Greedy rows, which are most, are spared the law that the others are drawn from."""
        drawn = dict[int, int]()
        for maximum in (True, False):
            chosen = [index for index, row in enumerate(rows) if row.takes_maximum is maximum]
            own = logits if len(chosen) == len(rows) else logits[chosen]
            tokens = draw(own, [rows[index] for index in chosen], self._num_valid_ids)
            drawn.update(zip(chosen, tokens.token_ids, strict=True))
        return [drawn[index] for index in range(len(rows))]

    def _has_ended(self, slot: _Slot) -> bool:
        if not slot.new_ids:
            return False
        length = len(slot.request.prompt_ids) + len(slot.new_ids)
        return (
            slot.new_ids[-1] in self._end_ids
            or len(slot.new_ids) >= slot.request.max_new_tokens
            or length >= self._max_len
        )


def _row(slot: _Slot) -> ProposeRow:
    request = slot.request
    return ProposeRow(
        sampling=request.sampling,
        prefix=slot.prefix,
        prompt_len=len(request.prompt_ids),
        noise_key=request.noise_key,
        rule=VerificationRule.COUPLED,
        q_top_k=1,
    )
