"""A server that is run for the length of a block and says over HTTP that it is ready; tests and benchmarks use such."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from infra.local.process import exit_code, read_lines, spawn, telling_lines, wait_until
from schemas.errors import ServiceError

_START_TIMEOUT_S: Final = 60.0
_ASK_TIMEOUT_S: Final = 2.0
_GRACE_S: Final = 10.0


@contextmanager
def run_http_server(
    name: str, argv: Sequence[str], *, ready_url: str, directory: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Run a server, once it is ready, until the block ends.

    Args:
        name: Its name, for messages.
        argv: Its command.
        ready_url: Answers with success once it is ready.
        directory: Its working directory, which takes its log.
        environment: Its environment.

    Raises:
        ServiceError: It does not become ready; the message quotes its log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"{name.lower()}.log"
    process = spawn(argv, environment=environment, cwd=directory, log=log)
    try:
        wait_until(lambda: _is_ready(ready_url) or not process.is_alive(), timeout_s=_START_TIMEOUT_S)
        if not _is_ready(ready_url):
            lines = telling_lines(read_lines(log, since_bytes=0))
            msg = f"{name} did not become ready (exit code {exit_code(process.pid)}), its log ends:\n{lines}"
            raise ServiceError(msg)
        yield
    finally:
        process.end(grace_s=_GRACE_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S):  # noqa: S310  # our own address
            return True
    except (urllib.error.URLError, OSError):
        return False
