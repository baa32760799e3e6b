"""What a benchmark runs: modes, cells, and how their work is cut into pieces that alternate."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.core.errors import ConfigError
from outrider.local.bench.prompts import Prompt, PromptSet

__all__ = ["BenchPlan", "Cell", "Mode", "Piece"]


class Mode(Enum):
    """Who generates, and how. The values are part of the JSON report."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"
    HF_PLAIN = "hf_plain"
    HF_ASSISTED = "hf_assisted"

    @property
    def is_peer(self) -> bool:
        """Whether transformers generates."""
        return self in (Mode.HF_PLAIN, Mode.HF_ASSISTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Prompts that run without a break in one mode; then the next mode has its turn with the same."""

    prompts: tuple[Prompt, ...]
    concurrency: int | None
    """Closed loop: streams at once; None: open loop."""
    request_rate: float | None
    """Open loop: mean arrivals per second; None: closed loop."""
    seed: int
    """Of the sampled texts and of the arrivals: the same in every mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the table before modes: a prompt set under one load."""

    prompt_set: str
    prompts: tuple[Prompt, ...]
    concurrency: int | None
    request_rate: float | None

    def pieces(self, repeat: int) -> list[Piece]:
        """The work of one repeat. One stream at a time alternates after every prompt, so that a machine
        that slows down meanwhile slows all modes alike."""
        parts = [(one,) for one in self.prompts] if self.concurrency == 1 else [self.prompts]
        return [
            Piece(
                prompts=tuple(part),
                concurrency=self.concurrency,
                request_rate=self.request_rate,
                seed=1000 * repeat + number,
            )
            for number, part in enumerate(parts)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Everything that is measured. Raises `ConfigError` naming the option that cannot work."""

    prompt_sets: tuple[PromptSet, ...]
    modes: tuple[Mode, ...]
    concurrency: tuple[int, ...] = (1,)
    request_rate: float | None = None
    """Set: an open loop with Poisson arrivals takes the place of closed loops."""
    num_prompts: int = 4
    """Prompts per cell and repeat; a closed loop takes at least one for each of its streams."""
    max_tokens: int = 64
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError("concurrency: every number of streams must be at least 1")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate: {self.request_rate} is not above 0")
        if not self.modes:
            raise ConfigError("modes: nothing is to be measured")

    @property
    def max_streams(self) -> int:
        """Most requests at once. In an open loop all may be."""
        return self.num_prompts if self.request_rate is not None else max(self.concurrency)

    def cells(self) -> list[Cell]:
        """Every prompt set under every load."""
        loads: Sequence[tuple[int | None, float | None]] = [(one, None) for one in self.concurrency]
        if self.request_rate is not None:
            loads = [(None, self.request_rate)]
        return [
            Cell(
                prompt_set=one.name,
                prompts=one.first(max(self.num_prompts, streams or 1)),
                concurrency=streams,
                request_rate=rate,
            )
            for one in self.prompt_sets
            for streams, rate in loads
        ]

    def modes_of(self, cell: Cell) -> tuple[Mode, ...]:
        """What runs in a cell: transformers' `generate` takes one request at a time."""
        return tuple(mode for mode in self.modes if cell.concurrency == 1 or not mode.is_peer)

    @property
    def num_pieces(self) -> int:
        """Runs of one piece in one mode, all together: for a progress bar."""
        return self.repeats * sum(len(cell.pieces(0)) * len(self.modes_of(cell)) for cell in self.cells())
