"""Sampling parameters on the wire, the same message from router to target and from target to draft.

Numbers travel as float32. Converting is idempotent: what the target received from the router
(already rounded to float32) reaches the draft bit for bit, so both shape the same law.
"""

from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice
from outrider.rpc.enums import PREFERENCES, RULES, Refusal
from outrider.v1 import generation_pb2, speculation_pb2

__all__ = ["choice_from_proto", "choice_to_proto", "sampling_from_proto", "sampling_to_proto"]


def sampling_to_proto(sampling: SamplingParams) -> speculation_pb2.DraftSampling:
    """Convert; `logit_bias` keeps its order."""
    return speculation_pb2.DraftSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=[speculation_pb2.LogitBias(token_id=one, bias=bias) for one, bias in sampling.logit_bias],
        min_tokens=sampling.min_tokens,
        suppressed_token_ids=sampling.suppressed_token_ids,
    )


def sampling_from_proto(message: speculation_pb2.DraftSampling) -> SamplingParams:
    """Convert back. Raises `InvalidRequest` naming the field that is out of range."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        min_tokens=message.min_tokens,
        suppressed_token_ids=tuple(message.suppressed_token_ids),
    )


def choice_to_proto(choice: SpeculationChoice) -> generation_pb2.SpeculationOptions:
    """The client's wishes about speculation."""
    return generation_pb2.SpeculationOptions(
        preference=PREFERENCES.to_proto(choice.preference),
        max_tokens=choice.max_tokens,
        rule=RULES.to_proto(choice.rule),
    )


def choice_from_proto(message: generation_pb2.SpeculationOptions, refusal: Refusal) -> SpeculationChoice:
    """Convert back; unset means AUTO and COUPLED. An unknown value raises what `refusal` makes."""
    return SpeculationChoice(
        preference=PREFERENCES.from_proto(message.preference, "speculation.preference", refusal),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        rule=RULES.from_proto(message.rule, "speculation.rule", refusal),
    )
