"""Certificates that a test makes for itself: an authority, and what it signs."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "Issued"]

_NO_PASSWORD = serialization.NoEncryption()


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate with its key and its authority, in PEM."""

    cert: bytes
    key: bytes
    ca: bytes

    def save(self, folder: Path) -> dict[str, str]:
        """Write the files; returns their paths under the names of the settings."""
        paths = {}
        for name, data in (("cert_file", self.cert), ("key_file", self.key), ("ca_file", self.ca)):
            path = folder / f"{name}.pem"
            path.write_bytes(data)
            paths[name] = str(path)
        return paths


class Authority:
    """A certificate authority."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._cert = builder.sign(self._key, hashes.SHA256())

    def issue(self, dns_name: str) -> Issued:
        """A certificate for this name, as server and as client."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_name)])
        builder = _builder(subject, self._name, key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
        pem = serialization.Encoding.PEM
        return Issued(
            cert=builder.sign(self._key, hashes.SHA256()).public_bytes(pem),
            key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, _NO_PASSWORD),
            ca=self._cert.public_bytes(pem),
        )


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
    )
