"""An engine whose forward pass is a device clock and a synthetic text, with the interface of a real one.

The real verify and propose code judges and draws: the logits are made such that at temperature 0 the
target's draw is the synthetic token, and the draft's is its first guess, with the others ranked below
it. A step costs O(rows), however long the texts are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice
from outrider.engine.emulated.clock import DeviceClock
from outrider.engine.emulated.device import DeviceProfile
from outrider.engine.emulated.text import HEADER_LEN, Guesses, SyntheticText, TextSettings

__all__ = ["EmulatedConfig", "EmulatedEngine"]

_NOWHERE = -1
_LOWEST = -1000.0
_RANK_STEP = 0.5
_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedConfig:
    """Ordinary configuration of an emulated engine."""

    role: Literal["target", "draft"]
    """Whose logits: the text itself, or guesses at it."""
    device: DeviceProfile
    """How long a step takes."""
    text: TextSettings = field(default_factory=TextSettings)
    """The text of both sides; must be equal on target and draft."""
    vocab_size: int = 512
    """Small, so that logits cost nothing."""
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 8192

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        if self.block_size < HEADER_LEN:
            raise ConfigError(f"block_size: {self.block_size} is below {HEADER_LEN}, the header of a text")


class EmulatedEngine:
    """Implements `ModelEngine`, and `QueueingEngine` as a device with a queue does.

    Keeps tokens and positions in its KV slots to find the text's header.

    A row that attends to a position whose slot was never written, or was written for another position,
    raises `ValueError`, as far as O(1) look-ups see it: the header and the position before the slice.
    """

    def __init__(self, config: EmulatedConfig, clock: DeviceClock) -> None:
        self._config = config
        self._clock = clock
        self._text = SyntheticText(config.text, config.vocab_size)
        self._limits = EngineLimits(
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
        )
        slots = config.num_blocks * config.block_size
        self._tokens = [_NOWHERE] * slots
        self._positions = [_NOWHERE] * slots
        self.num_forwards = 0
        self.num_rows = 0
        self.busy_s = 0.0
        """Device time spent so far."""
        self._ready_at = clock.now()
        self._unfilled: tuple[Tensor, list[tuple[tuple[int, ...], int]]] | None = None
        self._fill_s = 0.0

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold."""
        return self._limits

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the tokens; the device is then busy, and `wait` fills the logits [sum of num_logits, vocab_size].

        Its time runs from the call on, or from the end of the forward before: what the emulation itself
        computes stands for no software of a real engine. `wait` lets the rest of that time pass; what the
        caller does before it is free, as it would be beside a real device.

        A step's time holds `launch_s` for the host: it draws the tokens of the step before, which needs
        the device to be done, and launches this one. On a clock that counts software the caller does
        that for real between two forwards, so that much of the gap between them is this step's own and
        not added to it a second time. All that the gap holds beyond `launch_s` comes on top; so does
        all of it where the device has been idle for the length of a step, and is not between two.
        """
        called = self._clock.now()
        self._fill()  # of a forward that nobody waited for
        for one in batch.slices:
            self._write(one)
        decided = [place for one in batch.slices for place in self._deciding(one)]
        logits = torch.full((len(decided), self._config.vocab_size), torch.nan)
        self._unfilled = (logits, decided)
        seconds = self._config.device.step_s(rows=batch.num_rows, kv_tokens=_kv_tokens(batch.slices))
        self.num_forwards += 1
        self.num_rows += batch.num_rows
        self.busy_s += seconds
        self._ready_at = self._start(called, seconds) + seconds
        return logits

    def wait(self) -> None:
        """Return when the device is done with all that it was given.

        The emulation makes its logits at the very end of that time, so that the interpreter is free for
        other threads before: a real device would not need it at all.
        """
        self._sleep_until(self._ready_at - 1.5 * self._fill_s)
        began = self._clock.now()
        self._fill()
        self._fill_s += _SMOOTHING * (self._clock.now() - began - self._fill_s)
        self._sleep_until(self._ready_at)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy tokens and positions of whole blocks; takes no device time."""
        size = self._config.block_size
        for source, destination in pairs:
            for slots in (self._tokens, self._positions):
                slots[destination * size : (destination + 1) * size] = slots[source * size : (source + 1) * size]

    def close(self) -> None:
        """Nothing to release."""

    def _start(self, called: float, seconds: float) -> float:
        """When a forward of so many seconds starts that was called then."""
        gap = called - self._ready_at
        if gap <= 0.0:
            return self._ready_at
        if not self._clock.counts_software or gap >= seconds:
            return called
        return called - min(gap, self._config.device.hardware.launch_s)

    def _sleep_until(self, moment: float) -> None:
        left = moment - self._clock.now()
        if left > 0.0:
            self._clock.run(left)

    def _fill(self) -> None:
        """Make the logits of the last forward, if they are not made yet."""
        if self._unfilled is not None:
            (logits, decided), self._unfilled = self._unfilled, None
            logits.fill_(_LOWEST)
            if decided and self._config.role == "target":
                ids = [self._text.token(header, position) for header, position in decided]
                logits.scatter_(1, torch.tensor(ids).unsqueeze(1), 0.0)
            elif decided:
                self._fill_guesses(logits, [self._text.guesses(header, position) for header, position in decided])

    def _fill_guesses(self, logits: Tensor, guesses: Sequence[Guesses]) -> None:
        ids = torch.tensor([one.token_ids for one in guesses])  # [rows, guesses]
        steps = _RANK_STEP * torch.arange(ids.shape[1])
        # A margin is above 0 by nature: what the draft draws is its best. Log-odds below that are
        # squeezed, not cut, so that the order of margins stays the order of confidence.
        margins = torch.tensor([one.margin for one in guesses]).exp().log1p()
        scores = -(margins.unsqueeze(1) + steps)
        scores[:, 0] = 0.0
        logits.scatter_(1, ids, scores)

    def _deciding(self, one: ForwardSlice) -> list[tuple[tuple[int, ...], int]]:
        """Header and position of every token that the slice's logits decide."""
        end = one.start + len(one.token_ids)
        positions = range(end - one.num_logits + 1, end + 1)
        if not positions:
            return []
        header = self._header(one, min(HEADER_LEN, end))
        return [(header[: min(HEADER_LEN, position)], position) for position in positions]

    def _header(self, one: ForwardSlice, length: int) -> tuple[int, ...]:
        first = one.block_table[0] * self._config.block_size
        if self._positions[first : first + length] != list(range(length)):
            raise ValueError("KV at the front of the text was never written for it")
        return tuple(self._tokens[first : first + length])

    def _write(self, one: ForwardSlice) -> None:
        size, end = self._config.block_size, one.start + len(one.token_ids)
        if end > self._config.max_model_len:
            raise ValueError(f"position {end - 1} is at or above max_model_len {self._config.max_model_len}")
        if end > len(one.block_table) * size:
            raise ValueError(f"position {end - 1} lies beyond a block table of {len(one.block_table)} blocks")
        if one.start and self._positions[self._slot(one, one.start - 1)] != one.start - 1:
            raise ValueError(f"KV at position {one.start - 1} was never written for this text")
        for position, token_id in enumerate(one.token_ids, one.start):
            if not 0 <= token_id < self._config.vocab_size:
                raise ValueError(f"token id {token_id} is outside 0 … {self._config.vocab_size - 1}")
            slot = self._slot(one, position)
            self._tokens[slot] = token_id
            self._positions[slot] = position

    def _slot(self, one: ForwardSlice, position: int) -> int:
        size = self._config.block_size
        return one.block_table[position // size] * size + position % size


def _kv_tokens(slices: Sequence[ForwardSlice]) -> int:
    """Positions whose KV a step reads. Slices on the same first block are branches of one text, and a
    kernel for trees reads what they share once: their longest context, and the own rows of each."""
    longest: dict[int, int] = {}
    for one in slices:
        longest[one.block_table[0]] = max(longest.get(one.block_table[0], 0), one.start)
    return sum(longest.values()) + sum(len(one.token_ids) for one in slices)
