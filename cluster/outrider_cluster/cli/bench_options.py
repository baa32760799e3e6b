"""From the options of `outrider bench` to what is run."""

from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationMode
from outrider.engine.config import DType
from outrider.engine.models.heads import is_head
from outrider.engine.models.prepare import Progress
from outrider.local.bench.plan import BenchPlan, Mode
from outrider.local.bench.prompts import PromptSet, load_prompt_file, load_prompt_sets, prompt_folder
from outrider.local.bench.session import longest_prompt
from outrider.local.config import SELF_DRAFT, LocalSettings, model_settings
from outrider.target.config import TargetConfig
from outrider_cluster.cli.lists import listed
from outrider_cluster.settings import Environment

__all__ = ["NGRAM", "NO_DRAFT", "LoadOptions", "PairOptions"]

NO_DRAFT = "none"
NGRAM = "ngram"

_DTYPES: dict[str, DType] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "float32": "float32",
    "bfloat16": "bfloat16",
}
_MODES = {"sequential": SpeculationMode.SEQUENTIAL, "cached": SpeculationMode.CACHED, "auto": None}
_MAX_K = 16
_MAX_WAIT_S = 2.0  # a shared CPU drafts slowly, and a benchmark shows what that costs
_BATCHED_TOKENS = 2048
_LOOKUP = (2, 4)
"""Shortest and longest n-gram that is looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Prompts and load, as typed."""

    prompt_sets: str
    prompt_file: Path | None
    concurrency: str
    request_rate: float | None
    num_prompts: int
    max_tokens: int
    repeats: int

    def plan(self, modes: str | None, *, draft: str, peer: str | None, remote: bool) -> BenchPlan:
        """The plan. `modes` None: all that the draft and the peer allow. Raises `ConfigError`."""
        return BenchPlan(
            prompt_sets=self._sets(),
            modes=_modes(modes, draft=draft, peer=peer, remote=remote),
            concurrency=listed("--concurrency", self.concurrency, int),
            request_rate=self.request_rate,
            num_prompts=self.num_prompts,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
        )

    def _sets(self) -> tuple[PromptSet, ...]:
        if self.prompt_file is not None:
            return (load_prompt_file(self.prompt_file),)
        return load_prompt_sets(listed("--prompt-sets", self.prompt_sets, str), prompt_folder())


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """Target and draft, as typed."""

    model: str
    draft: str
    dtype: str
    threads: int
    draft_threads: int | None

    def settings(self, plan: BenchPlan, *, k: int, mode: str, progress: Progress) -> LocalSettings:
        """A local stack that holds the plan's load. Raises `ConfigError`."""
        if not 1 <= k <= _MAX_K:
            raise ConfigError(f"--k: {k} is outside [1, {_MAX_K}]")
        made = self.sized(plan, max_model_len=plan.max_tokens + 1, k=k, mode=mode)
        # The tokenizer is read before the model, whose KV is sized by the longest prompt.
        longest = longest_prompt(plan, made.target, progress)
        return self.sized(plan, max_model_len=max(256, longest + plan.max_tokens), k=k, mode=mode)

    def sized(self, plan: BenchPlan, *, max_model_len: int, k: int, mode: str) -> LocalSettings:
        """A local stack for texts of `max_model_len` tokens under the plan's load."""
        is_ngram = self.draft == NGRAM
        loop = TargetConfig(
            max_num_seqs=plan.max_streams,
            max_num_batched_tokens=max(_BATCHED_TOKENS, plan.max_streams * (1 + k)),
            max_draft_wait_s=_MAX_WAIT_S,
            max_draft_tokens_limit=_MAX_K,
            prompt_lookup_min=_LOOKUP[0],
            prompt_lookup_max=_LOOKUP[1] if is_ngram else 0,
            # Every mode runs the same prompts: the second one would find them cached.
            enable_prefix_cache=False,
        )
        return model_settings(
            model=self.model,
            draft=None if is_ngram or self.draft == NO_DRAFT else self.draft,
            dtype=_DTYPES[self.dtype],
            max_model_len=max_model_len,
            num_seqs=plan.max_streams,
            threads=self.threads,
            draft_threads=self.draft_threads,
            cache_dir=Environment.read().cache_dir,
            loop=loop,
            gate=GateSettings(mode=_MODES[mode], max_num_draft_tokens=k, batch_size_threshold=None),
        )


def _modes(modes: str | None, *, draft: str, peer: str | None, remote: bool) -> tuple[Mode, ...]:
    able = [Mode.PLAIN]
    if remote or draft != NO_DRAFT:
        able.append(Mode.SPECULATIVE)
    if peer is not None:
        if remote:
            raise ConfigError("--peer: runs beside a local engine, not beside a deployment")
        able.append(Mode.HF_PLAIN)
        # transformers runs no four-bit copy of the target and no head: there is no equal pair to compare with.
        if draft not in (NO_DRAFT, SELF_DRAFT) and not is_head(draft):
            able.append(Mode.HF_ASSISTED)
    if modes is None:
        return tuple(able)
    wanted = listed("--modes", modes, Mode)
    for one in wanted:
        if one not in able:
            raise ConfigError(f"--modes: {one.value} cannot run with --draft {draft} and --peer {peer or 'not given'}")
    return wanted
