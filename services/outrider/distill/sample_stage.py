"""Stage one: sample the target's answers, label them, and put them away shard by shard."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import ConfigError
from outrider.distill.labelling import Labeller
from outrider.distill.prompts import PromptQueue, has_own_system_turn
from outrider.distill.records import RecordStore
from outrider.distill.requests import ChatFrame, answer_requests, turn_requests, turns_answered
from outrider.distill.sampling import SampledText, Sampler, SampleRequest, blocks_needed
from outrider.distill.settings import DistillSettings
from outrider.engine.base import ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.eagle3.config import default_feature_layers
from outrider.engine.factory import build_engine
from outrider.engine.models.prepare import Progress
from outrider.engine.tokenizer import Tokenizer

__all__ = ["SamplingProgress", "engine_for", "sample_texts"]

_BLOCK_SIZE = 16
_CUDA_BLOCK_SIZE = 256
"""Of torch's paged attention, which only CUDA has."""
_ROUND_NUMBERS = 1 << 24
"""Numbers that a round has for its texts: more than there are slots, so that no two rounds share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingProgress:
    """Where the stage stands behind a round."""

    share: float
    """Of its time."""
    rounds: int
    """Done so far, over all runs: the number of the next one."""
    tokens: int
    """Of the texts of this run."""


def sample_texts(
    settings: DistillSettings,
    tokenizer: Tokenizer,
    target: Any,
    store: RecordStore,
    *,
    first_round: int,
    seconds: float,
    tell: Callable[[SamplingProgress], None],
    hear: Callable[[float, int], None],
    progress: Progress,
) -> None:
    """Add shards for `seconds`, or one round of them; `tell` is told of every round.

    `hear` hears the share of the time that has passed and the tokens so far, within rounds as well: one may take long.

    `target` is the transformers model that labels; sampling runs on an engine of its own. Rounds are
    numbered from `first_round`, which a resumed stage takes from its last progress, so that it samples
    other texts. Raises `ConfigError` when no given prompt can be asked.
    """
    max_len = min(settings.max_new_tokens + settings.max_prompt_tokens, int(target.config.max_position_embeddings))
    tokens = 0
    began = time.monotonic()

    def passed() -> float:
        return min(1.0, (time.monotonic() - began) / seconds)

    source = _Source(settings, tokenizer, store, progress, max_prompt_tokens=max_len - settings.max_new_tokens)
    layers = default_feature_layers(target.config.num_hidden_layers) if settings.method == "eagle3" else ()
    labeller = Labeller(
        target, prefix=source.prefix, top_k=min(settings.top_k, tokenizer.vocab_size), feature_layers=layers
    )
    slots = settings.num_slots
    with engine_for(settings, settings.target, num_slots=slots, max_len=max_len, progress=progress) as engine:
        sampler = Sampler(
            engine,
            num_slots=slots,
            max_len=max_len,
            end_ids=frozenset(tokenizer.eos_token_ids),
            num_valid_ids=tokenizer.vocab_size,
            each_step=lambda: hear(passed(), tokens),
        )
        for number in itertools.count(first_round):
            texts = source.texts(sampler, first=number * _ROUND_NUMBERS)
            if texts:
                store.append(labeller.label(texts), labeller.prefix)
                tokens += sum(len(one.ids) for one in texts)
            share = passed()
            tell(SamplingProgress(share=share, rounds=number + 1, tokens=tokens))
            if share >= 1:
                source.tell_left_out()
                return


class _Source:
    """The texts of a round: answers to given prompts while there are any, then to made-up ones."""

    def __init__(
        self,
        settings: DistillSettings,
        tokenizer: Tokenizer,
        store: RecordStore,
        progress: Progress,
        *,
        max_prompt_tokens: int,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._frame = ChatFrame.of(tokenizer)
        self._end_ids = frozenset(tokenizer.eos_token_ids)
        self.prefix = _prefix(self._frame, settings, store)
        asked = set(store.prompts())
        self._given = PromptQueue(
            settings.prompts,
            tokenizer,
            prefix=self.prefix,
            max_tokens=max_prompt_tokens,
            asked=asked,
            seed=settings.seed,
        )
        self._max_prompt_tokens = max_prompt_tokens
        self._making_up = not settings.prompts

    def texts(self, sampler: Sampler, *, first: int) -> list[SampledText]:
        """As many as there are slots, numbered from `first`; fewer at the end of the given prompts."""
        settings, count = self._settings, self._settings.num_slots
        given = self._given.take(count)
        requests: Iterator[SampleRequest]
        if given:
            requests = answer_requests(given, max_new_tokens=settings.max_new_tokens, seed=settings.seed, first=first)
        else:
            self._make_up()
            turns = list(sampler.run(turn_requests(self._frame, count=count, seed=settings.seed, first=first)))
            requests = turns_answered(
                turns,
                self._frame,
                end_ids=self._end_ids,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed + first,
            )
        return list(sampler.run(requests))

    def tell_left_out(self) -> None:
        """Say how many prompts could not be asked."""
        if left_out := self._left_out():
            self._progress(f"prompts left out: {left_out}")

    def _make_up(self) -> None:
        """Go over to made-up prompts, aloud. Raises `ConfigError` when no given one was any good."""
        if self._making_up:
            return
        if not self._given.num_answered:
            raise ConfigError(f"prompts: none can be asked: {self._left_out()}")
        self._progress("every prompt has its answer; the target makes up more")
        self._making_up = True

    def _left_out(self) -> str:
        parts = []
        if self._given.num_too_long:
            parts.append(f"{self._given.num_too_long} have more than {self._max_prompt_tokens} tokens")
        if self._given.num_refused:
            parts.append(f"{self._given.num_refused} do not fit the chat template")
        return ", ".join(parts)


def _prefix(frame: ChatFrame, settings: DistillSettings, store: RecordStore) -> tuple[int, ...]:
    """What stands before every text and is stored once: the first token alone where prompts have system turns.

    An earlier run may have chosen less. Raises `ConfigError` when it chose more than these prompts share.
    """
    own = frame.before[: 1 if has_own_system_turn(settings.prompts) else -1]
    if not store.num_shards:
        return own
    stored = tuple(store.prefix().tolist())
    if stored != own[: len(stored)]:
        raise ConfigError(
            "prompts: some have system turns of their own, which the texts sampled before have not; "
            "take another --output"
        )
    return stored


@contextmanager
def engine_for(
    settings: DistillSettings, model: str, *, num_slots: int, max_len: int, progress: Progress
) -> Iterator[ModelEngine]:
    """An engine of that model with KV for so many texts; closed at the end. Raises as `build_engine`."""
    block_size = _CUDA_BLOCK_SIZE if settings.device.startswith("cuda") else _BLOCK_SIZE
    engine = build_engine(
        EngineConfig(
            model=model,
            cache_dir=settings.cache_dir,
            device=settings.device,
            dtype=settings.dtype,
            block_size=block_size,
            num_blocks=blocks_needed(num_slots=num_slots, max_len=max_len, block_size=block_size),
            max_model_len=max_len,
            threads=settings.threads,
            cuda_graphs="off",
        ),
        progress,
    )
    try:
        yield engine
    finally:
        engine.close()
