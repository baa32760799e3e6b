"""API keys: known by their digests, replaced at any time, and never shown."""

import pytest

from outrider.core.errors import ConfigError, Unauthenticated
from outrider.router.api_keys import ApiKey, KeyRing, counted, digest_of, new_key
from outrider.router.limits import KeyLimits
from outrider.router.metrics import NoMetrics


def entry(key_id: str, key: str, **limits: int) -> ApiKey:
    return ApiKey(key_id=key_id, digest=digest_of(key), limits=KeyLimits(**limits))


def test_a_key_is_known_by_its_digest() -> None:
    ring = KeyRing([entry("a", "or-1", requests_per_minute=5), entry("b", "or-2")])
    assert ring.authenticate("or-1") == "a"
    assert ring.limits_of("a").requests_per_minute == 5
    assert ring.limits_of("b") == KeyLimits()


@pytest.mark.parametrize("key", ["or-3", "OR-1", "or-1 ", "x" * 10_000, "\udce9", digest_of("or-1").hex()])
def test_anything_else_is_refused_alike(key: str) -> None:
    ring = KeyRing([entry("a", "or-1")])
    with pytest.raises(Unauthenticated) as caught:
        ring.authenticate(key)
    assert str(caught.value) == "the API key is not known here"


def test_no_key_is_told_how_to_send_one() -> None:
    with pytest.raises(Unauthenticated, match="authorization: Bearer"):
        KeyRing([]).authenticate("")


def test_without_keys_everybody_is_the_same_caller() -> None:
    ring = KeyRing()
    assert ring.authenticate("") == ring.authenticate("anything") == ""
    ring.replace([entry("a", "or-1")])
    with pytest.raises(Unauthenticated):
        ring.authenticate("")
    ring.open_to_all()
    assert ring.authenticate("") == ""


def test_two_keys_of_one_owner_overlap_while_one_replaces_the_other() -> None:
    ring = KeyRing([entry("a", "or-old", tokens_per_minute=9), entry("a", "or-new", tokens_per_minute=9)])
    assert ring.authenticate("or-old") == ring.authenticate("or-new") == "a"


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (entry("b", "or-1"), "'b' and 'a' are the same key"),
        (entry("a", "or-2", requests_per_minute=1), "the keys of 'a' have different limits"),
    ],
)
def test_a_ring_that_contradicts_itself_changes_nothing(second: ApiKey, problem: str) -> None:
    ring = KeyRing([entry("kept", "or-kept")])
    with pytest.raises(ConfigError, match=problem):
        ring.replace([entry("a", "or-1"), second])
    assert ring.authenticate("or-kept") == "kept"


def test_new_keys_differ_and_carry_256_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(one.startswith("or-") and len(one) == 3 + 43 for one in keys)


def test_a_key_shows_neither_itself_nor_its_digest() -> None:
    shown = repr(entry("a", "or-1"))
    assert "or-1" not in shown
    assert digest_of("or-1").hex() not in shown
    assert repr(digest_of("or-1")) not in shown


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"key_id": "", "digest": b"x" * 32}, "id: '' is empty"),
        ({"key_id": "a\n", "digest": b"x" * 32}, "not printable"),
        ({"key_id": "a", "digest": b"x"}, "sha256: 1 bytes"),
    ],
)
def test_an_impossible_key_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ApiKey(**fields)  # type: ignore[arg-type]


class Refusals(NoMetrics):
    def __init__(self) -> None:
        self.errors: list[str] = []

    def request_refused(self, *, error: str) -> None:
        self.errors.append(error)


def test_refused_keys_are_counted() -> None:
    metrics = Refusals()
    authenticate = counted(KeyRing([entry("a", "or-1")]).authenticate, metrics)
    assert authenticate("or-1") == "a"
    for key in ("or-2", ""):
        with pytest.raises(Unauthenticated):
            authenticate(key)
    assert metrics.errors == ["Unauthenticated"] * 2
