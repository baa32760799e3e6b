"""A whole answer: the events of a stream, folded by choice."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from outrider.core.errors import ProtocolError
from outrider.core.generation import ChoiceEnd, GenerationAccepted, GenerationEvent, TextDelta, Usage
from outrider.core.verdict import TokenLogprobs

__all__ = ["GeneratedChoice", "GenerationResult", "collect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedChoice:
    """One finished choice."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    end: ChoiceEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What a request produced."""

    accepted: GenerationAccepted
    choices: tuple[GeneratedChoice, ...]
    """By index."""

    @property
    def usage(self) -> Usage:
        """Over all choices. They share the prompt, which counts once."""
        return Usage(
            prompt_tokens=self.accepted.prompt_tokens,
            completion_tokens=sum(one.end.usage.completion_tokens for one in self.choices),
            cached_prompt_tokens=max((one.end.usage.cached_prompt_tokens for one in self.choices), default=0),
        )


@dataclass(slots=True, kw_only=True)
class _Growing:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def finished(self, end: ChoiceEnd) -> GeneratedChoice:
        return GeneratedChoice(
            text="".join(self.text), token_ids=tuple(self.token_ids), logprobs=tuple(self.logprobs), end=end
        )


async def collect(events: AsyncIterator[GenerationEvent]) -> GenerationResult:
    """Read a stream to its end. Raises `ProtocolError` when it ends before all was said."""
    accepted: GenerationAccepted | None = None
    growing: dict[int, _Growing] = {}
    choices: dict[int, GeneratedChoice] = {}
    async for event in events:
        if isinstance(event, GenerationAccepted):
            accepted = event
            continue
        choice = growing.setdefault(event.choice_index, _Growing())
        if isinstance(event, TextDelta):
            choice.text.append(event.text)
            choice.token_ids.extend(event.token_ids)
            choice.logprobs.extend(event.logprobs)
        else:
            choices[event.choice_index] = choice.finished(event)
    if accepted is None or not choices or set(growing) != set(choices):
        raise ProtocolError("event: the stream ended before the end of every choice")
    return GenerationResult(accepted=accepted, choices=tuple(choices[index] for index in sorted(choices)))
