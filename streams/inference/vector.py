"""Feature vectors: trigger rows with what the online store has for them, as the matrix that a model reads."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.model import ModelSpec, ViewReference
from schemas.view import FeatureView
from streams.inference.lookup import ViewValues, of_trigger, plan_lookups, resolve_lookup
from streams.inference.retry import Sleep, Step, retried
from streams.ports import OnlineReader

_HOLD_POLL_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class FeatureVectors:
    """Rows to score, with their inputs.

    Attributes:
        rows: The trigger rows.
        values: What each view gave, in the order of the rows.
        columns: ``(n_rows,)`` Arrow arrays by the input's name, null where missing.
        matrix: ``(n_rows, n_features)`` float32, see :meth:`schemas.model.ModelSpec.matrix`.
        is_complete: ``(n_rows,)`` whether every input has a value of its own.
    """

    rows: pa.Table
    values: Mapping[ViewReference, ViewValues]
    columns: Mapping[str, Any]
    matrix: NDArray[np.float32]
    is_complete: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.matrix)

    def where(self, is_kept: NDArray[np.bool_]) -> "FeatureVectors":
        """Keep some of the rows."""
        mask = pa.array(is_kept)
        return FeatureVectors(
            rows=self.rows.filter(mask),
            values={reference: values.where(mask) for reference, values in self.values.items()},
            columns={name: column.filter(mask) for name, column in self.columns.items()},
            matrix=self.matrix[is_kept],
            is_complete=self.is_complete[is_kept],
        )

    def lacking(self, row: int) -> str:
        """Name the inputs of a row that have no value, and what became of them."""
        views = {reference.name: values for reference, values in self.values.items()}
        lacking = [
            f"{name} ({views[name.partition('.')[0]].status[row]})"
            for name, value in zip(self.columns, self.matrix[row], strict=True)
            if np.isnan(value)
        ]
        return ", ".join(lacking)


class VectorReader:
    """Reads what a model looks up, one round trip for a batch.

    Args:
        spec: The model's contract.
        views: The application's views by name; they must be those that the model pins.
        reader: The online store.
        sleep: Waits seconds.
        clock_us: The time.

    Raises:
        ConfigError: The views are others.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        views: Mapping[str, FeatureView],
        reader: OnlineReader,
        sleep: Sleep = asyncio.sleep,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        spec.check_views(views)
        self._spec = spec
        self._views = {reference: views[reference.name] for reference in spec.views}
        self._reader = reader
        self._sleep = sleep
        self._clock_us = clock_us

    async def read(self, rows: pa.Table, *, failed: Callable[[], None] = lambda: None) -> FeatureVectors:
        """Read the vectors of trigger rows; what has not come yet once more, for as long as a row may be held for it.

        What was found stays: read again, it might be of after the event that is scored.

        Args:
            rows: The rows.
            failed: Told of each read that fails.

        Raises:
            SinkUnavailableError: The online store does not answer.
        """
        now_us = self._clock_us()
        # An event may say that it comes from the future: that holds nobody up for longer.
        until_us = now_us - np.maximum(ages_us(rows, now_us=now_us), 0) + self._spec.hold_for_us
        vectors = self._vectors(rows, await self._read_retried(rows, failed=failed))
        while (is_held := self._may_come(vectors) & (self._clock_us() < until_us)).any():
            left_s = (int(until_us.max()) - self._clock_us()) / 1e6
            await self._sleep(min(_HOLD_POLL_S, left_s))
            found = await self._read_retried(rows.filter(pa.array(is_held)), failed=failed)
            values = {
                reference: before.completed(found[reference], asked=is_held)
                for reference, before in vectors.values.items()
            }
            vectors = self._vectors(rows, values)
        return vectors

    def _may_come(self, vectors: FeatureVectors) -> NDArray[np.bool_]:
        """Tell of which rows, ``(n_rows,)``, the store may yet get what they have looked up and not found."""
        may_come = np.zeros(len(vectors), dtype=np.bool_)
        if not vectors.is_complete.all():
            for reference, key in self._spec.lookups.items():
                may_come |= vectors.values[reference].is_to_come & vectors.rows[key].is_valid().to_numpy()
        return may_come & ~vectors.is_complete

    def _vectors(self, rows: pa.Table, values: Mapping[ViewReference, ViewValues]) -> FeatureVectors:
        columns = {item.name: values[item.view].features[item.feature] for item in self._spec.inputs}
        matrix, is_complete = self._spec.matrix(columns, n_rows=rows.num_rows)
        return FeatureVectors(rows=rows, values=values, columns=columns, matrix=matrix, is_complete=is_complete)

    async def _read_retried(self, rows: pa.Table, *, failed: Callable[[], None]) -> dict[ViewReference, ViewValues]:
        return await retried(lambda: self._read(rows), Step.FEATURES, failed=failed, sleep=self._sleep)

    async def _read(self, rows: pa.Table) -> dict[ViewReference, ViewValues]:
        """Read what the model looks up, all views in one round trip."""
        plans = plan_lookups(self._spec, rows, views=self._views)
        time_us = rows["event_time"].combine_chunks().cast(pa.int64())
        answers = await self._reader.read_columns([(plan.view, plan.keys) for plan in plans.values()])
        values = {self._spec.trigger: of_trigger(self._spec, rows)}
        for (reference, plan), answer in zip(plans.items(), answers, strict=True):
            values[reference] = resolve_lookup(self._spec, reference, plan=plan, answer=answer, time_us=time_us)
        return values


def ages_us(rows: pa.Table, *, now_us: int) -> NDArray[np.int64]:
    """Age of each row's event since it came to the broker, ``(n_rows,)``; 0 where that is unknown."""
    broker_us = rows["broker_time"].combine_chunks().cast(pa.int64())
    ages: NDArray[np.int64] = pc.fill_null(pc.subtract(now_us, broker_us), 0).to_numpy()
    return ages
