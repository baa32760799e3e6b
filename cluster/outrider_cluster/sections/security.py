"""The sections of who may come in and how the parts trust one another: `security`, `data_plane.tls`."""

from pydantic import Field

from outrider_cluster.sections.base import Section

__all__ = ["SecuritySettings", "TlsSettings"]


class SecuritySettings(Section):
    """Who may call."""

    api_keys_file: str | None = Field(default=None, pattern="^/")
    """Absolute path of a YAML file, on every node that has a router; see `outrider keys`. Changes of
    the file apply within a second. null: everybody may call."""


class TlsSettings(Section):
    """Mutual TLS between routers, targets and drafts: each shows a certificate of one authority."""

    cert_file: str = Field(pattern="^/")
    """PEM chain of this cluster's certificate; absolute, the same path on every node."""
    key_file: str = Field(pattern="^/")
    """Its private key, PEM."""
    ca_file: str = Field(pattern="^/")
    """PEM of the authority that every peer's certificate has to come from."""
    server_name: str = Field(default="outrider.internal", min_length=1)
    """Name that every certificate carries as DNS name: replicas move, so no address can be in it."""
