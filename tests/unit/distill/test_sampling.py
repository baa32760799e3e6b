"""Texts do not depend on what runs beside them, and every slot is used again."""

import pytest
from tests.unit.distill.requests import greedy_text

from outrider.core.sampling import SamplingParams
from outrider.distill.sampling import Sampler, SampleRequest
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine


def request(number: int, *, length: int = 10, temperature: float = 1.0) -> SampleRequest:
    return SampleRequest(
        prompt_ids=tuple(range(1, 3 + number)),
        max_new_tokens=length,
        sampling=SamplingParams(temperature=temperature),
        noise_key=number,
    )


def sampled(
    slots: int, requests: list[SampleRequest], end_ids: frozenset[int] = frozenset()
) -> dict[int, tuple[int, ...]]:
    sampler = Sampler(ScriptedEngine(ScriptedConfig()), num_slots=slots, max_len=40, end_ids=end_ids)
    return {text.request.noise_key: text.new_ids for text in sampler.run(requests)}


def test_a_text_is_the_same_alone_and_among_others() -> None:
    requests = [request(number, length=5 + number) for number in range(9)]
    together = sampled(4, requests)
    assert together == sampled(1, requests)
    assert {key: len(ids) for key, ids in together.items()} == {number: 5 + number for number in range(9)}


def test_a_text_ends_with_an_end_token() -> None:
    engine = ScriptedEngine(ScriptedConfig())
    text = greedy_text(engine)
    end = text.new_ids[4]
    first = text.new_ids.index(end)
    sampler = Sampler(engine, num_slots=1, max_len=40, end_ids=frozenset({end}))
    (ended,) = sampler.run([text.request])
    assert ended.new_ids == text.new_ids[: first + 1]
    assert ended.ids == (1, 2, 3, *ended.new_ids)


def test_a_prompt_without_room_is_left_out() -> None:
    assert sampled(2, [request(60), request(1)]).keys() == {1}


def test_slots_must_fit_the_pool() -> None:
    with pytest.raises(ValueError, match="do not fit 256 KV blocks"):
        Sampler(ScriptedEngine(ScriptedConfig()), num_slots=64, max_len=40, end_ids=frozenset())
