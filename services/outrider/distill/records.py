"""Labelled texts on disk: token ids, and what the target thinks of every position.

A shard is one safetensors file that holds whole texts, concatenated; it appears complete or not at
all, so a stage that was interrupted goes on behind the last shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.errors import ConfigError

__all__ = ["LabelledText", "PromptClass", "RecordStore", "TokenKind"]

_SUFFIX = ".safetensors"
_FEATURES = "feats"


class TokenKind(IntEnum):
    """What stands behind a position, which decides whether it is worth learning."""

    PROMPT = 0
    """A token of the prompt or of the chat template."""
    USER = 1
    """User text that the target itself made up."""
    ANSWER = 2
    """The target's answer."""
    END = 3
    """Nothing: it is the last token of its text, and has no label."""


class PromptClass(IntEnum):
    """Where a prompt came from; acceptance is reported by it."""

    CHAT = 0
    CODE = 1
    SAMPLED = 2
    GIVEN = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledText:
    """One text of n tokens. Position i carries the target's law of token i + 1."""

    ids: Tensor
    """[n], int32."""
    kind: Tensor
    """[n], int8: the `TokenKind` of token i + 1."""
    top_ids: Tensor
    """[n, k], int32: the target's likeliest next tokens, best first."""
    top_logp: Tensor
    """[n, k], float16: their log-probabilities at temperature 1."""
    hidden: Tensor
    """[n, hidden_size], bfloat16: the target's last hidden state, behind its final norm."""
    prompt_class: PromptClass
    temperature: float
    """Of the answer; 0 is greedy."""
    features: Tensor | None = None
    """[n, 3, hidden_size], bfloat16: what enters a low, a middle and a high layer, for an EAGLE-3 head."""

    def __len__(self) -> int:
        return int(self.ids.shape[0])


class RecordStore:
    """The shards of one folder, in the order in which they were written."""

    def __init__(self, folder: Path) -> None:
        """Take a folder, which is made when the first shard is written."""
        self._folder = folder

    @property
    def num_shards(self) -> int:
        """Complete shards."""
        return len(self._shards())

    def append(self, texts: Sequence[LabelledText], prefix: Tensor) -> None:
        """Write a shard. `prefix` [p] are ids that stand before every text, kept once and unlabelled."""
        if not texts:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: torch.cat([getattr(one, name) for one in texts]).contiguous()
            for name in ("ids", "kind", "top_ids", "top_logp", "hidden")
        }
        features = [one.features for one in texts if one.features is not None]
        if features:
            tensors[_FEATURES] = torch.cat(features).contiguous()
        tensors["prefix"] = prefix.to(torch.int32)
        tensors["length"] = torch.tensor([len(one) for one in texts], dtype=torch.int32)
        tensors["temperature"] = torch.tensor([one.temperature for one in texts])
        tensors["cls"] = torch.tensor([int(one.prompt_class) for one in texts], dtype=torch.int8)
        path = self._folder / f"s{self.num_shards:04d}{_SUFFIX}"
        scratch = path.with_suffix(".tmp")
        save_file(tensors, str(scratch))
        scratch.rename(path)

    def prefix(self) -> Tensor:
        """The unlabelled ids before every text: [p]. Raises `ConfigError` when there is no shard."""
        return self._load(self._first())["prefix"]

    def prompts(self) -> Iterator[tuple[int, ...]]:
        """What the target was asked in every text, without the prefix. Raises as `texts`."""
        for path in self._shards():
            try:
                with safe_open(str(path), "pt") as shard:
                    ids, kind, lengths = (shard.get_tensor(name) for name in ("ids", "kind", "length"))
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error
            sizes = lengths.tolist()
            for text, kinds in zip(ids.split(sizes), kind.split(sizes), strict=True):
                # The position before the first token of the answer is the prompt's last.
                answered = (kinds == TokenKind.ANSWER).int()
                length = int(answered.argmax()) + 1 if answered.any() else len(text) - 1
                yield tuple(text[:length].tolist())

    def texts(self) -> Iterator[LabelledText]:
        """All texts, shard by shard.

        Raises `ConfigError` for a shard that cannot be read, or whose texts stand behind another prefix.
        """
        shards = self._shards()
        prefix = self.prefix() if shards else None
        for path in shards:
            tensors = self._load(path)
            if prefix is not None and not torch.equal(tensors["prefix"], prefix):
                raise ConfigError(f"{path}: these texts stand behind another prefix than those of {shards[0].name}")
            begin = 0
            for index, length in enumerate(tensors["length"].tolist()):
                part = slice(begin, begin + length)
                begin += length
                yield LabelledText(
                    ids=tensors["ids"][part],
                    kind=tensors["kind"][part],
                    top_ids=tensors["top_ids"][part],
                    top_logp=tensors["top_logp"][part],
                    hidden=tensors["hidden"][part],
                    prompt_class=PromptClass(int(tensors["cls"][index])),
                    temperature=float(tensors["temperature"][index]),
                    features=tensors[_FEATURES][part] if _FEATURES in tensors else None,
                )

    def _shards(self) -> list[Path]:
        return sorted(self._folder.glob(f"s*{_SUFFIX}"))

    def _first(self) -> Path:
        shards = self._shards()
        if not shards:
            raise ConfigError(f"{self._folder}: there are no sampled texts")
        return shards[0]

    @staticmethod
    def _load(path: Path) -> dict[str, Tensor]:
        try:
            return load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: cannot read sampled texts: {error}")
