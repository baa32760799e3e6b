"""Stacks and requests for soak tests, sized so that KV runs short and sequences get preempted."""

from dataclasses import replace
from pathlib import Path
from random import Random

from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationMode
from outrider.local.config import LocalSettings, model_settings, scripted_settings
from outrider.local.soak.cases import Catalogue, make_catalogue
from outrider.target.config import TargetConfig

__all__ = ["model_soak", "scripted_soak"]

_BUFFERED_EVENTS = 16  # whoever stalls for seconds is cut; nobody else lags so many steps of a real model
_DRAFT_WAIT_S = 30.0  # blocks for so many streams take a CPU seconds; unwaited for, nothing would speculate
_ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def scripted_soak(*, num_streams: int, cases: int = 64, seed: int = 1) -> tuple[LocalSettings, Catalogue]:
    """The formula model with a draft that is right four times out of five."""
    max_model_len, max_tokens = 192, 64
    settings = scripted_settings(
        draft_agreement=0.8,
        num_seqs=num_streams,
        max_model_len=max_model_len,
        # Half of what all streams could fill.
        num_blocks=max(max_model_len, num_streams * (max_model_len + max_tokens) // 8) // 4,
        loop=TargetConfig(max_num_seqs=num_streams, prefill_chunk_tokens=32),
        gate=_gate(SpeculationMode.CACHED),
    )
    random = Random(seed)
    texts = ["".join(random.choices(_ALPHABET, k=random.randint(1, 96))) for _ in range(cases)]
    return settings, make_catalogue(texts, size=cases, max_tokens=max_tokens, seed=seed)


def model_soak(
    texts: list[str],
    *,
    model: str,
    draft: str | None,
    num_streams: int,
    threads: int = 1,
    cases: int = 48,
    max_tokens: int = 96,
    cache_dir: Path | None = None,
    seed: int = 1,
) -> tuple[LocalSettings, Catalogue]:
    """A real model in fp32, where equality is meant; KV for a sixth of the streams at full length."""
    settings = model_settings(
        model=model,
        draft=draft,
        dtype="float32",
        max_model_len=512,
        num_seqs=max(1, num_streams // 6),
        threads=threads,
        draft_threads=1,
        cache_dir=cache_dir,
        loop=TargetConfig(max_num_seqs=num_streams, prefill_chunk_tokens=128, max_draft_wait_s=_DRAFT_WAIT_S),
        gate=_gate(SpeculationMode.SEQUENTIAL),
    )
    catalogue = make_catalogue(texts, size=cases, max_tokens=max_tokens, seed=seed)
    return replace(settings, buffered_events=_BUFFERED_EVENTS), catalogue


def _gate(mode: SpeculationMode) -> GateSettings:
    """Speculates at any load."""
    return GateSettings(mode=mode, batch_size_threshold=None, max_branches=4)
