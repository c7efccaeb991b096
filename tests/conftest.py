"""Real services for the tests of one session, each started when the first test asks for it and ended at the end.

Where HEADRACE_KAFKA, HEADRACE_REDIS or HEADRACE_TRITON is set, that service is used as it is.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.services import LocalServices
from jobs.settings import Settings


@pytest.fixture(scope="session")
def model_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of the ``triton`` fixture's server; put a model there and load it over gRPC."""
    return tmp_path_factory.mktemp("model_repository")


@pytest.fixture(scope="session")
def shared_services(tmp_path_factory: pytest.TempPathFactory, model_repository: Path) -> Iterator[LocalServices]:
    """The services that all tests of the session share, none started yet; for chaos take services of your own."""
    settings = Settings.from_environment(os.environ)
    services = LocalServices(
        tmp_path_factory.mktemp("services"),
        environment=os.environ,
        model_repository=model_repository,
        cache=settings.cache,
        given=settings.given_addresses(),
        has_standard_ports=False,
        use_triton_fallback=settings.use_triton_fallback,
    )
    with services.guarded():
        yield services


@pytest.fixture(scope="session")
def kafka(shared_services: LocalServices) -> str:
    """Bootstrap servers of a real Kafka, ``host:port``."""
    return _address(shared_services, "kafka")


@pytest.fixture(scope="session")
def redis_url(shared_services: LocalServices) -> str:
    """URL of a real Redis."""
    return _address(shared_services, "redis")


@pytest.fixture(scope="session")
def triton(shared_services: LocalServices) -> str:
    """gRPC endpoint of a real Triton, ``host:port``; it serves what is loaded from ``model_repository``."""
    return _address(shared_services, "triton")


def _address(services: LocalServices, name: str) -> str:
    address = services.up([name]).get(name)
    assert address is not None
    return address
