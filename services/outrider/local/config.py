"""What a local stack is made of, and named presets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider.core.errors import ConfigError
from outrider.core.policy import GateSettings
from outrider.draft.config import DraftConfig
from outrider.engine.config import DType, EngineConfig
from outrider.engine.models.heads import is_head as is_head_name
from outrider.engine.models.prepare import default_cache_dir
from outrider.target.config import TargetConfig

__all__ = ["SELF_DRAFT", "DraftMethod", "LocalSettings", "model_settings", "scripted_settings"]

SELF_DRAFT = "self"
"""Name of the draft that is the target's own weights in four bits."""

DraftMethod = Literal["draft_model", "eagle3"]
"""What a draft is: a model of its own, or an EAGLE-3 head over its target's features."""

_BLOCK_SIZE = 16
_DRAFT_ROOM = 2
"""KV of a draft over its target's, for branches of outcome tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """One target in this process and at most one draft. Raises `ConfigError` naming the field."""

    name: str
    """Served model name."""
    target: EngineConfig
    draft: EngineConfig | None = None
    """A real model drafts in a child process, any other kind in a thread of this one."""
    loop: TargetConfig = field(default_factory=TargetConfig)
    drafting: DraftConfig = field(default_factory=DraftConfig)
    gate: GateSettings = field(default_factory=GateSettings)
    buffered_events: int = 4096
    """Messages of one choice that may wait for whoever reads it; a reader further behind is cut."""
    start_timeout_s: float = 300.0
    """Longest that the draft may take to load and to answer."""

    def __post_init__(self) -> None:
        if self.target.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size: {self.target.tensor_parallel_size} needs a process per rank, which "
                "`outrider serve` starts; a local stack has one"
            )
        if not self.start_timeout_s > 0:
            raise ConfigError(f"start_timeout_s: {self.start_timeout_s} is not above 0")

    @property
    def proposes(self) -> bool:
        """Whether anything can offer draft tokens."""
        return self.draft is not None or self.loop.prompt_lookup_max > 0


def model_settings(
    *,
    model: str,
    draft: str | None,
    draft_method: DraftMethod | None = None,
    dtype: DType,
    max_model_len: int,
    num_seqs: int,
    threads: int = 1,
    draft_threads: int | None = None,
    cache_dir: Path | None = None,
    device: str = "cpu",
    loop: TargetConfig | None = None,
    gate: GateSettings | None = None,
) -> LocalSettings:
    """A real model, with KV for `num_seqs` sequences of `max_model_len` positions.

    `draft`: None for none, `SELF_DRAFT`, or a model as `EngineConfig.model`; with the method `eagle3`,
    a shipped head, or the folder or hub id of one. Without a method the draft's own configuration says
    what it is. It has the target's type of numbers, except for the self-draft, which has four bits.
    """
    is_head = _is_head(draft, draft_method)
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    loop = TargetConfig(max_num_seqs=num_seqs) if loop is None else loop
    num_blocks = num_seqs * (-(-(max_model_len + loop.max_draft_tokens_limit) // _BLOCK_SIZE) + 1)
    target = EngineConfig(
        model=model,
        feature_head=draft if is_head else None,
        cache_dir=cache_dir,
        device=device,
        dtype=dtype,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        threads=threads,
    )
    is_self = draft == SELF_DRAFT
    drafting = None
    if draft is not None:
        drafting = EngineConfig(
            model=model if is_self else draft,
            kind="eagle3" if is_head else "torch",
            head_of=model if is_head else None,
            cache_dir=cache_dir,
            device=device,
            dtype="bfloat16" if is_self else dtype,
            quantization="int4" if is_self else "none",
            block_size=_BLOCK_SIZE,
            num_blocks=num_blocks * _DRAFT_ROOM,
            max_model_len=max_model_len,
            threads=threads if draft_threads is None else draft_threads,
        )
    return LocalSettings(
        name=model,
        target=target,
        draft=drafting,
        loop=loop,
        drafting=DraftConfig(max_num_seqs=max(256, num_seqs), max_num_draft_tokens=loop.max_draft_tokens_limit),
        gate=gate or GateSettings(),
    )


def _is_head(draft: str | None, method: DraftMethod | None) -> bool:
    is_head = method == "eagle3" or (method is None and draft is not None and is_head_name(draft))
    if is_head and draft in (None, SELF_DRAFT):
        raise ConfigError(f"draft: method eagle3 needs the folder or hub id of a head, not {draft!r}")
    return is_head


def scripted_settings(
    *,
    draft_agreement: float | None,
    num_seqs: int = 64,
    max_model_len: int = 256,
    vocab_size: int = 64,
    num_blocks: int | None = None,
    loop: TargetConfig | None = None,
    gate: GateSettings | None = None,
) -> LocalSettings:
    """The formula model; `draft_agreement` None: without a draft. Too few `num_blocks` make it preempt."""
    from outrider.engine.scripted import ScriptedConfig  # loads torch, which reads the environment then

    block_size = 4
    enough = num_seqs * (-(-(max_model_len + 16) // block_size) + 1)

    def engine(agreement: float, blocks: int) -> EngineConfig:
        scripted = ScriptedConfig(
            vocab_size=vocab_size,
            agreement=agreement,
            num_blocks=blocks,
            block_size=block_size,
            max_model_len=max_model_len,
        )
        return EngineConfig(model="scripted", kind="scripted", scripted=scripted)

    return LocalSettings(
        name="scripted",
        target=engine(1.0, num_blocks or enough),
        draft=None if draft_agreement is None else engine(draft_agreement, enough * _DRAFT_ROOM),
        loop=loop or TargetConfig(max_num_seqs=num_seqs),
        drafting=DraftConfig(max_num_seqs=max(256, num_seqs)),
        gate=gate or GateSettings(),
    )
