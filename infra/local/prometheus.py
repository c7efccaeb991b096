"""Prometheus for laptops and tests: the one on the PATH, or Debian's package unpacked into a cache, without root."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infra.local.http_server import run_http_server
from infra.local.port import LOOPBACK, choose_ports
from infra.local.service import Notify
from schemas.errors import ServiceError

_REMEDY: Final = (
    "install Prometheus (`apt-get install prometheus` on Debian and Ubuntu, `brew install prometheus` on macOS, or "
    "https://prometheus.io/download) so that `prometheus` and `promtool` are on the PATH"
)
_PROGRAMS: Final = ("prometheus", "promtool")
_PACKAGE: Final = "prometheus"
_COMMAND_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class PrometheusPrograms:
    """Where the programs are.

    Attributes:
        prometheus: The server.
        promtool: The checker of configurations, rules and metrics.
    """

    prometheus: Path
    promtool: Path


def find_prometheus(
    *, environment: Mapping[str, str], cache: Path, notify: Notify = lambda _: None
) -> PrometheusPrograms:
    """Find Prometheus on the PATH or in the cache, else download and unpack Debian's package into the cache.

    Args:
        environment: Environment whose PATH is searched.
        cache: Directory that keeps what was downloaded.
        notify: Told before a download.

    Raises:
        ServiceError: There is none and it cannot be downloaded here; the message says how to get it.
    """
    on_path = [shutil.which(name, path=environment.get("PATH", "")) for name in _PROGRAMS]
    if on_path[0] and on_path[1]:
        return PrometheusPrograms(prometheus=Path(on_path[0]), promtool=Path(on_path[1]))
    programs = cache / "prometheus" / "usr" / "bin"
    if not all((programs / name).is_file() for name in _PROGRAMS):
        _unpack_debian_package(cache, environment=environment, notify=notify)
    return PrometheusPrograms(prometheus=programs / _PROGRAMS[0], promtool=programs / _PROGRAMS[1])


def run_promtool(programs: PrometheusPrograms, *arguments: str, text: str = "", cwd: Path | None = None) -> str:
    """Run ``promtool`` and return what it says.

    Args:
        programs: Where it is.
        arguments: Its arguments.
        text: What it reads from its standard input.
        cwd: Its working directory.

    Raises:
        ServiceError: It found faults; the message tells them.
    """
    done = subprocess.run(
        [programs.promtool, *arguments],
        input=text,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=_COMMAND_TIMEOUT_S,
    )
    said = f"{done.stdout}{done.stderr}".strip()
    if done.returncode:
        msg = f"promtool {' '.join(arguments)} found faults:\n{said}"
        raise ServiceError(msg)
    return said


@contextmanager
def run_prometheus(
    programs: PrometheusPrograms, config: Path, *, directory: Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """Run a Prometheus server on a free loopback port, until the block ends.

    Args:
        programs: Where it is.
        config: Its configuration file; paths in it are relative to it.
        directory: Takes its data and log.
        environment: Its environment.

    Yields:
        Its URL, once it is ready.

    Raises:
        ServiceError: It does not become ready; the message quotes its log.
    """
    port = choose_ports({"prometheus": 0})["prometheus"]
    url = f"http://{LOOPBACK}:{port}"
    argv = [
        str(programs.prometheus),
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]
    with run_http_server("Prometheus", argv, ready_url=f"{url}/-/ready", directory=directory, environment=environment):
        yield url


def _unpack_debian_package(cache: Path, *, environment: Mapping[str, str], notify: Notify) -> None:
    path = environment.get("PATH", "")
    if not all(shutil.which(name, path=path) for name in ("apt-get", "dpkg")):
        msg = f"There is no `prometheus` and `promtool` on the PATH, and no apt-get to download them with; {_REMEDY}"
        raise ServiceError(msg)
    notify("Downloading Debian's Prometheus (about 20 MB)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="prometheus-") as directory:
        work = Path(directory)
        try:
            _run(["apt-get", "download", _PACKAGE], cwd=work, environment=environment)
        except ServiceError:
            # The lists of packages are missing or old. Fresh ones of our own need no root.
            for folder in ("state/lists/partial", "cache/archives/partial"):
                (work / folder).mkdir(parents=True)
            own = [
                *("-o", f"Dir::State::Lists={work / 'state/lists'}"),
                *("-o", f"Dir::Cache={work / 'cache'}"),
                *("-o", "APT::Sandbox::User="),
            ]
            _run(["apt-get", *own, "update"], cwd=work, environment=environment)
            _run(["apt-get", *own, "download", _PACKAGE], cwd=work, environment=environment)
        (package,) = work.glob(f"{_PACKAGE}_*.deb")
        unpacked = work / "unpacked"
        _run(["dpkg", "-x", str(package), str(unpacked)], cwd=work, environment=environment)
        # Another process may have done the same meanwhile: what is there is as good.
        if not (cache / "prometheus").exists():
            unpacked.rename(cache / "prometheus")


def _run(argv: Sequence[str], *, cwd: Path, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        msg = f"`{' '.join(argv)}` could not be run ({exc}); {_REMEDY}"
        raise ServiceError(msg) from exc
    if done.returncode:
        msg = f"`{' '.join(argv)}` failed: {done.stderr.strip()[-500:]}; {_REMEDY}"
        raise ServiceError(msg)
