"""Requests for the sampling stage: prompts behind the chat template, at mixed temperatures."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage
from outrider.core.sampling import SamplingParams
from outrider.decoding.keys import derive_key
from outrider.distill.records import PromptClass
from outrider.distill.sampling import SampledText, SampleRequest
from outrider.engine.tokenizer import Tokenizer

__all__ = ["ChatFrame", "answer_requests", "held_out_requests", "turn_requests", "turns_answered"]

_MAX_TURN_TOKENS = 48
_MIN_TURN_TOKENS = 4
# Mostly greedy: the likeliest text is what most requests ask for and what verifies best.
_GREEDY_SHARE, _WARM_SHARE = 0.72, 0.16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """What the chat template writes around a user turn."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatFrame":
        """Read it off two prompts that differ in the turn alone. Raises `ConfigError` without a template."""
        try:
            first, second = (_encode(tokenizer, text) for text in ("A", "7"))
        except ValueError as error:
            raise ConfigError(f"target: drafts are made of answers to chat prompts, and {error}") from error
        before = _common(first, second)
        after = _common(first[::-1], second[::-1])[::-1]
        return cls(before=tuple(before), after=tuple(after))


def turn_requests(frame: ChatFrame, *, count: int, seed: int, first: int) -> Iterator[SampleRequest]:
    """Let the target make up user turns, numbered from `first`: what it was trained to answer is what it writes."""
    for index in range(first, first + count):
        yield SampleRequest(
            prompt_ids=frame.before,
            max_new_tokens=_MAX_TURN_TOKENS,
            sampling=SamplingParams(temperature=1.0, top_p=0.95),
            noise_key=derive_key(seed, index),
        )


def turns_answered(
    turns: Sequence[SampledText], frame: ChatFrame, *, end_ids: frozenset[int], max_new_tokens: int, seed: int
) -> Iterator[SampleRequest]:
    """Ask for answers to made-up turns; turns of a token or two are left out."""
    chance = random.Random(seed)
    for turn in turns:
        ids = turn.new_ids[:-1] if turn.new_ids[-1] in end_ids else turn.new_ids
        if len(ids) >= _MIN_TURN_TOKENS:
            yield SampleRequest(
                prompt_ids=(*frame.before, *ids, *frame.after),
                max_new_tokens=max_new_tokens,
                sampling=_mixed(chance),
                noise_key=turn.request.noise_key,
                prompt_class=PromptClass.SAMPLED,
                user_from=len(frame.before),
                user_until=len(frame.before) + len(ids),
            )


def answer_requests(
    prompts: Sequence[tuple[int, ...]], *, max_new_tokens: int, seed: int, first: int
) -> Iterator[SampleRequest]:
    """Ask for answers to given prompts, numbered from `first`, at mixed temperatures."""
    chance = random.Random(seed + first)
    for index, ids in enumerate(prompts):
        yield SampleRequest(
            prompt_ids=ids,
            max_new_tokens=max_new_tokens,
            sampling=_mixed(chance),
            noise_key=derive_key(seed, first + index),
        )


def held_out_requests(
    prompts: Sequence[str], tokenizer: Tokenizer, *, max_new_tokens: int, temperature: float
) -> list[SampleRequest]:
    """Ask for one answer to each prompt at one temperature, for evaluation."""
    return [
        SampleRequest(
            prompt_ids=tuple(_encode(tokenizer, text)),
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(temperature=temperature),
            noise_key=derive_key(0, index),
        )
        for index, text in enumerate(prompts)
    ]


def _mixed(chance: random.Random) -> SamplingParams:
    drawn = chance.random()
    if drawn < _GREEDY_SHARE:
        return SamplingParams(temperature=0.0)
    if drawn < _GREEDY_SHARE + _WARM_SHARE:
        return SamplingParams(temperature=chance.uniform(0.3, 0.8), top_p=0.95)
    return SamplingParams(temperature=1.0, top_p=0.95)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_chat([ChatMessage(role="user", content=text)], continue_final_message=False)


def _common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The longest common beginning."""
    length = next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return list(first[:length])
