"""API keys: who calls, and what each caller may use.

A key is 256 random bits, so its plain SHA-256 is as hard to invert as the key is to guess: a slow,
salted hash is for passwords that people choose. Only digests are kept, here and in the file.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.caller import Authenticate
from outrider.core.errors import ConfigError, Unauthenticated
from outrider.router.limits import KeyLimits
from outrider.router.metrics import RouterMetrics

__all__ = ["DIGEST_BYTES", "ApiKey", "KeyRing", "counted", "digest_of", "new_key"]

DIGEST_BYTES = 32
_PREFIX = "or-"
_KEY_BYTES = 32
_MAX_KEY_CHARS = 512
"""Longer ones are nobody's, and not worth hashing."""


def new_key() -> str:
    """A fresh key of 256 random bits. Shown once; nobody can get it back from its digest."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(api_key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).digest()


def counted(authenticate: Authenticate, metrics: RouterMetrics) -> Authenticate:
    """The same, and every refusal is counted: somebody who tries keys out shows in the metrics."""

    def counting(api_key: str) -> str:
        try:
            return authenticate(api_key)
        except Unauthenticated as error:
            metrics.request_refused(error=type(error).__name__)
            raise

    return counting


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key, without the key. Raises `ConfigError`."""

    key_id: str
    """Names its owner in limits, logs and metrics; several keys may share it while one replaces another."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    limits: KeyLimits = field(default_factory=KeyLimits)

    def __post_init__(self) -> None:
        if not self.key_id or not self.key_id.isprintable():
            raise ConfigError(f"id: {self.key_id!r} is empty or not printable")
        if len(self.digest) != DIGEST_BYTES:
            raise ConfigError(f"sha256: {len(self.digest)} bytes; a digest has {DIGEST_BYTES}")


class KeyRing:
    """The keys in force; they may be replaced at any time, which holds from the next request on."""

    def __init__(self, keys: Sequence[ApiKey] | None = None) -> None:
        """`None`: no keys are configured, and everybody is the same nameless caller."""
        self._by_digest: dict[bytes, str] | None = None
        self._limits: dict[str, KeyLimits] = {}
        if keys is not None:
            self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """From now on these keys, and no others. Raises `ConfigError`, and changes nothing then."""
        by_digest: dict[bytes, str] = {}
        limits: dict[str, KeyLimits] = {}
        for one in keys:
            if one.digest in by_digest:
                raise ConfigError(f"sha256: {one.key_id!r} and {by_digest[one.digest]!r} are the same key")
            if limits.setdefault(one.key_id, one.limits) != one.limits:
                raise ConfigError(f"id: the keys of {one.key_id!r} have different limits")
            by_digest[one.digest] = one.key_id
        self._by_digest, self._limits = by_digest, limits

    def open_to_all(self) -> None:
        """From now on no key is asked for."""
        self._by_digest, self._limits = None, {}

    def authenticate(self, api_key: str) -> str:
        """The id of a key (a `core.caller.Authenticate`). Raises `Unauthenticated`.

        The look-up compares digests: how long it takes says nothing about any key.
        """
        if self._by_digest is None:
            return ""
        if not api_key:
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY")
        key_id = self._by_digest.get(digest_of(api_key)) if len(api_key) <= _MAX_KEY_CHARS else None
        if key_id is None:
            raise Unauthenticated("the API key is not known here")
        return key_id

    def limits_of(self, key_id: str) -> KeyLimits:
        """The limits of a key (a `router.admission.LimitsOf`); none for nameless callers."""
        return self._limits.get(key_id, KeyLimits())
