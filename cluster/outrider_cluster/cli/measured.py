"""One request, shown while it streams, and measured."""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from outrider.core.dispatch import SequenceDelta, SequenceEnd, SequenceSubmit
from outrider.core.errors import EngineUnavailable
from outrider.core.generation import ChoiceEnd, GenerationRequest, TextDelta
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationStats
from outrider.rpc.client import OutriderClient
from outrider.rpc.dispatch_client import GrpcEngineSession

__all__ = ["Measurement", "Stopwatch", "measure_engine", "measure_request"]

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a request gave, and how fast."""

    text: str
    num_tokens: int
    tokens_per_s: float | None
    """Decoding speed: (tokens - those of the first message) / (last - first message); None for a
    single message."""
    stats: SpeculationStats


class Stopwatch:
    """Times messages of tokens. The first marks the end of the prefill, so it starts the clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: tuple[float, int] | None = None
        self._last_s = 0.0
        self.num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """A message with that many tokens has arrived."""
        if not num_tokens:
            return
        self._last_s = self._now()
        self.num_tokens += num_tokens
        if self._first is None:
            self._first = (self._last_s, num_tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first message, per second from there to the last."""
        if self._first is None or self._last_s <= self._first[0]:
            return None
        return (self.num_tokens - self._first[1]) / (self._last_s - self._first[0])


async def measure_request(
    client: OutriderClient, request: GenerationRequest, show: Callable[[str], None]
) -> Measurement:
    """Run a request through the public API; `show` gets the text as it comes."""
    watch, text, stats = Stopwatch(), "", SpeculationStats()
    async with aclosing(client.stream(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                watch.count(len(event.token_ids))
                text += event.text
                show(event.text)
            elif isinstance(event, ChoiceEnd):
                stats = event.speculation.stats
    return Measurement(text=text, num_tokens=watch.num_tokens, tokens_per_s=watch.tokens_per_s, stats=stats)


async def measure_engine(address: str, prompt: Sequence[int], *, max_tokens: int, temperature: float) -> float | None:
    """Decoding speed of the engine behind `address`, asked directly. Raises `EngineUnavailable`."""
    request = SequenceRequest(
        request_id="measure",
        prompt_token_ids=tuple(prompt),
        stop=StopConditions(max_tokens=max_tokens),
        sampling=SamplingParams(temperature=temperature),
        noise_key=1,
    )
    watch = Stopwatch()
    session = await GrpcEngineSession.connect(address, "measure", _CONNECT_TIMEOUT_S)
    try:
        session.send([SequenceSubmit(stream_key=1, request=request)])
        while True:
            for event in await session.receive():
                if isinstance(event, SequenceDelta):
                    watch.count(len(event.token_ids))
                elif isinstance(event, SequenceEnd):
                    if event.failure is not None:
                        raise EngineUnavailable(event.failure.message)
                    return watch.tokens_per_s
    finally:
        session.close()
        await session.wait_closed()
