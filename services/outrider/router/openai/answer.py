"""Whole answers and the chunks of a stream, in the shapes of both endpoints."""

import time
from collections.abc import Sequence
from typing import Any

from outrider.core.generation import ChoiceEnd, GenerationAccepted, TextDelta, Usage
from outrider.core.result import GeneratedChoice, GenerationResult
from outrider.core.sequence import Finish, FinishReason
from outrider.router.openai.measures import metrics_of, usage_of
from outrider.router.openai.requests import Call
from outrider.router.openai.token_text import TokenTexts

__all__ = ["Answer"]

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


class Answer:
    """Writes the answer to one call. Used on the event loop, by one task."""

    def __init__(self, call: Call, accepted: GenerationAccepted, tokens: TokenTexts, version: str) -> None:
        """`accepted`: of the first prompt; the whole answer carries its id."""
        self._call = call
        self._tokens = tokens
        self._seed = accepted.seed
        self._choices: dict[int, _Shown] = {}
        self._prompts: dict[int, Usage] = {}
        kind = "chat.completion" if call.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if call.chat else 'cmpl'}-{accepted.request_id}",
            "object": f"{kind}.chunk" if call.chat and call.stream else kind,
            "created": int(time.time()),
            "model": accepted.model,
            "system_fingerprint": f"outrider-{version}",
        }

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The answer to a call that does not stream; `results` by prompt."""
        choices = [
            self._whole_choice(index * self._call.n + one.end.choice_index, one)
            for index, result in enumerate(results)
            for one in result.choices
        ]
        ends = [one.end for result in results for one in result.choices]
        usage = usage_of([result.usage for result in results])
        return {**self._head, "choices": choices, "usage": usage, "metrics": metrics_of(ends, self._seed)}

    def accept(self, prompt: int, accepted: GenerationAccepted) -> None:
        """A prompt of a stream was admitted."""
        self._prompts[prompt] = Usage(prompt_tokens=accepted.prompt_tokens, completion_tokens=0)

    def first_chunks(self) -> list[dict[str, Any]]:
        """Before any text: a chat says who speaks."""
        if not self._call.chat:
            return []
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(self._call.n)]

    def delta_chunk(self, prompt: int, delta: TextDelta) -> dict[str, Any] | None:
        """New output of a choice; None when there is nothing to show yet."""
        index = prompt * self._call.n + delta.choice_index
        shown = self._choices.setdefault(index, _Shown())
        shown.num_tokens += len(delta.token_ids)
        extra = self._extra(delta.token_ids)
        if delta.logprobs:
            extra["logprobs"] = self._logprobs(delta.token_ids, delta.logprobs, shown)
        if not delta.text and not extra:
            return None
        text: dict[str, Any] = {"delta": {"content": delta.text}} if self._call.chat else {"text": delta.text}
        return self._chunk(index, {**text, **extra})

    def end_chunk(self, prompt: int, end: ChoiceEnd) -> dict[str, Any]:
        """The end of a choice."""
        index = prompt * self._call.n + end.choice_index
        shown = self._choices.setdefault(index, _Shown())
        shown.end = end
        before = self._prompts[prompt]
        self._prompts[prompt] = Usage(
            prompt_tokens=before.prompt_tokens,
            completion_tokens=0,
            cached_prompt_tokens=max(before.cached_prompt_tokens, end.usage.cached_prompt_tokens),
        )
        text: dict[str, Any] = {"delta": {}} if self._call.chat else {"text": ""}
        return self._chunk(index, {**text, **self._finish(prompt, end.finish, end.stop_string)})

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, without choices, of a stream that asked for it."""
        ends = [one.end for _, one in sorted(self._choices.items()) if one.end is not None]
        return {**self._head, "choices": [], "usage": self._usage(), "metrics": metrics_of(ends, self._seed)}

    def _whole_choice(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        text = (
            {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            if self._call.chat
            else {"text": choice.text}
        )
        logprobs = self._logprobs(choice.token_ids, choice.logprobs, _Shown()) if choice.logprobs else None
        finish = self._finish(index // self._call.n, choice.end.finish, choice.end.stop_string)
        return {"index": index, **text, "logprobs": logprobs, **finish, **self._extra(choice.token_ids)}

    def _chunk(self, index: int, parts: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **parts}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._call.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Any], shown: "_Shown") -> dict[str, Any]:
        if self._call.chat:
            return self._tokens.chat(token_ids, logprobs)
        written = self._tokens.completion(token_ids, logprobs, shown.offset)
        shown.offset += sum(map(len, written["tokens"]))
        return written

    def _extra(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._call.with_token_ids and token_ids else {}

    def _finish(self, prompt: int, finish: Finish, stop_string: str | None) -> dict[str, Any]:
        """Why it ended; `stop_reason` as in vLLM: the stop string or id that the client had asked for."""
        asked_for = finish.stop_token_id in self._call.requests[prompt].stop_token_ids
        stop_reason = stop_string if stop_string is not None else finish.stop_token_id if asked_for else None
        return {"finish_reason": _FINISH_REASONS[finish.reason], "stop_reason": stop_reason}

    def _usage(self) -> dict[str, Any]:
        output = sum(one.num_tokens for one in self._choices.values())
        return usage_of([*self._prompts.values(), Usage(prompt_tokens=0, completion_tokens=output)])


class _Shown:
    """What one choice of a stream has shown."""

    __slots__ = ("end", "num_tokens", "offset")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.offset = 0
        self.end: ChoiceEnd | None = None
