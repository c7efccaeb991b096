"""Recorded definitions: one file for each version of a view, so that a version keeps its meaning.

A view ``user_activity`` of version 3 is recorded in ``schemas/definitions/user_activity@3.json``, looked for below the
working directory first and then beside this module. A definition that differs from the one recorded under its version
is refused: features of two definitions must not share a version, a key or a table. A view that is not recorded may
change freely.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from schemas.errors import ConfigError
from schemas.view import FeatureView
from schemas.view_input import hash_definition

_PACKAGED: Final = Path(__file__).parent / "definitions"
_SHOWN_CHANGES: Final = 5
_SHOWN_LENGTH: Final = 60


@dataclass(frozen=True, kw_only=True)
class Record:
    """The recorded definition of one version of a view.

    Attributes:
        path: Its file.
        definition_hash: Hash of the definition.
        definition: The definition (see ``FeatureView.definition``).
    """

    path: Path
    definition_hash: str
    definition: Mapping[str, Any]


def find_record(view: FeatureView) -> Record | None:
    """Find the record of a view's version.

    Raises:
        ConfigError: The file is no record, or was edited.
    """
    name = f"{view.name}@{view.version}.json"
    for path in (_own() / name, _PACKAGED / name):
        if path.is_file():
            return _read(path, view)
    return None


def check_recorded(views: Iterable[FeatureView]) -> dict[str, Record | None]:
    """See whether views are as they were recorded.

    Returns:
        The record of each view by name, None for one that has none.

    Raises:
        ConfigError: A definition differs from the one recorded under its version.
    """
    records = {}
    for view in views:
        record = records[view.name] = find_record(view)
        if record is not None and record.definition_hash != view.definition_hash:
            changes = list(_changes(record.definition, _as_json(view.definition), ""))
            more = "" if len(changes) <= _SHOWN_CHANGES else f"; and {len(changes) - _SHOWN_CHANGES} more"
            msg = (
                f"view {view.name} version {view.version} has the definition {view.definition_hash}, expected "
                f"{record.definition_hash} as recorded in {record.path}; changed: {'; '.join(changes[:_SHOWN_CHANGES])}"
                f"{more}. Raise the version to {view.version + 1}, or restore the definition"
            )
            raise ConfigError(msg)
    return records


def record_definitions(views: Iterable[FeatureView]) -> list[Path]:
    """Record the views that have no record, below the working directory; all or nothing is checked first.

    Returns:
        The files written.

    Raises:
        ConfigError: A definition differs from the one recorded under its version, or a file cannot be written.
    """
    views = list(views)
    records = check_recorded(views)
    written = []
    for view in views:
        if records[view.name] is not None:
            continue
        path = _own() / f"{view.name}@{view.version}.json"
        document = {
            "view": view.name,
            "version": view.version,
            "definition_hash": view.definition_hash,
            "definition": view.definition,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=2) + "\n")
        except OSError as exc:
            msg = f"{path} cannot be written: {exc.strerror or exc}; expected a directory that can be written to"
            raise ConfigError(msg) from exc
        written.append(path)
    return written


def _own() -> Path:
    return Path.cwd() / "schemas" / "definitions"


def _read(path: Path, view: FeatureView) -> Record:
    try:
        document = json.loads(path.read_bytes())
        names = (document["view"], document["version"])
        record = Record(path=path, definition_hash=document["definition_hash"], definition=document["definition"])
    except (OSError, ValueError, TypeError, KeyError) as exc:
        msg = (
            f"{path} is no record of a definition: {exc!r}; restore it, or delete it and run `headrace views --record`"
        )
        raise ConfigError(msg) from exc
    hashed = hash_definition(record.definition)
    if names != (view.name, view.version) or hashed != record.definition_hash:
        msg = (
            f"{path} says it is {names[0]!r} version {names[1]!r} with hash {record.definition_hash!r}, expected "
            f"{view.name!r} version {view.version} with hash {hashed!r}: it was edited; restore it, or delete it and "
            "run `headrace views --record`"
        )
        raise ConfigError(msg)
    return record


def _as_json(definition: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(definition))


def _changes(before: Any, after: Any, place: str) -> Iterator[str]:
    """Say where two JSON values differ."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if before != after:
            yield f"{place} from {_show(before)} to {_show(after)}"
        return
    for name in [*before, *(name for name in after if name not in before)]:
        inside = f"{place}.{name}" if place else str(name)
        if name not in after:
            yield f"{inside} is gone"
        elif name not in before:
            yield f"{inside} is new"
        else:
            yield from _changes(before[name], after[name], inside)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"
