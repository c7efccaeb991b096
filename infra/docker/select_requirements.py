"""Pick from the lock file what an image needs, with versions and hashes as they are locked.

The lock covers everything: development, tests, the local services, the demo. An image needs some of it. Used by the
Dockerfile, with nothing but the standard library::

    python select_requirements.py requirements.lock < names.txt > image.lock
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def select_requirements(lock: str, wanted: Iterable[str]) -> str:
    """Select the wanted packages' entries of a lock file.

    Args:
        lock: A requirements file whose entries begin at the line's start and go on in indented lines.
        wanted: Requirements, one a line; only the names count. Blank lines and comments are left out.

    Returns:
        The entries, in the order of the lock.

    Raises:
        ValueError: A wanted package is not in the lock.
    """
    entries: list[list[str]] = []
    for line in lock.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            entries.append([line])
        elif line and entries and line[0].isspace():
            entries[-1].append(line)
    by_name: dict[str, list[str]] = {}
    for entry in entries:
        by_name.setdefault(_name(entry[0]), []).append("\n".join(entry))
    names = {_name(line) for line in wanted if line.strip() and not line.lstrip().startswith("#")}
    if missing := sorted(names - by_name.keys()):
        msg = f"the lock has no {', '.join(missing)}, expected every package that is wanted; run `make lock`"
        raise ValueError(msg)
    return "\n".join(entry for name, found in by_name.items() if name in names for entry in found) + "\n"


def _name(requirement: str) -> str:
    match = _NAME.match(requirement.strip())
    if match is None:
        msg = f"{requirement!r} names no package"
        raise ValueError(msg)
    return re.sub(r"[-_.]+", "-", match[0]).lower()


if __name__ == "__main__":
    sys.stdout.write(select_requirements(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.stdin))
