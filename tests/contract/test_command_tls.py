"""What the commands call with, against a door that speaks TLS as a gateway's does."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tests.support.certificates import Authority

from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.rpc.client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from outrider_cluster.cli.calling import client_options

pytestmark = pytest.mark.timeout(60)


class OneModel(ModelServiceServicer):
    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="m", max_model_len=100)

    async def GetSpeculationStatus(self, request: object, context: object) -> pb.GetSpeculationStatusResponse:
        return pb.GetSpeculationStatusResponse()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[str]:
    """Its address; `tmp_path` holds its authority as ca_file.pem."""
    issued = Authority().issue("localhost")
    issued.save(tmp_path)
    server = grpc.aio.server()
    add_ModelServiceServicer_to_server(OneModel(), server)
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(issued.key, issued.cert)]))
    await server.start()
    yield f"localhost:{port}"
    await server.stop(None)


async def test_a_door_of_a_known_authority_is_trusted(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_TLS", str(tmp_path / "ca_file.pem"))
    async with OutriderClient(door, client_options()) as client:
        assert (await client.model_info()).model == "m"


@pytest.mark.parametrize("tls", ["", "system"])
async def test_a_door_of_another_authority_is_not(door: str, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TLS", tls)
    async with OutriderClient(door, client_options()) as client:
        with pytest.raises(EngineUnavailable):
            await client.model_info()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TLS", str(tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigError, match=r"OUTRIDER_TLS: .*nowhere\.pem cannot be read"):
        client_options()
