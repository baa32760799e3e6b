"""The embedded configuration as it ships: the real test model, tp=2, drafted for by its own int4 copy."""

from collections.abc import AsyncIterator

import pytest
from tests.support.drafting import wait_until_drafting
from tests.support.served import Served

from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.speculation import SpeculationChoice, SpeculationMode, SpeculationPreference
from outrider.rpc.client import OutriderClient

# The first test waits for the cluster to start, and perhaps for the model to be prepared.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def client(laptop_cluster: Served) -> AsyncIterator[OutriderClient]:
    async with OutriderClient(laptop_cluster.address) as made:
        yield made


def question(text: str, preference: SpeculationPreference, *, temperature: float = 0.0) -> GenerationRequest:
    return GenerationRequest(
        messages=(ChatMessage(role="user", content=text),),
        max_tokens=40,
        temperature=temperature,
        seed=11,
        speculation=SpeculationChoice(preference=preference),
    )


async def test_the_known_answer_comes_with_and_without_speculation(client: OutriderClient) -> None:
    await wait_until_drafting(client, timeout_s=120)
    for preference in (SpeculationPreference.ON, SpeculationPreference.OFF):
        result = await client.generate(question("What is the capital of France?", preference))
        assert result.choices[0].text.startswith("The capital of France is Paris.")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_speculation_saves_rounds_and_changes_no_token(client: OutriderClient, temperature: float) -> None:
    await wait_until_drafting(client, timeout_s=120)
    text = "Write a Python function that adds two numbers."
    on = await client.generate(question(text, SpeculationPreference.ON, temperature=temperature))
    off = await client.generate(question(text, SpeculationPreference.OFF, temperature=temperature))
    assert on.choices[0].token_ids == off.choices[0].token_ids
    assert on.choices[0].end.speculation.mode is not SpeculationMode.OFF
    assert on.choices[0].end.speculation.stats.rounds < off.choices[0].end.speculation.stats.rounds
