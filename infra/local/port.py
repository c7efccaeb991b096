"""Choice of loopback ports for services that run beside whatever else the machine has."""

import re
import secrets
import socket
from collections.abc import Collection, Mapping
from typing import Final

from schemas.errors import ServiceError

LOOPBACK: Final = "127.0.0.1"
_FREE_PORTS: Final = range(15_000, 32_000)
"""Below the ports that systems give to outgoing connections. A client that keeps trying to reach a service which is
down would, on one of those, sooner or later be given the service's own port and be connected to itself."""
_TRIES: Final = 200
_ADDRESS: Final = re.compile(r"(?:(?P<host>[\w.-]+)|\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]):(?P<port>[0-9]{1,5})", re.ASCII)


def without_login(address: str) -> str:
    """Take user and password out of an address, for people and logs."""
    return re.sub(r"//[^@/]*@", "//", address)


def is_port_free(port: int) -> bool:
    """Tell whether a server could listen on ``port`` of the loopback address now.

    Both the loopback address and the wildcard are tried: a server on ``0.0.0.0`` would otherwise be shadowed, and
    clients of one would reach the other.
    """
    for host in (LOOPBACK, ""):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((host, port))
                server.listen(1)
            except OSError:
                return False
    return True


def choose_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """Take each wanted port that is free, and any free one in place of the others.

    Args:
        wanted: Port by its role; 0 for any free one.

    Returns:
        A port for each role, all different. They are free now; another process may still take one before the
        service does, so that a service that dies over a taken port is started again with other ports.

    Raises:
        ServiceError: No port is free.
    """
    chosen: dict[str, int] = {}
    for role, port in wanted.items():
        if port and port not in chosen.values() and is_port_free(port):
            chosen[role] = port
    for role in wanted:
        if role not in chosen:
            chosen[role] = _any_free_port(taken=chosen.values())
    return {role: chosen[role] for role in wanted}


def _any_free_port(*, taken: Collection[int]) -> int:
    for _ in range(_TRIES):
        port = _FREE_PORTS.start + secrets.randbelow(len(_FREE_PORTS))
        if port not in taken and is_port_free(port):
            return port
    msg = (
        f"No port from {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1} was free in {_TRIES} tries, expected most to be; "
        "end what listens there (`ss -ltnp` lists it)"
    )
    raise ServiceError(msg)


def split_address(address: str, *, service: str) -> tuple[str, int]:
    """Take ``host:port`` (IPv6 in brackets) apart.

    Raises:
        ServiceError: ``address`` is not of that form.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65_536:
        msg = f"The address of {service} is {address!r}, expected host:port with a port from 1 to 65535"
        raise ServiceError(msg)
    return match["ipv6"] or match["host"], int(match["port"])


def accepts_connections(address: str, *, service: str, timeout_s: float = 1.0) -> bool:
    """Tell whether anything listens at ``host:port``; cheap, and silent where a client library would log."""
    try:
        with socket.create_connection(split_address(address, service=service), timeout=timeout_s):
            return True
    except OSError:
        return False
