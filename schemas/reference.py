"""Reference tables that views look up, each in a version that never changes.

A reference ``planes@1`` is the file ``schemas/references/planes@1.parquet`` (or ``.csv``, ``.ndjson``), looked for
below the working directory first and then beside this module. A row tells what is known of a key; with ``valid_from``
there may be several of one key, each of which holds from its time on until the next. The file's bytes are part of the
definition of the views that look it up: what has changed is another version.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ConfigError
from schemas.time import parse_duration_us, parse_rfc3339_us

_PACKAGED: Final = Path(__file__).parent / "references"
_SUFFIXES: Final = (".parquet", ".csv", ".ndjson")
_MAX_ROWS: Final = 5_000_000
_EXAMPLE: Final = "2013-01-01T10:00:00Z"


@dataclass(frozen=True)
class Reference:
    """A reference table.

    Attributes:
        name: Its name.
        version: Its version, 1 or more; goes up when the file changes.
        key: Column, or columns, that name a thing.
        valid_from: Column of the time from which a row holds; None where there is one row for each key, for all times.
    """

    name: str
    _: KW_ONLY
    version: int
    key: str | Sequence[str]
    valid_from: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            msg = f"`Reference` name is {self.name!r}, expected letters, digits and _ such as 'planes'"
            raise ConfigError(msg)
        if not isinstance(self.version, int) or self.version < 1:
            msg = f"reference {self.name}: `version` is {self.version!r}, expected a whole number of 1 or more"
            raise ConfigError(msg)
        columns = self._columns.column_names
        named = [*self.keys, *([] if self.valid_from is None else [self.valid_from])]
        if not self.keys or len(set(named)) < len(named) or not set(named) <= set(columns):
            msg = (
                f"reference {self.reference} has the key {list(self.keys)} and `valid_from` {self.valid_from!r}, "
                f"expected distinct columns of {self.path}: {columns}"
            )
            raise ConfigError(msg)
        _ = self.table

    def on(self, *columns: str, max_age: str | None = None) -> "ReferenceLookup":
        """Look the table up by these columns of an event, in the order of the key.

        Args:
            columns: Columns of the event.
            max_age: How long after its ``valid_from`` a row is still used; None for ever.
        """
        return ReferenceLookup(self, on=columns, max_age=max_age)

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns of the key."""
        return (self.key,) if isinstance(self.key, str) else tuple(self.key)

    @cached_property
    def path(self) -> Path:
        """Its file.

        Raises:
            ConfigError: There is none, or there are several.
        """
        names = [f"{self.reference}{suffix}" for suffix in _SUFFIXES]
        for directory in (Path.cwd() / "schemas" / "references", _PACKAGED):
            found = [directory / name for name in names if (directory / name).is_file()]
            if len(found) > 1:
                msg = f"reference {self.reference} is in {[*map(str, found)]}, expected one file; delete the others"
                raise ConfigError(msg)
            if found:
                return found[0]
        msg = (
            f"reference {self.reference!r} not found, expected a file {' or '.join(names)} in "
            f"{Path.cwd() / 'schemas' / 'references'} (or shipped with Headrace in {_PACKAGED})"
        )
        raise ConfigError(msg)

    @cached_property
    def _content(self) -> bytes:
        return self.path.read_bytes()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file's bytes."""
        return hashlib.sha256(self._content).hexdigest()

    @cached_property
    def _columns(self) -> pa.Table:
        import polars as pl  # noqa: PLC0415 - takes its time, and most views look nothing up

        source, suffix = io.BytesIO(self._content), self.path.suffix
        try:
            if suffix == ".csv":
                frame = pl.read_csv(source, infer_schema_length=None, null_values=["", "NA"])
            elif suffix == ".ndjson":
                frame = pl.read_ndjson(source, infer_schema_length=None)
            else:
                frame = pl.read_parquet(source)
        except (pl.exceptions.PolarsError, OSError) as exc:
            reason = str(exc).partition("\n")[0]
            msg = f"reference {self.reference}: {self.path} cannot be read: {reason}; expected {suffix[1:]}"
            raise ConfigError(msg) from exc
        table: pa.Table = frame.to_arrow()
        if table.num_rows > _MAX_ROWS:
            msg = (
                f"reference {self.reference} has {table.num_rows:,} rows, expected at most {_MAX_ROWS:,}, which each "
                "worker holds in memory; take it for a source of the view"
            )
            raise ConfigError(msg)
        return table

    @cached_property
    def table(self) -> pa.Table:
        """Keys, ``valid_from`` in microseconds where there is one, and values; text, int64, float64 or truth values.

        Raises:
            ConfigError: A column is of another type, a key or a time is null, or a key has two rows for one time.
        """
        columns: dict[str, Any] = {}
        for name in self._columns.column_names:
            column = self._columns.column(name).combine_chunks()
            columns[name] = self._times(column) if name == self.valid_from else self._values(name, column)
        table = pa.table(columns)
        unique_by = [*self.keys, *([] if self.valid_from is None else [self.valid_from])]
        for name in unique_by:
            if table.column(name).null_count:
                msg = f"reference {self.reference} has a row without `{name}`, expected one in each; take it out"
                raise ConfigError(msg)
        counts = table.group_by(unique_by).aggregate([([], "count_all")])
        if counts.num_rows < table.num_rows:
            double = counts.filter(pc.greater(counts.column("count_all"), 1)).slice(0, 1).to_pylist()[0]
            double.pop("count_all")
            msg = f"reference {self.reference} has two rows for {double}, expected one; take the other out"
            raise ConfigError(msg)
        return table

    def _values(self, name: str, column: pa.Array) -> pa.Array:
        arrow = column.type
        if pa.types.is_boolean(arrow):
            return column
        for is_kind, to in (
            (pa.types.is_integer, pa.int64()),
            (pa.types.is_floating, pa.float64()),
            (pa.types.is_string, pa.string()),
            (pa.types.is_large_string, pa.string()),
            (pa.types.is_null, pa.string()),
        ):
            if is_kind(arrow) and not (name in self.keys and to == pa.float64()):
                return column.cast(to)
        expected = "text or integers" if name in self.keys else "text, numbers or truth values"
        msg = f"reference {self.reference}: column `{name}` is {arrow}, expected {expected}; convert it in the file"
        raise ConfigError(msg)

    def _times(self, column: pa.Array) -> pa.Array:
        arrow = column.type
        if pa.types.is_timestamp(arrow):
            return column.cast(pa.timestamp("us", tz="UTC"), safe=False).cast(pa.int64())
        if pa.types.is_string(arrow) or pa.types.is_large_string(arrow):
            try:
                return pa.array([None if text is None else parse_rfc3339_us(text) for text in column.to_pylist()])
            except ValueError as exc:
                msg = f"reference {self.reference}: `{self.valid_from}`: {exc}, expected RFC 3339 such as {_EXAMPLE!r}"
                raise ConfigError(msg) from exc
        msg = (
            f"reference {self.reference}: `{self.valid_from}` is {arrow}, expected timestamps, or RFC 3339 text such "
            f"as {_EXAMPLE!r}"
        )
        raise ConfigError(msg)

    @property
    def value_schema(self) -> pa.Schema:
        """Columns that can be looked up."""
        others = {*self.keys, self.valid_from}
        return pa.schema([field for field in self.table.schema if field.name not in others])


@dataclass(frozen=True)
class ReferenceLookup:
    """Which row of a reference goes with an event: the newest of its key that holds at the event's time.

    Attributes:
        reference: The reference table.
        on: Columns of the event that hold the key, in the order of the reference's.
        max_age: How long after its ``valid_from`` a row is still used; None for ever.
    """

    reference: Reference
    _: KW_ONLY
    on: tuple[str, ...]
    max_age: str | None = None

    @property
    def max_age_us(self) -> int | None:
        """How long a row is used, in microseconds of event time; None for ever."""
        return None if self.max_age is None else parse_duration_us(self.max_age, field="max_age")

    def check(self, columns: pa.Schema, *, where: str) -> None:
        """Make sure that events have the key.

        Raises:
            ConfigError: They have not, or the age has nothing to count from.
        """
        keys = self.reference.keys
        if len(self.on) != len(keys):
            msg = f"{where} is on {list(self.on)}, expected a column for each of the key {list(keys)}"
            raise ConfigError(msg)
        for name, key in zip(self.on, keys, strict=True):
            expected = self.reference.table.schema.field(key).type
            if name not in columns.names or columns.field(name).type != expected:
                got = columns.field(name).type if name in columns.names else "no column of the events"
                msg = (
                    f"{where} is on {name!r}, which is {got}, expected a column of type {expected} as `{key}` of "
                    f"{self.reference.reference}"
                )
                raise ConfigError(msg)
        if self.max_age_us == 0:
            msg = f"{where}: `max_age` is {self.max_age}, expected more than 0"
            raise ConfigError(msg)
        if self.max_age is not None and self.reference.valid_from is None:
            msg = f"{where}: `max_age` is {self.max_age}, but rows of {self.reference.reference} have no `valid_from`"
            raise ConfigError(msg)

    @property
    def definition(self) -> dict[str, Any]:
        """What decides which values are found, as JSON values."""
        return {
            "content": self.reference.fingerprint,
            "key": list(self.reference.keys),
            "valid_from": self.reference.valid_from,
            "on": list(self.on),
            "max_age_us": self.max_age_us,
        }
