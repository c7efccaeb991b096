"""What each local service has to offer so that ``services`` can run it as a child process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Final, Protocol

SERVICE_NAMES: Final = ("kafka", "redis", "triton")
Notify = Callable[[str], None]
"""Takes one line for people about something that takes a while, such as a download."""


@dataclass(frozen=True)
class ServiceAddresses:
    """Where the services are; None for one that is not there.

    Attributes:
        kafka: ``host:port`` of a bootstrap server, several with commas between.
        redis: ``redis://`` URL.
        triton: ``host:port`` of the gRPC endpoint.
    """

    kafka: str | None = None
    redis: str | None = None
    triton: str | None = None

    def get(self, name: str) -> str | None:
        """Give the address of a service by its name."""
        addresses: dict[str, str | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return addresses[name]


@dataclass(frozen=True)
class Launch:
    """A service ready to be started.

    Attributes:
        argv: Program and arguments.
        environment: The whole environment of the child.
        cwd: Its working directory.
        address: What clients will connect to.
        version: Program and version, for people; empty where the health check tells it.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path
    address: str
    version: str = ""


class Service(Protocol):
    """One kind of service: how it is installed, started, asked for its health, and cleaned up after."""

    name: ClassVar[str]
    """Name in commands, settings and files: ``kafka``, ``redis`` or ``triton``."""
    title: ClassVar[str]
    """Name for people."""
    start_timeout_s: ClassVar[float]
    """How long it may take to become healthy."""
    grace_s: ClassVar[float]
    """How long it may take to end after SIGTERM."""

    @property
    def standard_ports(self) -> Mapping[str, int]:
        """The customary port of each role; the first is the one that clients connect to."""

    @property
    def fingerprint(self) -> str:
        """What a running service must have been started with to be used again."""

    def prepare(self, ports: Mapping[str, int]) -> Launch:
        """Install and configure what is needed, and say how to start it.

        Raises:
            ServiceError: Something is missing on this machine; the message says how to get it.
        """

    def check(self, address: str, *, timeout_s: float) -> str:
        """Ask a service at ``address`` for its health and return what it is; raise ``ServiceError`` when unhealthy."""

    def clean(self) -> None:
        """Remove what an ended service leaves outside its home directory."""
