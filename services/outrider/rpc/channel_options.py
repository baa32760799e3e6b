"""Options of channels and servers: keepalive, message sizes, reconnection."""

from dataclasses import dataclass

import grpc
import grpc.aio

from outrider.core.errors import ConfigError
from outrider.rpc.tls import TlsFiles

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Keepalive",
    "Options",
    "client_channel_options",
    "data_plane_channel",
    "data_plane_channel_options",
    "server_options",
]

MAX_MESSAGE_BYTES = 32 << 20
"""Limit of one message in either direction: a prompt of millions of token ids."""

_WINDOW_BYTES = 1 << 20  # flow control, in place of what probing would find

Options = list[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """How soon a silent peer is given up: after `time_s` of silence a ping, `timeout_s` for its answer.

    A dead process is seen at once (its kernel closes the connection); this is for partitions and
    dead machines, which the control plane sees only after many seconds.
    """

    time_s: float = 1.5
    timeout_s: float = 1.5

    def __post_init__(self) -> None:
        for name in ("time_s", "timeout_s"):
            if getattr(self, name) < 0.01:
                raise ConfigError(f"keepalive.{name}: {getattr(self, name)} is below 0.01")


def data_plane_channel_options(keepalive: Keepalive) -> Options:
    """For a long-lived stream inside the cluster; whoever opens it reconnects by itself."""
    return [
        *_common(keepalive),
        # A connection of its own: one broken stream must not make another wait for its back-off.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]


def data_plane_channel(address: str, keepalive: Keepalive, tls: TlsFiles | None) -> grpc.aio.Channel:
    """A channel inside the cluster. Raises `ConfigError` when a certificate cannot be read."""
    options = data_plane_channel_options(keepalive)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=named)


def client_channel_options() -> Options:
    """For a public client: survives idle time, reconnects quickly."""
    return [
        *_common(Keepalive(time_s=30.0, timeout_s=10.0)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def server_options(keepalive: Keepalive) -> Options:
    """For every server: answers frequent pings, and pings its clients itself."""
    return [
        *_common(keepalive),
        # Without these a server answers frequent pings with GOAWAY too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 10),
        ("grpc.http2.max_ping_strikes", 0),
        # A second server on the same port is an error, not a partner.
        ("grpc.so_reuseport", 0),
    ]


def _common(keepalive: Keepalive) -> Options:
    return [
        ("grpc.keepalive_time_ms", round(keepalive.time_s * 1e3)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * 1e3)),
        # While a ping of another kind is under way no keepalive ping is sent, and that other one may
        # wait 60 s for its answer: it gets the same limit, and probes of the bandwidth are off.
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout_s * 1e3)),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]
