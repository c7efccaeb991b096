"""Keys of producers, and how many they may be."""

import re

import pytest

from schemas.errors import ConfigError, SinkRejectedError
from streams.serving import producer_key
from streams.serving.producer_key import KeyRing, ProducerKey, Rate, digest_of, make_secret, version_of


def make_key(name: str = "shop", *, text: str = "s", sources: tuple[str, ...] = ("*",)) -> ProducerKey:
    return ProducerKey(
        name=name, digest=digest_of(text), sources=sources, rate=Rate(10, 20), created_at="2026-01-01T00:00:00Z"
    )


def test_no_two_keys_are_alike_and_each_has_32_bytes() -> None:
    secrets = {make_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(re.fullmatch(r"hrk_[A-Za-z0-9_-]{43}", secret) for secret in secrets)


def test_what_is_kept_is_read_as_it_was_and_has_no_key_in_it() -> None:
    secret = make_secret()
    ring = KeyRing().with_key(make_key(text=secret, sources=("a", "b"))).with_key(make_key("other", text="o"))
    packed = ring.packed()
    assert KeyRing.unpacked(packed) == ring
    assert version_of(packed) == ring.version == 2
    assert secret.encode() not in packed
    assert ring.by_digest[digest_of(secret)].name == "shop"
    assert KeyRing.unpacked(None) == KeyRing()


@pytest.mark.parametrize("packed", [b"x", b"0" * 20, b"1" * 20 + b"[{}]", b"1" * 20 + b"{}x", b"1" * 20 + b"[1]"])
def test_what_are_no_keys_is_refused(packed: bytes) -> None:
    with pytest.raises(SinkRejectedError, match="the keys of producers cannot be read"):
        KeyRing.unpacked(packed)


@pytest.mark.parametrize("name", ["", "-open", "a b", "a:b", "x" * 65, "ä", "a\n"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a key cannot be called"):
        KeyRing().with_key(make_key(name))


def test_a_name_is_taken_until_its_key_is_revoked() -> None:
    ring = KeyRing().with_key(make_key())
    with pytest.raises(ConfigError, match="there is a key 'shop' already"):
        ring.with_key(make_key(text="t"))
    ring = ring.with_revoked("shop", at="2026-01-02T00:00:00Z").with_key(make_key(text="t"))
    assert [(key.name, key.revoked_at) for key in ring.keys] == [("shop", "2026-01-02T00:00:00Z"), ("shop", None)]
    ring = ring.with_revoked("shop", at="2026-01-03T00:00:00Z")
    assert [key.revoked_at for key in ring.keys] == ["2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z"]
    with pytest.raises(ConfigError, match=r"there is no key 'shop' to revoke, expected one of \[\]"):
        ring.with_revoked("shop", at="2026-01-04T00:00:00Z")


def test_the_oldest_revoked_key_is_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_key, "MAX_KEYS", 3)
    ring = KeyRing()
    for name in ("a", "b", "c"):
        ring = ring.with_key(make_key(name, text=name))
    with pytest.raises(ConfigError, match="there are 3 keys, expected fewer"):
        ring.with_key(make_key("d", text="d"))
    ring = ring.with_revoked("b", at="2026-01-02T00:00:00Z").with_key(make_key("d", text="d"))
    assert [key.name for key in ring.keys] == ["a", "c", "d"]


@pytest.mark.parametrize("sources", [("a",), ("a", "b"), ("*",)])
def test_a_key_is_good_for_its_sources(sources: tuple[str, ...]) -> None:
    key = make_key(sources=sources)
    assert [key.may_send_to(source) for source in ("a", "b")] == [True, sources != ("a",)]


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (1, 0), (-1, 1), (1_000_001, 1), (1, 1_000_001)])
def test_a_rate_that_is_none_is_refused(per_s: int, burst: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 1000000"):
        Rate(per_s, burst)
