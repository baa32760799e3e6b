"""Prompt sets: unique prompts, because repeated ones inflate every cache and every acceptance."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outrider
from outrider.core.errors import ConfigError

__all__ = ["MIXED", "Prompt", "PromptSet", "load_prompt_file", "load_prompt_sets", "prompt_folder"]

MIXED = "mixed"
"""Name of the set that takes a prompt of every other set in turn."""
_FOLDER = Path("infra", "benchmarks", "prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One user turn."""

    text: str
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of one kind. Raises `ConfigError` when one occurs twice."""

    name: str
    prompts: tuple[Prompt, ...]

    def __post_init__(self) -> None:
        texts = [one.text for one in self.prompts]
        if not texts:
            raise ConfigError(f"prompts: {self.name} is empty")
        if len(set(texts)) != len(texts):
            raise ConfigError(f"prompts: {self.name} repeats a prompt")

    def first(self, count: int) -> tuple[Prompt, ...]:
        """That many different prompts. Raises `ConfigError` if there are fewer."""
        if count > len(self.prompts):
            raise ConfigError(
                f"prompts: {self.name} has {len(self.prompts)} prompts, and {count} different ones are needed; "
                f"take the set {MIXED!r}, a file of your own, or fewer streams"
            )
        return self.prompts[:count]


def prompt_folder() -> Path:
    """The sets of the repository, below the working directory or beside the package. Raises `ConfigError`."""
    places = [Path.cwd() / _FOLDER, Path(outrider.__file__).parents[2] / _FOLDER]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"prompts: none of {', '.join(map(str, places))} exists; give a file of your own")


def load_prompt_sets(names: Sequence[str], folder: Path) -> tuple[PromptSet, ...]:
    """The named sets of a folder; `MIXED` is made of all. Raises `ConfigError` naming the known ones."""
    known = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    sets = []
    for name in names:
        if name == MIXED:
            sets.append(_mixed([load_prompt_file(path) for path in known.values()]))
        elif name in known:
            sets.append(load_prompt_file(known[name]))
        else:
            raise ConfigError(f"prompts: there is no set {name!r}; known: {', '.join([*known, MIXED])}")
    return tuple(sets)


def load_prompt_file(path: Path) -> PromptSet:
    """A `.jsonl` file of {"prompt", "temperature"} objects, or a JSON file in ShareGPT's format.

    Of a ShareGPT conversation the first human turn counts; repeated prompts are left out. Raises
    `ConfigError` naming file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"prompts: {path}: {error.strerror or error}") from error
    prompts = _from_lines(text, path) if path.suffix == ".jsonl" else _from_sharegpt(text, path)
    return PromptSet(name=path.stem, prompts=prompts)


def _mixed(sets: Sequence[PromptSet]) -> PromptSet:
    longest = max((len(one.prompts) for one in sets), default=0)
    in_turn = [one.prompts[rank] for rank in range(longest) for one in sets if rank < len(one.prompts)]
    return PromptSet(name=MIXED, prompts=tuple(in_turn))


def _from_lines(text: str, path: Path) -> tuple[Prompt, ...]:
    prompts = []
    # Not splitlines: it also splits at separators that a JSON string may hold as they are, U+2028 among them.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompts.append(Prompt(text=str(value["prompt"]), temperature=float(value.get("temperature", 0.0))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"prompts: {path}:{number}: not an object with a prompt: {error!r}") from error
    return tuple(prompts)


def _from_sharegpt(text: str, path: Path) -> tuple[Prompt, ...]:
    try:
        conversations = json.loads(text)
        turns = [_first_human_turn(one) for one in conversations]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"prompts: {path} is not in ShareGPT's format: {error!r}") from error
    unique = dict.fromkeys(turn for turn in turns if turn)
    return tuple(Prompt(text=turn) for turn in unique)


def _first_human_turn(conversation: dict[str, Any]) -> str | None:
    turns = conversation.get("conversations", conversation.get("conversation", []))
    return next((str(one["value"]) for one in turns if one["from"] in ("human", "user")), None)
