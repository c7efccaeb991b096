"""What all Delta tables of the offline store share: their errors, and how a commit that met another is made again."""

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
from deltalake import DeltaTable
from deltalake import exceptions as delta_errors

from schemas.errors import (
    SchemaMismatchError,
    SinkConflictError,
    SinkRejectedError,
    SinkUnavailableError,
)

_PASSING: Final = re.compile(r"Generic (?!LocalFileSystem)\w+ error|os error (5|27|28|122)\b")
"""What delta-rs says of storage that fails in the middle of a write: an object store, or a disk that is full or broken
(EIO, EFBIG, ENOSPC, EDQUOT). It wraps them into errors of the table."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m|↳")
_LONGEST_PAUSE_S: Final = 0.5
T = TypeVar("T")


def join_uri(root: str | Path, *parts: str) -> str:
    """Name a place below the root of a store, which is a directory or an object store URL."""
    return "/".join([str(root).rstrip("/"), *parts])


def open_delta(uri: str, *, storage_options: Mapping[str, str] | None = None) -> DeltaTable | None:
    """Open a table as of now; None where there is none.

    Raises:
        SinkUnavailableError: The storage does not answer.
    """
    options = None if storage_options is None else dict(storage_options)
    with mapped_errors(uri):
        try:
            return DeltaTable(uri, storage_options=options)
        except delta_errors.TableNotFoundError:
            return None


def recorded_version(table: DeltaTable, application: str) -> int | None:
    """Read the version of an application transaction of a table; None where it has none."""
    recorded: int | None = table.transaction_version(application)
    return recorded


def commit_until_alone(commit: Callable[[], T], *, uri: str, attempts: int, forget: Callable[[], object]) -> T:
    """Make a commit; where another one was made since the table was read, read again and try again.

    Args:
        commit: Reads what it has to of the table as it is then, and commits.
        uri: The table, for messages.
        attempts: How often to try.
        forget: Called before another try: what was read of the table is old.

    Raises:
        SinkConflictError: Other writers kept getting there first.
        SchemaMismatchError, SinkRejectedError, SinkUnavailableError: As :func:`mapped_errors` says.
    """
    for attempt in range(attempts):
        with mapped_errors(uri):
            try:
                return commit()
            except delta_errors.CommitFailedError:
                forget()
        pause_s = min(0.01 * 2**attempt, _LONGEST_PAUSE_S)
        time.sleep(random.uniform(0, pause_s))  # noqa: S311  # spreads retries, hides nothing
    msg = f"commit to {uri} met another one {attempts} times; see whether two consumer groups write it"
    raise SinkConflictError(msg)


def files_with(table: DeltaTable, *statistics: str) -> list[dict[str, Any]]:
    """List the files of a table as its log has them, each with these statistics.

    Raises:
        SinkRejectedError: A file is without one of them; Delta does not ask for any, and other engines may write none.
    """
    actions: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    for action in actions:
        if missing := [name for name in statistics if action.get(name) is None]:
            msg = (
                f"file {action['path']} of table {table.table_uri} has no statistic `{missing[0]}` in the log, "
                "expected it as Headrace writes it; write that file anew with statistics, or take it out"
            )
            raise SinkRejectedError(msg)
    return actions


@contextmanager
def mapped_errors(uri: str) -> Iterator[None]:
    """Raise what delta-rs raises as errors of ours, which name the table.

    Raises:
        SchemaMismatchError: The table has other columns.
        SinkUnavailableError: The storage does not answer, or fails in the middle.
        SinkRejectedError: Anything else that delta-rs refuses.
    """
    try:
        yield
    except delta_errors.SchemaMismatchError as exc:
        msg = f"table {uri} has other columns than its view ({_plain(exc)}); raise the view's version"
        raise SchemaMismatchError(msg) from exc
    except OSError as exc:
        msg = f"storage of {uri} is not available: {_plain(exc)}"
        raise SinkUnavailableError(msg) from exc
    except delta_errors.DeltaError as exc:
        if _PASSING.search(str(exc)):
            msg = f"storage of {uri} fails: {_plain(exc)}"
            raise SinkUnavailableError(msg) from exc
        msg = f"table {uri} refused the write: {_plain(exc)}"
        raise SinkRejectedError(msg) from exc


def _plain(exc: BaseException) -> str:
    return " ".join(_ANSI.sub(" ", str(exc)).split())
