"""Mutual TLS inside the cluster: who has no certificate of the authority gets nothing."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.contract.rpc_fakes import HELLO, RealClock, ScriptedDraft, ScriptedEngine
from tests.support.certificates import Authority

from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.core.link import LinkDown, LinkEvent, LinkUp
from outrider.rpc.backoff import BackoffOptions
from outrider.rpc.dispatch_client import GrpcEngineSession
from outrider.rpc.dispatch_server import DispatchServicer
from outrider.rpc.link_client import GrpcDraftTransport, LinkOptions
from outrider.rpc.link_server import SpeculationServicer
from outrider.rpc.link_stream import StreamOptions
from outrider.rpc.server import RunningServer, ServerOptions, start_server
from outrider.rpc.tls import TlsFiles
from outrider.v1.dispatch_pb2_grpc import add_DispatchServiceServicer_to_server
from outrider.v1.speculation_pb2_grpc import add_SpeculationServiceServicer_to_server

pytestmark = pytest.mark.timeout(60)

NAME = "outrider.internal"
CONNECT_S = 5.0


def files(folder: Path, authority: Authority, *, dns_name: str = NAME) -> TlsFiles:
    folder.mkdir(exist_ok=True)
    return TlsFiles(**authority.issue(dns_name).save(folder), server_name=NAME)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(tmp_path: Path, authority: Authority) -> TlsFiles:
    return files(tmp_path / "good", authority)


@pytest.fixture
async def server(tls: TlsFiles) -> AsyncIterator[RunningServer]:
    running = await start_server(
        [
            partial(add_DispatchServiceServicer_to_server, DispatchServicer(ScriptedEngine())),
            partial(add_SpeculationServiceServicer_to_server, SpeculationServicer(ScriptedDraft())),
        ],
        ServerOptions(grace_s=0.0, tls=tls),
    )
    yield running
    await running.stop()


async def test_peers_of_one_authority_talk(server: RunningServer, tls: TlsFiles) -> None:
    session = await GrpcEngineSession.connect(server.address, "r", CONNECT_S, tls=tls)
    assert session.hello.engine_id == "engine-0"
    session.close()
    await session.wait_closed()


async def test_plain_text_is_refused(server: RunningServer) -> None:
    with pytest.raises(EngineUnavailable):
        await GrpcEngineSession.connect(server.address, "r", CONNECT_S)


async def test_a_stranger_is_refused(server: RunningServer, tls: TlsFiles, tmp_path: Path) -> None:
    stranger = files(tmp_path / "stranger", Authority())
    with_known_ca = TlsFiles(
        cert_file=stranger.cert_file, key_file=stranger.key_file, ca_file=tls.ca_file, server_name=NAME
    )
    for client in (stranger, with_known_ca):
        with pytest.raises(EngineUnavailable):
            await GrpcEngineSession.connect(server.address, "r", CONNECT_S, tls=client)


async def test_a_server_of_another_name_is_not_believed(tmp_path: Path, authority: Authority, tls: TlsFiles) -> None:
    other = files(tmp_path / "other", authority, dns_name="elsewhere.internal")
    servicer = DispatchServicer(ScriptedEngine())
    running = await start_server(
        [partial(add_DispatchServiceServicer_to_server, servicer)], ServerOptions(grace_s=0.0, tls=other)
    )
    try:
        with pytest.raises(EngineUnavailable):
            await GrpcEngineSession.connect(running.address, "r", CONNECT_S, tls=tls)
    finally:
        await running.stop()
    assert servicer.streams == 0


async def test_a_server_in_plain_text_is_not_believed(tls: TlsFiles) -> None:
    running = await start_server(
        [partial(add_DispatchServiceServicer_to_server, DispatchServicer(ScriptedEngine()))],
        ServerOptions(grace_s=0.0),
    )
    try:
        with pytest.raises(EngineUnavailable):
            await GrpcEngineSession.connect(running.address, "r", CONNECT_S, tls=tls)
    finally:
        await running.stop()


async def linked(server: RunningServer, tls: TlsFiles | None) -> LinkEvent:
    """The first event of a link to the draft."""
    options = LinkOptions(
        stream=StreamOptions(tls=tls, hello_timeout_s=CONNECT_S), backoff=BackoffOptions(initial_s=0.01, max_s=0.02)
    )
    transport = GrpcDraftTransport(HELLO, clock=RealClock(), options=options)
    transport.set_address(server.address)
    transport.start()
    try:
        return (await asyncio.to_thread(transport.receive, 20.0))[0]
    finally:
        await transport.stop()


async def test_the_link_to_a_draft_is_guarded_alike(server: RunningServer, tls: TlsFiles, tmp_path: Path) -> None:
    assert isinstance(await linked(server, tls), LinkUp)
    assert isinstance(await linked(server, None), LinkDown)
    assert isinstance(await linked(server, files(tmp_path / "stranger", Authority())), LinkDown)


async def test_certificates_are_renewed_without_a_restart(server: RunningServer, tls: TlsFiles) -> None:
    renewed = Authority()
    renewed.issue(NAME).save(Path(tls.ca_file).parent)
    session = await GrpcEngineSession.connect(server.address, "r", CONNECT_S, tls=tls)
    session.close()
    await session.wait_closed()


async def test_a_broken_renewal_changes_nothing(server: RunningServer, tls: TlsFiles, tmp_path: Path) -> None:
    good = Path(tls.ca_file).parent
    shutil.copytree(good, tmp_path / "copy")
    copies = {name: str(tmp_path / "copy" / f"{name}.pem") for name in ("cert_file", "key_file", "ca_file")}
    shutil.rmtree(good)
    session = await GrpcEngineSession.connect(server.address, "r", CONNECT_S, tls=TlsFiles(**copies, server_name=NAME))
    session.close()
    await session.wait_closed()


async def test_files_that_are_missing_are_named_by_their_setting(tls: TlsFiles, tmp_path: Path) -> None:
    missing = TlsFiles(cert_file="/nowhere", key_file=tls.key_file, ca_file=tls.ca_file, server_name=NAME)
    with pytest.raises(ConfigError, match=r"data_plane\.tls\.cert_file: cannot be read: No such file") as caught:
        await start_server([], ServerOptions(tls=missing))
    assert "/nowhere" not in str(caught.value)
    with pytest.raises(EngineUnavailable, match=r"data_plane\.tls\.cert_file"):
        await GrpcEngineSession.connect("127.0.0.1:1", "r", CONNECT_S, tls=missing)
