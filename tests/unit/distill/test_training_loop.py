"""The schedule that every kind of training follows."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.distill.training_loop import LoopSettings, TrainingLoop


@dataclass(frozen=True)
class Batch:
    num_tokens: int = 1


def rates(folder: Path, *, steps: int) -> list[float]:
    """The learning rate of every step of a run of so many, one second each."""
    weight = nn.Parameter(torch.ones(2, 2))
    settings = LoopSettings(minutes=steps / 60, learning_rate=1.0, warmup_steps=40)
    loop = TrainingLoop([weight], settings, folder / f"{steps}.pt", itertools.count().__next__)
    seen: list[float] = []
    step = loop._optimizer.step

    def noted() -> None:
        seen.append(loop._optimizer.param_groups[0]["lr"])
        step()

    loop._optimizer.step = noted  # type: ignore[method-assign,assignment]

    def forward(batch: Batch, fraction: float) -> tuple[Tensor, float]:
        return weight.sum(), 0.0

    loop.run(itertools.repeat(Batch()), forward, lambda now: None)
    return seen


def test_the_rate_rises_in_steps_of_a_long_run_and_in_a_share_of_a_short_one(tmp_path: Path) -> None:
    long = rates(tmp_path, steps=4000)
    assert max(long) == long[39] > 0.99
    short = rates(tmp_path, steps=60)
    assert max(short) == short[3] > 0.98
    for seen in (long, short):
        peak = seen.index(max(seen))
        assert seen[: peak + 1] == sorted(seen[: peak + 1])
        assert seen[peak:] == sorted(seen[peak:], reverse=True)
        assert seen[-1] < 0.04


@pytest.mark.parametrize("field", ["minutes", "learning_rate", "warmup_share", "batch_tokens", "checkpoint_s"])
def test_settings_are_checked_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        LoopSettings(**{"minutes": 1.0, field: 0})  # type: ignore[arg-type]
