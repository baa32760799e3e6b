"""transformers in a process of its own: its compute threads and ours do not count as one crowd.

libgomp lets waiting threads spin less, on both sides, as soon as a process holds more of them than
there are cores (`outrider.engine.forward_threads`).
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import EngineUnavailable
from outrider.engine.config import EngineConfig

if TYPE_CHECKING:
    from outrider.engine.peer import PeerAnswer, TransformersPeer

__all__ = ["PeerProcess", "PeerSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """What `TransformersPeer` is made of."""

    folder: Path
    target: EngineConfig
    """Whose number format and threads it takes."""
    assistant: Path | None
    prompt_lookup_tokens: int | None


class PeerProcess:
    """Implements `generators.Peer`. `load` it before, `close` it after."""

    def __init__(self, spec: PeerSpec) -> None:
        """Starts nothing yet."""
        self._spec = spec
        # A fresh interpreter: ours has threads.
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def load(self) -> None:
        """Start the process and load the model; blocks. Raises `ConfigError`."""
        self._pool.submit(_load, self._spec).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int, assisted: bool
    ) -> "PeerAnswer":
        """See `TransformersPeer.generate`. Raises `EngineUnavailable` when the process has died."""
        work = self._pool.submit(
            _generate,
            self._spec,
            tuple(prompt),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            assisted=assisted,
        )
        try:
            return work.result()
        except BrokenProcessPool as error:
            raise EngineUnavailable("the process of transformers has died") from error


@cache
def _peer(spec: PeerSpec) -> "TransformersPeer":
    """The one peer of a child process."""
    from outrider.engine.factory import torch_dtype
    from outrider.engine.peer import TransformersPeer

    return TransformersPeer(
        spec.folder,
        dtype=torch_dtype(spec.target),
        threads=spec.target.threads,
        assistant=spec.assistant,
        prompt_lookup_tokens=spec.prompt_lookup_tokens,
    )


def _load(spec: PeerSpec) -> None:
    _peer(spec)


def _generate(
    spec: PeerSpec, prompt: tuple[int, ...], *, max_tokens: int, temperature: float, seed: int, assisted: bool
) -> "PeerAnswer":
    return _peer(spec).generate(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, assisted=assisted)
