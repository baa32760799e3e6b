"""transformers' own `generate` on the same model: what a benchmark compares with."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from outrider.core.errors import ConfigError
from outrider.engine.progress_bars import no_bars_of_others

__all__ = ["PeerAnswer", "TransformersPeer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """One generated text and when its tokens came."""

    token_ids: tuple[int, ...]
    started_s: float
    messages: tuple[tuple[float, int], ...]
    """(time, tokens) of every step."""
    ended_s: float


class _Clocked(BaseStreamer):
    """Notes when tokens come. The first call brings the prompt."""

    def __init__(self) -> None:
        self.messages: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """New tokens."""
        if self._prompt_seen:
            self.messages.append((time.perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """The end."""


class TransformersPeer:
    """A model, and optionally an assistant, as transformers loads and runs them by default."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        threads: int,
        assistant: Path | None = None,
        prompt_lookup_tokens: int | None = None,
    ) -> None:
        """`assistant` and `prompt_lookup_tokens` are two ways of assisted generation: give one at most.

        Sets the number of torch threads of the calling thread. Raises `ConfigError`.
        """
        if assistant is not None and prompt_lookup_tokens is not None:
            raise ConfigError("assistant, prompt_lookup_tokens: transformers takes one of them")
        torch.set_num_threads(threads)
        self._model = _loaded(folder, dtype)
        self._assistance: dict[str, Any] | None = None
        if assistant is not None:
            self._assistance = {"assistant_model": _loaded(assistant, dtype)}
        elif prompt_lookup_tokens is not None:
            self._assistance = {"prompt_lookup_num_tokens": prompt_lookup_tokens}

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int, assisted: bool
    ) -> PeerAnswer:
        """Generate one text; temperature 0 is greedy, others sample from the whole law.

        Raises `ConfigError` for assisted generation that is not set up.
        """
        if assisted and self._assistance is None:
            raise ConfigError("assisted: this peer has neither an assistant nor prompt lookup")
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None}
        if temperature > 0.0:
            sampling = {"do_sample": True, "temperature": temperature}
        torch.manual_seed(seed)
        ids = torch.tensor([list(prompt)])  # [1, prompt]
        clocked = _Clocked()
        started = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            top_k=None if temperature == 0.0 else 0,
            top_p=None if temperature == 0.0 else 1.0,
            streamer=clocked,
            pad_token_id=0,
            **sampling,
            **(self._assistance or {} if assisted else {}),
        )
        ended = time.perf_counter()
        return PeerAnswer(
            token_ids=tuple(output[0, ids.shape[1] :].tolist()),
            started_s=started,
            messages=tuple(clocked.messages),
            ended_s=ended,
        )


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    try:
        with no_bars_of_others():
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: transformers cannot load {folder}: {error}") from error
    model.eval()
    return model
