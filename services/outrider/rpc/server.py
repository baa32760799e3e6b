"""Start and stop gRPC servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from outrider.core.errors import ConfigError
from outrider.rpc.channel_options import Keepalive, server_options
from outrider.rpc.malformed import MalformedMessages
from outrider.rpc.tls import TlsFiles

__all__ = ["RunningServer", "ServerOptions", "start_server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where a server listens and how it ends."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port; `RunningServer.port` says which."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    grace_s: float = 5.0
    """At stop, running calls may go on this long before they are cancelled."""
    tls: TlsFiles | None = None
    """Mutual TLS; None: plain text."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port: {self.port} is outside [0, 65535]")
        if self.grace_s < 0:
            raise ConfigError(f"grace_s: {self.grace_s} is below 0")


class RunningServer:
    """A started server."""

    def __init__(self, server: grpc.aio.Server, host: str, port: int, grace_s: float) -> None:
        self._server = server
        self._grace_s = grace_s
        self.port = port
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new calls, let the running ones end for the grace time, then cancel them."""
        await self._server.stop(self._grace_s if grace_s is None else grace_s)

    async def wait(self) -> None:
        """Return once the server has stopped."""
        await self._server.wait_for_termination()


async def start_server(
    services: Sequence[Callable[[grpc.aio.Server], None]], options: ServerOptions | None = None
) -> RunningServer:
    """Start a server; each of `services` adds its servicer. Raises `ConfigError` if it cannot listen."""
    options = options or ServerOptions()
    server = grpc.aio.server(options=server_options(options.keepalive), interceptors=[MalformedMessages()])
    for add in services:
        add(server)
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        if options.tls is None:
            port = server.add_insecure_port(f"{host}:{options.port}")
        else:
            port = server.add_secure_port(f"{host}:{options.port}", options.tls.server_credentials())
    except RuntimeError as error:
        raise ConfigError(f"port: cannot listen on {host}:{options.port}") from error
    await server.start()
    return RunningServer(server, options.host, port, options.grace_s)
