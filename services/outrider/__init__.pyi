from outrider.local.llm import LLM as LLM
from outrider.local.sampling_params import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__: str
