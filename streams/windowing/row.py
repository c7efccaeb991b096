"""Rows one at a time, in and out, for what can't be done a column at a time."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.row import Pane
from streams.windowing.batch import InputBatch
from streams.windowing.plan import Plan, PlannedFeature, Scope

_OF_MAKER: Final = frozenset({"source_offset", "broker_time", "request_id"})


class RowView:
    """Rows of a batch, read one at a time by the features that they feed."""

    def __init__(self, batch: InputBatch, *, plan: Plan, time_us: npt.NDArray[np.int64]) -> None:
        names = {f.column for f in plan.features if f.column is not None}
        self._raw = {name: batch.table.column(name).to_pylist() for name in names}
        self._columns = {name: _without_nan(values) for name, values in self._raw.items()}
        self._masks = [expression.mask(batch.table).tolist() for expression in plan.filters]
        self._times = time_us.tolist()
        self._offsets = batch.offsets.tolist()
        self.keys = batch.table.column(plan.key).to_pylist()
        self.index = 0
        self.time_us = 0
        self.offset = 0

    def move_to(self, index: int) -> None:
        """Make the row at this position of the batch the current one."""
        self.index = index
        self.time_us = self._times[index]
        self.offset = self._offsets[index]

    def passes(self, filter_index: int | None) -> bool:
        """Tell whether the row passes a filter of the plan."""
        return filter_index is None or self._masks[filter_index][self.index]

    def value(self, feature: PlannedFeature) -> Any:
        """Value of the feature's column, None for null and for an aggregation without a column."""
        return None if feature.column is None else self._columns[feature.column][self.index]

    def raw(self, column: str) -> Any:
        """Value of a column as it came."""
        return self._raw[column][self.index]

    def feeds(self, feature: PlannedFeature) -> bool:
        """Tell whether the row counts in the feature."""
        return self.passes(feature.filter_index) and (feature.column is None or self.value(feature) is not None)


def _without_nan(values: list[Any]) -> list[Any]:
    return [None if value != value else value for value in values]  # noqa: PLR0124 - only NaN differs from itself


class RowSink:
    """Output rows of one step, appended one at a time.

    Makers are positions in the batch; -1 stands for a watermark that moved without a row (a marker, or the close).
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._events = [f.name for f in plan.features if f.scope is Scope.EVENT]
        self._schema = plan.view.engine_schema
        self._features = [f.name for f in plan.features if f.scope not in {Scope.EVENT, Scope.DERIVED}]
        added_later = {*_OF_MAKER, *plan.view.derived}
        self._columns: dict[str, list[Any]] = {name: [] for name in self._schema.names if name not in added_later}
        self._makers: list[int] = []
        self._is_early: list[bool] = []

    def add(
        self,
        maker: int,
        *,
        key: Any,
        features: dict[str, Any],
        event_time_us: int,
        window_us: tuple[int, int],
        pane: Pane,
        pane_index: int,
        is_final: bool,
        watermark_us: int,
    ) -> None:
        """Append a row; ``window_us`` is its window's start (shown for sessions only) and end."""
        columns = self._columns
        columns[self._plan.key].append(key)
        for name in self._events:
            columns[name].append(features.get(name))
        for name in self._features:
            columns[name].append(features[name])
        columns["event_time"].append(event_time_us)
        columns["window_end"].append(window_us[1])
        columns["pane"].append(pane.value)
        columns["pane_index"].append(pane_index)
        columns["is_final"].append(is_final)
        columns["watermark"].append(watermark_us)
        if "window_start" in columns:
            columns["window_start"].append(window_us[0])
        self._makers.append(maker)
        self._is_early.append(pane is Pane.EARLY)

    def to_columns(self) -> tuple[dict[str, pa.Array], npt.NDArray[np.int64]]:
        """Columns that the sink knows of, and the makers; of ``latest`` as-of rows, only the last of each key."""
        columns = {name: pa.array(values, self._type(name)) for name, values in self._columns.items()}
        makers = np.array(self._makers, dtype=np.int64)
        if self._plan.view.emit != "latest":
            return columns, makers
        keep = np.array(self._newest_early(), dtype=np.bool_)
        return {name: values.filter(pa.array(keep)) for name, values in columns.items()}, makers[keep]

    def _type(self, name: str) -> pa.DataType:
        kind = self._schema.field(name).type
        return pa.int64() if pa.types.is_timestamp(kind) else kind

    def _newest_early(self) -> list[bool]:
        """Keep closing panes, and of the as-of rows the last of each key."""
        seen: set[Any] = set()
        keep = [True] * len(self._makers)
        keys = self._columns[self._plan.key]
        for row in range(len(keep) - 1, -1, -1):
            if self._is_early[row]:
                keep[row] = keys[row] not in seen
                seen.add(keys[row])
        return keep
