"""How the commands call a deployment."""

from pathlib import Path

import grpc

from outrider.core.errors import ConfigError
from outrider.rpc.client import ClientOptions
from outrider_cluster.settings import Environment

__all__ = ["client_options"]

_KNOWN_TO_THE_SYSTEM = "system"


def client_options() -> ClientOptions:
    """With the API key and the TLS of the environment, where there are any.

    Raises `ConfigError` when the file of authorities cannot be read.
    """
    environment = Environment.read()
    return ClientOptions(api_key=environment.api_key, credentials=_credentials(environment.tls))


def _credentials(authorities: str) -> grpc.ChannelCredentials | None:
    if not authorities:
        return None
    if authorities == _KNOWN_TO_THE_SYSTEM:
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(root_certificates=Path(authorities).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(f"OUTRIDER_TLS: {authorities} cannot be read: {error.strerror}") from error
