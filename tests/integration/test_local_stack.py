"""The local stack with a real model: a draft in a child process, equal texts, nothing left behind."""

import asyncio
import os
import subprocess
import sys

import pytest

from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.local.config import model_settings
from outrider.local.draft_process import ChildDraft
from outrider.local.stack import local_stack

MODEL = "smollm2-135m"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def request(preference: SpeculationPreference) -> GenerationRequest:
    return GenerationRequest(
        messages=(ChatMessage(role="user", content="Count from one to ten."),),
        max_tokens=16,
        temperature=0.7,
        seed=11,
        speculation=SpeculationChoice(preference=preference),
    )


@pytest.mark.timeout(240)
async def test_a_draft_in_a_child_changes_no_text_and_ends_with_the_stack() -> None:
    settings = model_settings(model=MODEL, draft="self", dtype="float32", max_model_len=128, num_seqs=2)
    async with local_stack(settings) as stack:
        draft = stack.draft
        assert isinstance(draft, ChildDraft)
        assert is_alive(draft.pid)
        on = await stack.generate(request(SpeculationPreference.ON))
        off = await stack.generate(request(SpeculationPreference.OFF))
        (link,) = (await stack.status()).draft_links
        assert link.connected
        load = await draft.load()
        assert load.sequences <= 1  # the last close may still be on its way
    assert on.choices[0].token_ids == off.choices[0].token_ids
    assert not is_alive(draft.pid)
    with pytest.raises(EngineUnavailable, match="the draft has ended"):
        await draft.load()


@pytest.mark.timeout(240)
async def test_an_error_inside_ends_the_draft_too() -> None:
    pids: list[int] = []

    async def fail() -> None:
        settings = model_settings(model=MODEL, draft="self", dtype="float32", max_model_len=128, num_seqs=2)
        async with local_stack(settings) as stack:
            assert isinstance(stack.draft, ChildDraft)
            pids.append(stack.draft.pid)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        await fail()
    assert [is_alive(pid) for pid in pids] == [False]


@pytest.mark.timeout(120)
async def test_a_childs_own_error_crosses_the_pipe() -> None:
    config = EngineConfig(model="/nowhere", num_blocks=8, max_model_len=64)
    with pytest.raises(ConfigError, match="/nowhere"):
        await ChildDraft.start(config, DraftConfig(), timeout_s=100.0)


@pytest.mark.timeout(120)
async def test_a_cancelled_start_leaves_no_child() -> None:
    config = EngineConfig(model=MODEL, num_blocks=8, max_model_len=64)
    starting = asyncio.create_task(ChildDraft.start(config, DraftConfig(), timeout_s=100.0))
    await asyncio.sleep(0)  # the child has been started by now
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    children = await asyncio.to_thread(_children)
    assert not [line for line in children if "outrider.local.draft_process" in line]


def _children() -> list[str]:
    """Command lines of this process's living children."""
    import psutil

    return [" ".join(one.cmdline()) for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]


SCRIPT = f"""
import outrider
with outrider.LLM({MODEL!r}, speculative_config={{"model": "self", "num_speculative_tokens": 3}}) as llm:
    print(len(llm.generate("The capital of France is")))
"""


@pytest.mark.timeout(240)
def test_a_script_shows_its_own_words_alone() -> None:
    # Without what the tests set: bars of transformers, and gRPC's word of a server that closes, are no user's.
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=True, env=environment
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
