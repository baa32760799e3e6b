"""What a run leaves in its work folder so that a later one goes on where it was."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError
from outrider.distill.settings import DistillSettings

__all__ = ["RunState", "SampledSoFar"]

_SAMPLED = "sampled.json"
_SETTINGS = "settings.json"
_OF_TEXTS = {"target": "--target", "method": "--method"}
"""What sampled texts belong to, and the options that say so."""
_OF_TRAINING = {"num_layers": "--layers", "hidden_size": "--hidden-size", "vocabulary_size": "--vocabulary"}
"""What a checkpoint belongs to: a head to its vocabulary alone. Everything else may change from run to run."""
_TRAINED = ("training.pt", "head.pt", "vocabulary.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSoFar:
    """How far the sampling stage is, over all runs."""

    seconds: float = 0.0
    rounds: int = 0


class RunState:
    """The small files of a work folder. Each is replaced as a whole: a run that is cut off loses no more."""

    def __init__(self, work: Path) -> None:
        """Take a folder that exists."""
        self._work = work

    def claim(self, settings: DistillSettings, *, sampled: bool) -> None:
        """Note what this run belongs to; `sampled` says that there are texts.

        Raises `ConfigError` naming an option that the run it resumes had otherwise.
        """
        trained = [name for name in _TRAINED if (self._work / name).is_file()]
        bound = (_OF_TEXTS if sampled else {}) | (_OF_TRAINING if trained else {})
        before, now = self._read(_SETTINGS), _noted(settings)
        for name, option in bound.items():
            if name in before and name in now and before[name] != now[name]:
                way = (
                    "" if name in _OF_TEXTS else f"delete {', '.join(trained)} there to train anew on the same texts, "
                )
                raise ConfigError(
                    f"{option}: {now[name]}, but what lies in {self._work} was made with {before[name]}; "
                    f"go on with that, {way}or take another --output"
                )
        self._write(_SETTINGS, now)

    @property
    def sampled(self) -> SampledSoFar:
        """As last noted."""
        read = self._read(_SAMPLED)
        return SampledSoFar(seconds=float(read.get("seconds", 0.0)), rounds=int(read.get("rounds", 0)))

    def note_sampled(self, sampled: SampledSoFar) -> None:
        """Replace what was noted."""
        self._write(_SAMPLED, {"seconds": sampled.seconds, "rounds": sampled.rounds})

    def _read(self, name: str) -> dict[str, Any]:
        path = self._work / name
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: cannot read it: {error}; delete it, or take another --output") from error

    def _write(self, name: str, value: dict[str, Any]) -> None:
        scratch = (self._work / name).with_suffix(".tmp")
        scratch.write_text(json.dumps(value) + "\n", encoding="utf-8")
        scratch.replace(self._work / name)


def _noted(settings: DistillSettings) -> dict[str, Any]:
    noted: dict[str, Any] = {
        "target": settings.target,
        "method": settings.method,
        "vocabulary_size": settings.vocabulary_size,
    }
    if settings.method == "draft_model":
        noted |= {"num_layers": settings.draft_layers, "hidden_size": settings.hidden_size}
    return noted
