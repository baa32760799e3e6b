"""Many runs: every batch size with every acceptance and mode."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from outrider.core.errors import ConfigError
from outrider.emulation.harness import EmulationClock, EmulationMode, EmulationRun, Row, run_emulation
from outrider.emulation.pair import PairProfile
from outrider.engine.emulated.text import TextSettings

__all__ = ["Sweep", "run_sweep"]

_ROUNDS = 512
_MIN_STEPS = 32
_WARMUP_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is varied, and what is not."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    acceptances: tuple[float, ...] = (0.4, 0.65, 0.78, 0.85)
    modes: tuple[EmulationMode, ...] = tuple(EmulationMode)
    k: int = 7
    """Draft tokens a round; `auto` chooses its own, whatever this says."""
    branches: int = 24
    """Most outcomes that are drafted for, of each sequence; `auto` leaves that to the draft."""
    steps: int | None = None
    """Measured engine steps of each run; None: as many as give several hundred rounds."""
    profile: PairProfile = field(default_factory=PairProfile)
    text: TextSettings = field(default_factory=TextSettings)

    def __post_init__(self) -> None:
        for name in ("batches", "acceptances", "modes"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name}: {values} is empty or names something twice")
        if min(self.batches) < 1:
            raise ConfigError(f"batches: {min(self.batches)} is below 1")
        if not all(0 <= one <= 1 for one in self.acceptances):
            raise ConfigError(f"acceptances: {self.acceptances} are not all in [0, 1]")
        if not 1 <= self.k <= 16:
            raise ConfigError(f"k: {self.k} is outside [1, 16]")
        if self.branches < 1:
            raise ConfigError(f"branches: {self.branches} is below 1")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps: {self.steps} is below 1")

    def __len__(self) -> int:
        return len(self.batches) * len(self.acceptances) * len(self.modes)

    def runs(self) -> Iterator[EmulationRun]:
        """Every run, in the order of a table: acceptance, then batch size, then mode."""
        for acceptance in self.acceptances:
            for batch in self.batches:
                for mode in self.modes:
                    steps = self.steps or max(_MIN_STEPS, _ROUNDS // batch)
                    yield EmulationRun(
                        mode=mode,
                        batch=batch,
                        acceptance=acceptance,
                        k=self.k,
                        branches=self.branches,
                        steps=steps,
                        warmup_steps=max(_MIN_STEPS // 2, steps // _WARMUP_SHARE),
                        profile=self.profile,
                        text=self.text,
                    )


def run_sweep(sweep: Sweep, *, clock: EmulationClock, jobs: int) -> Iterator[Row]:
    """The rows of a sweep in the order of its runs. Virtual runs are spread over `jobs` processes.

    Real time belongs to one run alone. Leaving the iteration drops what has not started. Raises what a
    run raises.
    """
    if clock == "wall" or jobs == 1:
        for run in sweep.runs():
            yield run_emulation(run, clock=clock)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(run_emulation, sweep.runs())
    finally:
        pool.shutdown(cancel_futures=True)
