"""Rejection rule over a real stream and through the drafting thread: a table of ids, and laws for what is launched."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest
from tests.contract.rpc_fakes import RealClock, Servers
from tests.unit.draft.bench import Bench, Peer, hello

from outrider.core.link import (
    Capability,
    Launch,
    LaunchRow,
    LinkEvent,
    LinkUp,
    OpenAck,
    OutcomeTable,
    VerdictRow,
    Verdicts,
)
from outrider.core.policy import RoundPlan
from outrider.core.prefix_hash import PrefixHash
from outrider.core.proposal import BlockLaws, Proposal
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationReason, VerificationRule
from outrider.draft.loop import DraftLoop
from outrider.rpc.link_client import GrpcDraftTransport
from outrider.rpc.link_server import SpeculationServicer
from outrider.v1.speculation_pb2_grpc import add_SpeculationServiceServicer_to_server

pytestmark = pytest.mark.timeout(60)

PROMPT = [5, 7, 11, 2, 9, 30, 41]
AHEAD = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON, branch_budget=5)
E = TypeVar("E")


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    await servers.stop()


async def receive(transport: GrpcDraftTransport, kind: type[E]) -> E:
    """The next event of this kind; others are passed over."""
    while True:
        events: list[LinkEvent] = await asyncio.to_thread(transport.receive, 20.0)
        assert events, "nothing arrived"
        for event in events:
            if isinstance(event, kind):
                return event


def in_flight(base_len: int, block: Proposal | None) -> Launch:
    row = LaunchRow(
        handle=1,
        base_len=base_len,
        block_id=0 if block is None else block.block_id,
        num_used=0 if block is None else len(block),
        source=None if block is None else ProposalSource.DRAFT,
        ahead=AHEAD,
    )
    return Launch(step=1, rows=(row,), budget_us=0)


@pytest.mark.parametrize("late", [True, False])
async def test_laws_come_for_the_launched_block_or_in_the_table(servers: Servers, late: bool) -> None:
    bench = Bench()
    loop = DraftLoop(drafter=bench.drafter, config=bench.config)
    servicer = SpeculationServicer(loop)
    server = await servers.start(lambda grpc_server: add_SpeculationServiceServicer_to_server(servicer, grpc_server))
    loop.start()
    capabilities = frozenset(Capability) - {Capability.FEATURES} - (set() if late else {Capability.LATE_LAWS})
    transport = GrpcDraftTransport(hello(capabilities=capabilities), clock=RealClock())
    transport.set_address(server.address)
    transport.start()
    try:
        up = await receive(transport, LinkUp)
        assert Capability.LATE_LAWS in up.hello.capabilities
        opening = Peer(bench, 0).opening(1, PROMPT, sampling=SamplingParams(), rule=VerificationRule.REJECTION)
        assert transport.send([opening])
        await receive(transport, OpenAck)
        assert transport.send([in_flight(len(PROMPT), None)])
        for entry in (await receive(transport, OutcomeTable)).entries():
            assert len(entry.proposal.laws) == (0 if late else len(entry.proposal))
        if late:
            assert transport.send([came_true(entry.next_token_id), in_flight(len(PROMPT) + 1, entry.proposal)])
            laws = await receive(transport, BlockLaws)
            assert (laws.handle, laws.base_len, laws.block_id) == (1, len(PROMPT) + 1, entry.proposal.block_id)
            for token_id, law in zip(entry.proposal.token_ids, laws.laws, strict=True):
                assert token_id in law.token_ids
                assert sum(law.probs) == pytest.approx(1.0, abs=1e-5)
        assert transport.dropped == servicer.counters.dropped == 0
    finally:
        await transport.stop()
        assert await asyncio.to_thread(loop.stop, 20.0)


def came_true(next_token_id: int) -> Verdicts:
    row = VerdictRow(
        handle=1,
        base_len=len(PROMPT),
        block_id=0,
        num_accepted=0,
        next_token_id=next_token_id,
        prefix_hash=PrefixHash([*PROMPT, next_token_id]).value,
        plan=AHEAD,
    )
    return Verdicts(step=1, rows=(row,))
