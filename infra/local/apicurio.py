"""A schema registry for laptops and tests: Apicurio, which speaks the protocol of Confluent's, from Maven Central."""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from infra.local.http_server import run_http_server
from infra.local.kafka.java import find_java
from infra.local.port import LOOPBACK, choose_ports
from infra.local.service import Notify
from schemas.errors import ServiceError

VERSION: Final = "3.3.3"
_SHA256: Final = "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63"
_ARTIFACT: Final = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
_COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.11.0:copy"
_OLDEST_JAVA: Final = 21
_API: Final = "/apis/ccompat/v7"
_DOWNLOAD_TIMEOUT_S: Final = 900.0


def find_apicurio(*, environment: Mapping[str, str], cache: Path, notify: Notify = lambda _: None) -> Path:
    """Find Apicurio in the cache, else fetch it with Maven (160 MB, once) and check its SHA-256.

    Raises:
        ServiceError: It is not there and cannot be fetched; the message says how to go on.
    """
    home = cache / f"apicurio-{VERSION}"
    if (home / "quarkus-run.jar").is_file():
        return home
    mvn = shutil.which("mvn", path=environment.get("PATH", ""))
    if mvn is None:
        msg = "there is no `mvn` on the PATH to fetch Apicurio with; install Maven, or use a registry that runs"
        raise ServiceError(msg)
    notify(f"Downloading Apicurio Registry {VERSION} (160 MB, once) with Maven")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".apicurio-") as scratch:
        place = Path(scratch)
        command = [mvn, "-B", "-q", _COPY, f"-Dartifact={_ARTIFACT}", f"-DoutputDirectory={place}"]
        try:
            subprocess.run(
                command,
                cwd=place,
                env=dict(environment),
                capture_output=True,
                text=True,
                check=True,
                timeout=_DOWNLOAD_TIMEOUT_S,
            )
            (archive,) = place.glob("*.tar.gz")
        except subprocess.CalledProcessError as exc:
            msg = f"Apicurio {VERSION} could not be fetched: {(exc.stdout + exc.stderr).strip()[-500:]}"
            raise ServiceError(msg) from exc
        except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
            msg = f"Apicurio {VERSION} could not be fetched: {exc}"
            raise ServiceError(msg) from exc
        if (got := hashlib.sha256(archive.read_bytes()).hexdigest()) != _SHA256:
            msg = f"{archive.name} has SHA-256 {got}, expected {_SHA256}; try again"
            raise ServiceError(msg)
        with tarfile.open(archive) as packed:
            packed.extractall(place / "unpacked", filter="data")
        try:
            (place / "unpacked").rename(home)
        except OSError:  # another process has put it there meanwhile
            if not (home / "quarkus-run.jar").is_file():
                raise
    return home


@contextmanager
def run_apicurio(home: Path, *, directory: Path, environment: Mapping[str, str], port: int = 0) -> Iterator[str]:
    """Run a registry on a loopback port, with nothing in it, until the block ends.

    Args:
        home: Where it is.
        directory: Takes its log.
        environment: Its environment.
        port: The port; 0 for any free one.

    Yields:
        The URL that a client of Confluent's registry takes.

    Raises:
        ServiceError: It does not become ready; the message quotes its log.
    """
    ports = choose_ports({"registry": port, "management": 0})
    url = f"http://{LOOPBACK}:{ports['registry']}{_API}"
    argv = [
        str(find_java(environment, oldest=_OLDEST_JAVA).program),
        *("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        *(f"-Dquarkus.http.host={LOOPBACK}", f"-Dquarkus.http.port={ports['registry']}"),
        *(f"-Dquarkus.management.host={LOOPBACK}", f"-Dquarkus.management.port={ports['management']}"),
        *("-jar", str(home / "quarkus-run.jar")),
    ]
    with run_http_server("Apicurio", argv, ready_url=f"{url}/subjects", directory=directory, environment=environment):
        yield url
