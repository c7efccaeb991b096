"""What scores record of the features that they were made of, against rows made anew.

A score says of each view which row it read: by version, definition and event time, and whether it could be used; of the
row that was scored also its entity, event time and watermark. The values themselves stand in the rows, which parity
compares where they are stored. A score that names a row which the records do not make was made of something else.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from offline.parity import Comparison, Mismatch, Reads
from schemas.model import ModelSpec
from schemas.row import Pane
from schemas.score import InputStatus
from schemas.view import FeatureView
from streams.ports import LogPart

RECORDED: Final = pl.Schema(
    {
        "request_id": pl.String,
        "entity": pl.String,
        "event_time": pl.Int64,
        "watermark": pl.Int64,
        "version": pl.Int64,
        "hash": pl.String,
        "read_time": pl.Int64,
        "status": pl.String,
    }
)
"""What is compared of a score: its own columns, and of what it read of the view ``version``, ``hash``, ``read_time``
(event time of that row) and ``status``. Times are in microseconds."""
_OF_ROW: Final = ("entity", "event_time", "watermark", "read_time")
"""What a score says of the row that was scored."""
_PLACE: Final = re.compile(r"(?P<topic>.+)-(?P<partition>\d+)-(?P<offset>\d+)")


class RecordedReads(Reads):
    """What the scores of a model record of one view; it sees the view's rows as they are made anew.

    Args:
        view: The view.
        spec: The model.
        recorded: Of :data:`RECORDED`, a row for each score.

    Attributes:
        comparison: What has been found.
    """

    def __init__(self, view: FeatureView, spec: ModelSpec, recorded: pl.DataFrame) -> None:
        self._view = view
        self._spec = spec
        self.comparison = Comparison(store=spec.topic)
        is_other = (pl.col("version") != view.version) | (pl.col("hash") != view.definition_hash)
        # Of another definition no row is made anew.
        self.comparison.not_judged += recorded.filter(is_other).height
        self._left = recorded.filter(~is_other).with_row_index()

    def _found(self, kind: str, row: Mapping[str, Any], column: str | None, *, recomputed: Any = None) -> None:
        mismatch = Mismatch(
            store=self.comparison.store,
            kind=kind,
            entity=row["entity"],
            column=column,
            served=None if column is None else row[column],
            recomputed=recomputed,
            lineage={
                "request_id": row["request_id"],
                "event_time_us": row["event_time"],
                f"{self._view.name}.event_time_us": row["read_time"],
                "definition": f"{self._view.name} v{row['version']} {row['hash']}",
            },
        )
        self.comparison.found([mismatch])


class ScoredRows(RecordedReads):
    """The rows that were scored: each score is of the as-of row that has its request id."""

    def __init__(self, view: FeatureView, spec: ModelSpec, recorded: pl.DataFrame) -> None:
        super().__init__(view, spec, recorded)
        self._different: dict[int, dict[str, Any]] = {}

    def see(self, made: pa.Table) -> None:
        """Compare what scores say of their rows: entity, event time and watermark."""
        rows = made.filter(pc.equal(made["pane"], str(Pane.EARLY)))
        anew = pl.DataFrame(
            {
                "request_id": pl.Series(rows["request_id"].to_pylist(), dtype=pl.String),
                "entity": pl.Series(rows[self._spec.entity].cast(pa.string()).to_pylist(), dtype=pl.String),
                **{
                    name: pl.Series(rows[name].cast(pa.int64()).to_pylist(), dtype=pl.Int64)
                    for name in ("event_time", "watermark")
                },
            }
        ).with_columns(read_time="event_time")
        both = self._left.join(anew, on="request_id", suffix="|made")
        is_same = pl.all_horizontal(pl.col(name).eq_missing(pl.col(f"{name}|made")) for name in _OF_ROW)
        same = both.filter(is_same).select("index").unique()
        self.comparison.rows += same.height
        self.comparison.values += same.height * len(_OF_ROW)
        self._left = self._left.join(same, on="index", how="anti")
        # Not yet a difference: a producer may have given several events one request id.
        for row in both.filter(~is_same).join(same, on="index", how="anti").iter_rows(named=True):
            self._different.setdefault(row["index"], row)

    def finish(self, parts: Mapping[int, LogPart]) -> Comparison:
        """A score of a record that the log has, and of no row that this makes, is of nothing."""
        for row in self._left.iter_rows(named=True):
            place = _PLACE.fullmatch(row["request_id"])
            part = None if place is None else parts.get(int(place["partition"]))
            is_own = place is not None and place["topic"] == self._view.input.topic
            if (different := self._different.get(row["index"])) is not None:
                self.comparison.rows += 1
                self.comparison.values += len(_OF_ROW)
                for name in _OF_ROW:
                    if different[name] != different[f"{name}|made"]:
                        self._found("value", row, name, recomputed=different[f"{name}|made"])
            elif place is not None and part is not None and is_own and int(place["offset"]) in part.offsets:
                self.comparison.rows += 1
                self._found("unexpected", row, None)
            else:
                self.comparison.not_judged += 1
        return self.comparison


class LookedUpRows(RecordedReads):
    """Rows that were looked up: each is one of its entity at that event time, and empty where the score says so.

    Args:
        view: The view.
        spec: The model.
        recorded: As for :class:`RecordedReads`, with ``key``, the entity key that was looked up.
    """

    def __init__(self, view: FeatureView, spec: ModelSpec, recorded: pl.DataFrame) -> None:
        is_read = recorded["read_time"].is_not_null()
        super().__init__(view, spec, recorded.filter(is_read))
        self.comparison.not_judged += int((~is_read).sum())  # there was no row then: the log does not tell
        self._latest: dict[str | int, int] = {}

    def see(self, made: pa.Table) -> None:
        """Find the rows that were read."""
        key = self._view.entity.key
        anew = pl.DataFrame(
            {
                "key": pl.Series(made[key].to_pylist(), dtype=self._left.schema["key"]),
                "read_time": pl.Series(made["event_time"].cast(pa.int64()).to_pylist(), dtype=pl.Int64),
                "is_empty": pl.Series([pane == Pane.EMPTY for pane in made["pane"].to_pylist()], dtype=pl.Boolean),
            }
        )
        for entity, latest in anew.group_by("key").agg(pl.col("read_time").max()).iter_rows():
            self._latest[entity] = max(latest, self._latest.get(entity, latest))
        # Rows that are stale or ahead are told by that alone.
        is_told = pl.col("status").is_in([InputStatus.PRESENT.value, InputStatus.EMPTY.value])
        both = self._left.join(anew.unique(), on=["key", "read_time"])
        fits = ~is_told | (pl.col("is_empty") == (pl.col("status") == InputStatus.EMPTY.value))
        done = both.filter(fits).select("index").unique()
        self.comparison.rows += done.height
        self.comparison.values += 2 * done.height
        self._left = self._left.join(done, on="index", how="anti")

    def finish(self, parts: Mapping[int, LogPart]) -> Comparison:
        """A row that was read, is not made and lies before others of its entity, is none, where the log is whole."""
        is_whole = bool(parts) and not any(part.offsets.start for part in parts.values())
        for row in self._left.iter_rows(named=True):
            if is_whole and row["read_time"] <= self._latest.get(row["key"], row["read_time"] - 1):
                self.comparison.rows += 1
                self._found("unexpected", row, None)
            else:
                self.comparison.not_judged += 1
        return self.comparison
