"""Stage one: sample the target's answers, label them, and put them away shard by shard."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outrider.distill.labelling import Labeller
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

__all__ = ["engine_for", "sample_texts"]

_BLOCK_SIZE = 16
_CUDA_BLOCK_SIZE = 256
"""Of torch's paged attention, which only CUDA has."""
_MAX_PROMPT_TOKENS = 256


def sample_texts(
    settings: DistillSettings,
    tokenizer: Tokenizer,
    target: Any,
    store: RecordStore,
    *,
    seconds: float,
    tell: Callable[[float, int], None],
    progress: Progress,
) -> None:
    """Add shards for `seconds`, or one round of them; `tell` hears the share that is done and the tokens so far.

    `target` is the transformers model that labels; sampling runs on an engine of its own. Numbers
    continue behind the shards that are there, so a resumed stage samples other texts.
    """
    frame = ChatFrame.of(tokenizer)
    layers = default_feature_layers(target.config.num_hidden_layers) if settings.method == "eagle3" else ()
    labeller = Labeller(
        target,
        prefix=frame.before[:-1],
        top_k=min(settings.top_k, tokenizer.vocab_size),
        feature_layers=layers,
    )
    max_len = min(settings.max_new_tokens + _MAX_PROMPT_TOKENS, int(target.config.max_position_embeddings))
    tokens = skipped = 0
    began = time.monotonic()
    slots = settings.num_slots
    with engine_for(settings, settings.target, num_slots=slots, max_len=max_len, progress=progress) as engine:
        sampler = Sampler(
            engine,
            num_slots=slots,
            max_len=max_len,
            end_ids=frozenset(tokenizer.eos_token_ids),
            num_valid_ids=tokenizer.vocab_size,
        )
        while True:
            texts = _round(settings, tokenizer, frame, sampler, first=(store.num_shards + skipped) * slots)
            if texts:
                store.append(labeller.label(texts), labeller.prefix)
                tokens += sum(len(one.ids) for one in texts)
            else:
                skipped += 1  # prompts that are all too long, or turns too short: those behind them may do
            share = min(1.0, (time.monotonic() - began) / seconds)
            tell(share, tokens)
            if share >= 1:
                return


def _round(
    settings: DistillSettings, tokenizer: Tokenizer, frame: ChatFrame, sampler: Sampler, *, first: int
) -> list[SampledText]:
    """One shard: as many texts as there are slots, answers to given prompts where there are any left."""
    count = settings.num_slots
    given = settings.prompts[first : first + count]
    requests: Iterator[SampleRequest]
    if given:
        requests = answer_requests(
            given, tokenizer, max_new_tokens=settings.max_new_tokens, seed=settings.seed, first=first
        )
    else:
        turns = list(sampler.run(turn_requests(frame, count=count, seed=settings.seed, first=first)))
        requests = turns_answered(
            turns,
            frame,
            end_ids=frozenset(tokenizer.eos_token_ids),
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed + first,
        )
    return list(sampler.run(requests))


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
