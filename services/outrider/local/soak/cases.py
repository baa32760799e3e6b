"""The requests of a soak test: few enough to be run alone once each, different enough to mix well."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.speculation import SpeculationChoice, SpeculationPreference

__all__ = ["Catalogue", "make_catalogue"]

_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Requests with seeds, so that each has one right text. Streams draw from it again and again."""

    requests: tuple[GenerationRequest, ...]

    def request(self, index: int, request_id: str) -> GenerationRequest:
        """Request `index` under load; speculates as the gate likes."""
        return replace(self.requests[index], request_id=request_id)

    def alone(self, index: int) -> GenerationRequest:
        """The same without speculation, to be run by itself."""
        return replace(self.requests[index], speculation=SpeculationChoice(preference=SpeculationPreference.OFF))


def make_catalogue(texts: Sequence[str], *, size: int, max_tokens: int, seed: int) -> Catalogue:
    """`size` requests of mixed prompt lengths, output lengths and temperatures. Raises `ConfigError`."""
    if size < 1 or max_tokens < 1:
        raise ConfigError(f"cases, max_tokens: {size} and {max_tokens} must be at least 1")
    random = Random(seed)
    requests = []
    for index in range(size):
        text = texts[index % len(texts)]
        requests.append(
            GenerationRequest(
                messages=(ChatMessage(role="user", content=text),),
                max_tokens=random.randint(1, max_tokens),
                temperature=random.choice(_TEMPERATURES),
                top_k=random.choice((None, 20)),
                seed=random.getrandbits(63),
            )
        )
    return Catalogue(requests=tuple(requests))
