import socket
from collections.abc import Iterator

import pytest

from infra.local.port import accepts_connections, choose_ports, is_port_free, split_address
from schemas.errors import ServiceError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_with_a_listener_is_not_free(taken_port: int) -> None:
    assert not is_port_free(taken_port)


def test_a_port_taken_on_all_addresses_is_not_free() -> None:
    with socket.create_server(("", 0)) as server:
        assert not is_port_free(server.getsockname()[1])


def test_a_free_wanted_port_is_taken_and_another_replaces_a_taken_one(taken_port: int) -> None:
    free = choose_ports({"any": 0})["any"]

    chosen = choose_ports({"grpc": free, "http": taken_port})

    assert chosen["grpc"] == free
    assert chosen["http"] not in (free, taken_port)
    assert is_port_free(chosen["http"])


def test_ports_of_one_service_differ_even_when_the_same_is_wanted() -> None:
    free = choose_ports({"any": 0})["any"]

    chosen = choose_ports({"broker": free, "controller": free, "admin": 0})

    assert len(set(chosen.values())) == 3


def test_free_ports_lie_below_those_of_outgoing_connections() -> None:
    assert all(15_000 <= port < 32_000 for port in choose_ports(dict.fromkeys("abcdefgh", 0)).values())


def test_no_free_port_at_all_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.local.port.is_port_free", lambda port: False)

    with pytest.raises(ServiceError, match=r"was free in 200 tries, expected most to be; end what listens there"):
        choose_ports({"broker": 9092})


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":9092", "host:0", "host:65536", "host:9x", "host:-1", "http://host:80", "::1:9092", "a b:1"],
)
def test_an_address_that_is_not_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ServiceError, match=r"The address of Kafka is .*, expected host:port"):
        split_address(address, service="Kafka")


def test_ipv6_addresses_are_taken_out_of_their_brackets() -> None:
    assert split_address("[::1]:9092", service="Kafka") == ("::1", 9092)


def test_connections_tell_a_listener_from_a_free_port(taken_port: int) -> None:
    free = choose_ports({"any": 0})["any"]

    assert accepts_connections(f"127.0.0.1:{taken_port}", service="Kafka")
    assert not accepts_connections(f"127.0.0.1:{free}", service="Kafka")
