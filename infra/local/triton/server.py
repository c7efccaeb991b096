"""NVIDIA Triton for laptops and tests: the server in the ``nvidia-pytriton`` wheel, or a stand-in where it has none."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

from infra.local.health import check_triton
from infra.local.port import LOOPBACK
from infra.local.process import project_path
from infra.local.service import Launch, Notify
from schemas.errors import ServiceError

_BACKENDS: Final = Path(__file__).with_name("backends")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where the kernel keeps POSIX shared memory, not a temporary file
_RESPONSE_CACHE_BYTES: Final = 32 * 1024 * 1024


class TritonService:
    """A Triton that serves ``model_repository`` in explicit mode, all its models loaded at start.

    Args:
        home: Home directory of the services.
        environment: What the server's own environment is made from.
        model_repository: Directory of models, the same as for Triton's container.
        notify: Told where the server is not Triton.
        use_fallback: Run the KServe server of ``infra.local.kserve`` even where Triton exists.
    """

    name: ClassVar[str] = "triton"
    title: ClassVar[str] = "Triton"
    start_timeout_s: ClassVar[float] = 120.0
    grace_s: ClassVar[float] = 20.0

    def __init__(
        self,
        home: Path,
        *,
        environment: Mapping[str, str],
        model_repository: Path,
        notify: Notify,
        use_fallback: bool = False,
    ) -> None:
        self._directory = home / "triton"
        self._environment = environment
        self._repository = model_repository.absolute()
        self._notify = notify
        self._is_fallback_asked = use_fallback
        self._distribution = None if use_fallback else _find_distribution()
        self._region_prefix = f"headrace_{hashlib.sha256(str(home.absolute()).encode()).hexdigest()[:10]}_"

    @property
    def standard_ports(self) -> Mapping[str, int]:
        """Triton's customary ports; the stand-in speaks gRPC alone."""
        return {"grpc": 8001, "http": 8000, "metrics": 8002} if self._distribution else {"grpc": 8001}

    @property
    def fingerprint(self) -> str:
        """The kind of server and its repository: with another one it must be started anew."""
        return f"{'triton' if self._distribution else 'kserve'}:{self._served}"

    @property
    def _served(self) -> Path:
        """The repository, or an empty directory of our own while there is none: it is not ours to make."""
        return self._repository if self._repository.is_dir() else self._directory / "no_models"

    def prepare(self, ports: Mapping[str, int]) -> Launch:
        """Stage the server's backends, and say how to start it; see :class:`infra.local.service.Service`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._served != self._repository:
            self._served.mkdir(exist_ok=True)
            self._notify(f"Triton serves no models: there is no {self._repository}")
        if self._distribution is None:
            self._notify(
                "Not NVIDIA Triton but a small KServe v2 server on onnxruntime will serve the models: "
                + ("it was asked for" if self._is_fallback_asked else "nvidia-pytriton has no server for this machine")
            )
            return Launch(
                argv=(
                    *(sys.executable, "-m", "infra.local.kserve"),
                    *("--model-repository", str(self._served)),
                    *("--address", f"{LOOPBACK}:{ports['grpc']}"),
                ),
                environment=self._python_environment(),
                cwd=self._directory,
                address=f"{LOOPBACK}:{ports['grpc']}",
            )
        environment = self._python_environment()
        libraries = [sysconfig.get_config_var("LIBDIR"), str(self._distribution.parent / "nvidia_pytriton.libs")]
        libraries += [environment["LD_LIBRARY_PATH"]] if environment.get("LD_LIBRARY_PATH") else []
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        backends = self._stage(self._distribution)
        _check_libraries(backends / "python" / "triton_python_backend_stub", environment)
        return Launch(
            argv=(
                str(self._distribution / "tritonserver" / "bin" / "tritonserver"),
                f"--model-repository={self._served}",
                f"--backend-directory={backends}",
                f"--cache-directory={self._distribution / 'tritonserver' / 'caches'}",
                f"--cache-config=local,size={_RESPONSE_CACHE_BYTES}",
                f"--backend-config=python,shm-region-prefix-name={self._region_prefix}",
                "--model-control-mode=explicit",
                "--load-model=*",
                "--exit-on-error=false",
                "--exit-timeout-secs=10",
                "--allow-gpu-metrics=false",
                "--pinned-memory-pool-byte-size=0",
                "--strict-readiness=false",
                *(f"--{role}-address={LOOPBACK}" for role in ("grpc", "http", "metrics")),
                *(f"--{role}-port={ports[role]}" for role in ("grpc", "http", "metrics")),
            ),
            environment=environment,
            cwd=self._directory,
            address=f"{LOOPBACK}:{ports['grpc']}",
        )

    def check(self, address: str, *, timeout_s: float) -> str:
        """See :func:`infra.local.health.check_triton`."""
        return check_triton(address, timeout_s=timeout_s)

    def clean(self) -> None:
        """Remove the shared memory that a killed server leaves."""
        for region in _SHARED_MEMORY.glob(f"{self._region_prefix}*"):
            region.unlink(missing_ok=True)

    def _python_environment(self) -> dict[str, str]:
        """Make the Python processes of the server find this interpreter, its packages and this project."""
        environment = dict(self._environment)
        interpreter = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join(filter(None, (interpreter, environment.get("PATH"))))
        environment["PYTHONPATH"] = project_path(environment)
        environment["PYTHONUNBUFFERED"] = "1"
        return environment

    def _stage(self, distribution: Path) -> Path:
        """Lay out the backends: the Python backend with the stub of this Python, and the onnxruntime backend on it."""
        server, python = distribution / "tritonserver", f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
        if not stub.is_file():
            offered = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
            msg = (
                f"nvidia-pytriton has no Python backend for Python {python}, expected one of {offered}; "
                "use one of those, or set HEADRACE_TRITON_FALLBACK=1"
            )
            raise ServiceError(msg)
        backends = self._directory / "backends"
        shutil.rmtree(backends, ignore_errors=True)
        shutil.copytree(server / "backends", backends)
        shutil.copytree(_BACKENDS, backends, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(stub, backends / "python")
        return backends


def _find_distribution() -> Path | None:
    package = importlib.util.find_spec("pytriton")
    for directory in (package.submodule_search_locations or []) if package else []:
        if (Path(directory) / "tritonserver" / "bin" / "tritonserver").is_file():
            return Path(directory)
    return None


def _check_libraries(stub: Path, environment: Mapping[str, str]) -> None:
    """Refuse to start where the stub lacks a library: Triton would wait for it for ever at the first model."""
    ldd = shutil.which("ldd", path=environment.get("PATH"))
    if ldd is None:
        return
    answer = subprocess.run(
        [ldd, str(stub)], capture_output=True, text=True, timeout=30, check=False, env=dict(environment)
    )
    missing = [line.split()[0] for line in answer.stdout.splitlines() if "not found" in line]
    if missing:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        msg = (
            f"Triton's Python backend needs {', '.join(missing)}, which {sys.executable} does not bring. "
            f"Install the shared library of Python {python} (Debian and Ubuntu: `apt-get install libpython{python}`; "
            "pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared), or set HEADRACE_TRITON_FALLBACK=1 to run a stand-in, "
            "or HEADRACE_TRITON to the address of a running Triton"
        )
        raise ServiceError(msg)
