"""Sampling parameters of `LLM.generate`, under the names that scripts for vLLM use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.core.generation import ChatMessage, GenerationRequest

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What shapes and ends an output. Checked when the request is made, by the router's own rules."""

    n: int = 1
    max_tokens: int | None = 16
    """None: until the end of the text, or of the model's length."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    """Log-probabilities of the output tokens and of so many of the likeliest; None: none."""

    def request(
        self,
        *,
        text: str | None = None,
        token_ids: tuple[int, ...] | None = None,
        messages: tuple[ChatMessage, ...] | None = None,
    ) -> GenerationRequest:
        """The request for one prompt, given as exactly one of the three."""
        return GenerationRequest(
            text=text,
            token_ids=token_ids,
            messages=messages,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            seed=self.seed,
            n=self.n,
            top_logprobs=self.logprobs,
        )
