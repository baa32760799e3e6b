"""Mutual TLS of the channels between routers, targets and drafts."""

import logging
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.core.errors import ConfigError

__all__ = ["TlsFiles"]

_logger = logging.getLogger(__name__)

_Pem = tuple[bytes, bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one process. Read anew for every connection, so that certificates are renewed without a restart."""

    cert_file: str
    """This process's certificate chain."""
    key_file: str
    """Its private key."""
    ca_file: str
    """The authority that every peer's certificate has to come from."""
    server_name: str
    """DNS name that every server's certificate carries: replicas move, so no address can be in it."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For whoever connects. Raises `ConfigError` when a file cannot be read."""
        key, chain, authority = self._read()
        return grpc.ssl_channel_credentials(root_certificates=authority, private_key=key, certificate_chain=chain)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For whoever listens: peers without a certificate of the authority are refused.

        Raises `ConfigError` when a file cannot be read now; later the last good files stay in force.
        """
        current = _configuration(self._read())

        def renewed() -> grpc.ServerCertificateConfiguration:
            nonlocal current
            try:
                current = _configuration(self._read())
            except ConfigError as error:
                _logger.error("the certificates stay as they were: %s", error)
            return current

        return grpc.dynamic_ssl_server_credentials(current, renewed, require_client_authentication=True)

    def _read(self) -> _Pem:
        pems = []
        for name in ("key_file", "cert_file", "ca_file"):
            try:
                pems.append(Path(getattr(self, name)).read_bytes())
            except OSError as error:
                raise ConfigError(f"data_plane.tls.{name}: cannot be read: {error.strerror}") from error
        key, chain, authority = pems
        return key, chain, authority


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    key, chain, authority = pem
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authority)
