import pytest

from schemas.errors import ConfigError
from streams.sinks.redis_address import RedisAddress, RedisKind


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("redis://cache", RedisKind.SERVER, "cache"),
        ("redis://user:secret@cache:6379/15", RedisKind.SERVER, "cache:6379"),
        ("rediss://cache:6379/?ssl_ca_certs=/ca.pem", RedisKind.SERVER, "cache:6379"),
        ("unix:///run/redis.sock", RedisKind.SERVER, "/run/redis.sock"),
        ("redis+cluster://:secret@a:1", RedisKind.CLUSTER, "a:1"),
        ("rediss+cluster://a:1", RedisKind.CLUSTER, "a:1"),
        ("redis+sentinel://user:secret@a:1,b/mine/3", RedisKind.SENTINEL, "a:1,b/mine"),
    ],
)
def test_what_an_address_leads_to_is_shown_without_the_login(url: str, kind: RedisKind, shown: str) -> None:
    address = RedisAddress.parse(url)
    assert (address.kind, address.shown) == (kind, shown)
    assert "secret" not in repr(address)


def test_a_cluster_keeps_login_and_options() -> None:
    address = RedisAddress.parse("rediss+cluster://u:p@a:1/?ssl_ca_certs=/ca.pem")
    assert address.url == "rediss://u:p@a:1/?ssl_ca_certs=%2Fca.pem"


def test_sentinels_have_a_login_of_their_own_and_the_same_tls() -> None:
    address = RedisAddress.parse(
        "rediss+sentinel://u:p%40@a:1,[::1]:2,c/mine/3?sentinel_username=s&sentinel_password=t&ssl_ca_certs=/ca.pem"
    )
    assert address.sentinels == (("a", 1), ("::1", 2), ("c", 26_379))
    assert address.options == {"username": "u", "password": "p@", "db": 3, "ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert address.sentinel_options == {"username": "s", "password": "t", "ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert (address.master, address.wait_replicas) == ("mine", 0)


def test_the_number_of_replicas_is_no_option_of_the_client() -> None:
    address = RedisAddress.parse("redis://a:1/0?wait_replicas=2")
    assert (address.url, address.wait_replicas) == ("redis://a:1/0", 2)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "it has no scheme"),
        ("user:secret@a:6379", "it has no scheme"),
        ("http://a", "its scheme is 'http'"),
        ("redis+other://a", r"its scheme is 'redis\+other'"),
        ("unix+cluster:///x", r"its scheme is 'unix\+cluster'"),
        ("redis://", "it names no place"),
        ("unix://", "it names no place"),
        ("redis://a:port", "Port could not be cast"),
        ("redis://a/abc", "its database is 'abc'"),
        ("redis://a/0/1", "its database is '0/1'"),
        ("redis://a?x", "bad query field"),
        ("redis://a?wait_replicas=some", "wait_replicas is 'some'"),
        ("redis+cluster://a?wait_replicas=1", "`wait_replicas` is for one master"),
        ("redis+sentinel://a:1", "it names no master"),
        ("redis+sentinel:///mine", "'' is no host and port"),
        ("redis+sentinel://a:1,:2/mine", "':2' is no host and port"),
        ("redis+sentinel://u:secret@a:1/mine/x", "its database is 'x'"),
    ],
)
def test_an_address_that_cannot_be_used_says_why_and_how_one_looks(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"\({reason}.*expected one such as redis://127.0.0.1:6379/0") as caught:
        RedisAddress.parse(url)
    assert "secret" not in str(caught.value)
