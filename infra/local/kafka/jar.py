"""Fetches the jars of a Kafka broker once per user, by Maven or else by jgo, and checks each against its SHA-256."""

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from infra.local.service import Notify
from schemas.errors import ServiceError

POM: Final = Path(__file__).with_name("pom.xml")
CHECKSUMS: Final = Path(__file__).with_name("jars.sha256")
_COPY_DEPENDENCIES: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.11.0:copy-dependencies"
_MAVEN_NAMESPACE: Final = {"m": "http://maven.apache.org/POM/4.0.0"}
_MAVEN_TIMEOUT_S: Final = 900
_REQUEST_TIMEOUT_S: Final = 60


def kafka_version() -> str:
    """Read the version of Kafka that the pom.xml pins."""
    project = ET.parse(POM).getroot()  # noqa: S314
    version = project.findtext("m:version", namespaces=_MAVEN_NAMESPACE)
    return version or "of unknown version"


def expected_jars() -> dict[str, str]:
    """Read the SHA-256 of each jar, by file name."""
    lines = CHECKSUMS.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def ensure_jars(cache: Path, *, environment: Mapping[str, str], notify: Notify) -> Path:
    """Give the directory of the broker's jars, fetched first where the cache lacks them.

    Args:
        cache: Cache directory of the user; may be shared by any number of processes.
        environment: Where PATH leads to ``mvn``, and what mvn is run with.
        notify: Told before a download starts.

    Raises:
        ServiceError: They can be fetched in neither way; the message says what each answered.
    """
    expected = expected_jars()
    key = hashlib.sha256(POM.read_bytes() + CHECKSUMS.read_bytes()).hexdigest()[:12]
    directory = cache / f"kafka-{kafka_version()}-{key}"
    if _is_complete(directory, expected):
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    for title, fetch in _ways(environment):
        notify(f"Downloading Apache Kafka {kafka_version()} ({len(expected)} jars, 43 MB, once) with {title}")
        with tempfile.TemporaryDirectory(prefix=".kafka-", dir=cache) as temporary:
            jars = Path(temporary) / "jars"
            jars.mkdir()
            try:
                fetch(jars, Path(temporary))
                _verify(jars, expected)
            except ServiceError as exc:
                failures.append(f"{title}: {exc}")
                continue
            _move_into_place(jars, directory, expected)
            return directory
    reasons = "\n  ".join(failures) or "neither mvn is on the PATH nor the package jgo installed"
    msg = (
        f"Apache Kafka {kafka_version()} could not be downloaded:\n  {reasons}\n"
        "Check the connection to Maven Central and try again, or run `make setup`, "
        "or set HEADRACE_KAFKA to the address of a running Kafka"
    )
    raise ServiceError(msg)


def fetch_with_maven(mvn: str, jars: Path, *, scratch: Path, environment: Mapping[str, str]) -> None:
    """Let ``mvn`` copy the runtime dependencies of the pom.xml to ``jars``.

    Raises:
        ServiceError: It fails; the message quotes its last lines.
    """
    pom = scratch / "pom.xml"
    shutil.copyfile(POM, pom)
    command = [
        mvn,
        "-B",
        "-q",
        "-f",
        str(pom),
        _COPY_DEPENDENCIES,
        "-DincludeScope=runtime",
        f"-DoutputDirectory={jars}",
    ]
    try:
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_MAVEN_TIMEOUT_S,
            check=True,
            env=dict(environment),
            cwd=scratch,
        )
    except subprocess.CalledProcessError as exc:
        lines = [line for line in (exc.stdout + exc.stderr).splitlines() if line.strip()]
        msg = f"exit code {exc.returncode}: " + " / ".join(lines[:5])
        raise ServiceError(msg) from exc
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ServiceError(str(exc)) from exc


def fetch_with_jgo(jars: Path, *, scratch: Path) -> None:
    """Resolve the same pom.xml in Python alone and download its runtime jars, eight at a time.

    Raises:
        ServiceError: It fails.
    """
    maven = importlib.import_module("jgo.maven")
    try:
        context = maven.MavenContext(repo_cache=scratch / "repository", timeout=_REQUEST_TIMEOUT_S)
        _, nodes = context.pom_dependency_list(maven.POM(POM))
        artifacts = [node.dep.artifact for node in nodes if node.dep.scope in ("compile", "runtime")]
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="jgo") as pool:
            for path in pool.map(lambda artifact: Path(artifact.resolve()), artifacts):
                shutil.move(path, jars / path.name)
    except Exception as exc:
        msg = f"{type(exc).__name__}: {exc}"
        raise ServiceError(msg) from exc


def _ways(environment: Mapping[str, str]) -> list[tuple[str, Callable[[Path, Path], None]]]:
    ways: list[tuple[str, Callable[[Path, Path], None]]] = []
    mvn = shutil.which("mvn", path=environment.get("PATH", ""))
    if mvn:
        ways.append(
            ("Maven", lambda jars, scratch: fetch_with_maven(mvn, jars, scratch=scratch, environment=environment))
        )
    if importlib.util.find_spec("jgo"):
        ways.append(("jgo", lambda jars, scratch: fetch_with_jgo(jars, scratch=scratch)))
    return ways


def _is_complete(directory: Path, expected: Mapping[str, str]) -> bool:
    return directory.is_dir() and {path.name for path in directory.glob("*.jar")} == set(expected)


def _verify(jars: Path, expected: Mapping[str, str]) -> None:
    got = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in jars.glob("*.jar")}
    if got == expected:
        return
    wrong = sorted(name for name in got.keys() & expected.keys() if got[name] != expected[name])
    parts = [
        f"{what} {', '.join(names)}"
        for what, names in (
            ("missing", sorted(expected.keys() - got.keys())),
            ("not expected", sorted(got.keys() - expected.keys())),
            ("wrong SHA-256 of", wrong),
        )
        if names
    ]
    msg = f"the jars are not those of {CHECKSUMS.name}: {'; '.join(parts)}"
    raise ServiceError(msg)


def _move_into_place(jars: Path, directory: Path, expected: Mapping[str, str]) -> None:
    if directory.exists() and not _is_complete(directory, expected):
        damaged = jars.with_name("damaged")
        directory.rename(damaged)
    try:
        os.rename(jars, directory)
    except OSError:
        if not _is_complete(directory, expected):
            raise
