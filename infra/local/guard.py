"""Ends the services of a home directory when the process at the other end of standard input ends, in whatever way.

A test run or a demo that is killed cannot clean up after itself, so :func:`watch` lets ``python -m infra.local.guard``
watch over it.
"""

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from infra.local.process import project_path
from infra.local.state import read_state

_END_TIMEOUT_S: Final = 120.0


@contextlib.contextmanager
def watch(home: Path, *, environment: Mapping[str, str], started_by: str | None = None) -> Iterator[None]:
    """Have the services of ``home`` ended if this process ends inside the block; at the block's end, wait for that.

    With ``started_by``, those alone whose records carry it. The watching process has a session of its own, out of reach
    of Ctrl-C and of signals to this one's group.
    """
    log = home / "logs" / "guard.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        guard = subprocess.Popen(
            [sys.executable, "-m", "infra.local.guard", str(home), *([started_by] if started_by else [])],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=home,
            env={**environment, "PYTHONPATH": project_path(environment)},
            start_new_session=True,
        )
    try:
        yield
    finally:
        guard.communicate(timeout=_END_TIMEOUT_S)


def main(home: Path, started_by: str | None = None) -> None:
    """Wait for the end of standard input, then end what is still recorded as running under ``home``."""
    sys.stdin.buffer.read()
    names = [name for name, record in read_state(home).items() if started_by in (None, record.started_by)]
    if names:
        services = importlib.import_module("infra.local.services")  # takes a second to import and is seldom needed
        services.LocalServices(home, environment={}, model_repository=home, cache=home).down(names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
