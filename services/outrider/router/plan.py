"""A validated request: everything that the engines need to run its choices."""

from dataclasses import dataclass

from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice
from outrider.decoding.keys import derive_key

__all__ = ["RequestPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """A request after validation, tokenization and defaults. Made by `validation.plan_request` only."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    resume_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    include_stop_str: bool
    n: int
    seed: int
    """64 bits, the client's or a random one."""
    top_logprobs: int | None
    speculation: SpeculationChoice
    priority: int
    traffic_class: str
    timeout_s: float
    """From the arrival of the request."""
    key_id: str = ""
    """Id of the caller's API key."""

    def in_flight_tokens(self, max_output_tokens: int) -> int:
        """What admission charges: prompt and output of all choices, each output at most `max_output_tokens`."""
        return self.n * (len(self.prompt_token_ids) + min(self.stop.max_tokens, max_output_tokens))

    def sequence_request(
        self, choice_index: int, *, resume_token_ids: tuple[int, ...], timeout_s: float, traceparent: str
    ) -> SequenceRequest:
        """One choice, with its own noise, behind the output it has. `timeout_s`: what is left of the limit."""
        return SequenceRequest(
            request_id=self.request_id,
            choice_index=choice_index,
            prompt_token_ids=self.prompt_token_ids,
            resume_token_ids=resume_token_ids,
            sampling=self.sampling,
            stop=self.stop,
            noise_key=derive_key(self.seed, choice_index),
            key_id=self.key_id,
            top_logprobs=self.top_logprobs,
            speculation=self.speculation,
            priority=self.priority,
            traffic_class=self.traffic_class,
            timeout_s=timeout_s,
            traceparent=traceparent,
        )

    def sequence_requests(self, *, timeout_s: float, traceparent: str) -> tuple[SequenceRequest, ...]:
        """All choices, behind the output that the request came with."""
        return tuple(
            self.sequence_request(
                index, resume_token_ids=self.resume_token_ids, timeout_s=timeout_s, traceparent=traceparent
            )
            for index in range(self.n)
        )
