"""Texts of a scripted target."""

from outrider.core.sampling import SamplingParams
from outrider.distill.sampling import SampledText, Sampler, SampleRequest
from outrider.engine.base import ModelEngine


def greedy_text(engine: ModelEngine, *, temperature: float = 0.0, length: int = 20) -> SampledText:
    """One text of the engine, from a prompt of three tokens."""
    request = SampleRequest(
        prompt_ids=(1, 2, 3), max_new_tokens=length, sampling=SamplingParams(temperature=temperature), noise_key=5
    )
    sampler = Sampler(engine, num_slots=1, max_len=length + 3, end_ids=frozenset())
    (text,) = sampler.run([request])
    return text
