"""`outrider bench --address`: the same plan through the public gRPC API."""

from functools import partial

from outrider.local.bench.plan import BenchPlan, Mode
from outrider.local.bench.prompts import Prompt, PromptSet
from outrider.local.bench.report import report_as_json
from outrider.local.bench.session import run_remote
from outrider.local.config import scripted_settings
from outrider.local.stack import local_stack
from outrider.rpc.generation_servicer import add_public_services
from outrider.rpc.server import start_server

WORDS = PromptSet(name="words", prompts=tuple(Prompt(text=f"word {i}") for i in range(2)))


async def test_a_deployment_is_measured_through_its_public_api() -> None:
    plan = BenchPlan(prompt_sets=(WORDS,), modes=(Mode.PLAIN, Mode.SPECULATIVE), num_prompts=2, max_tokens=8, repeats=2)
    metered: list[str] = []
    async with local_stack(scripted_settings(draft_agreement=0.9, max_model_len=128)) as stack:
        server = await start_server([partial(add_public_services, service=stack.service)])
        try:
            result = await run_remote(plan, server.address, metered.append)
        finally:
            await server.stop(0.0)
    report = report_as_json(result)
    assert len(metered) == plan.num_pieces
    assert [row["mode"] for row in report["rows"]] == ["plain", "speculative"]
    assert [row["tokens"] for row in report["details"]["rows"]] == [32, 32]
    assert (report["dtype"], report["threads"]) == (None, None)
    assert set(report["ratios"]) == {"speculative_over_plain"}
