"""Looks whether a directory can be written to, before what is to be written there costs time."""

from pathlib import Path
from tempfile import TemporaryFile

from schemas.errors import ConfigError


def see_writable(directory: Path, *, named: str, remedy: str) -> None:
    """See that files can be put into a directory, or that it can be made; nothing is left behind.

    Args:
        directory: The directory.
        named: Where it comes from, e.g. ``HEADRACE_HOME is '/data'``.
        remedy: What else is expected, and what to do.

    Raises:
        ConfigError: It cannot.
    """
    try:
        # Of one that is not there yet, what it would be made in is asked.
        found = directory
        while not found.exists() and found != found.parent:
            found = found.parent
        with TemporaryFile(dir=found):
            pass
    except OSError as exc:
        joint = "" if remedy.startswith(";") else " "
        msg = (
            f"{named}, which cannot be written to ({exc.strerror or exc}), expected a directory of your own"
            f"{joint}{remedy}"
        )
        raise ConfigError(msg) from exc
