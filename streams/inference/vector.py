"""Feature vectors: trigger rows with what the online store has for them, as the matrix that a model reads."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.model import ModelSpec, ViewReference
from schemas.view import FeatureView
from streams.inference.lookup import ViewValues, of_trigger, plan_lookups, resolve_lookup
from streams.inference.retry import Sleep, Step, retried
from streams.ports import OnlineReader


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


class VectorReader:
    """Reads what a model looks up, one round trip for a batch.

    Args:
        spec: The model's contract.
        views: The application's views by name; they must be those that the model pins.
        reader: The online store.
        sleep: Waits seconds.

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
    ) -> None:
        spec.check_views(views)
        self._spec = spec
        self._views = {reference: views[reference.name] for reference in spec.views}
        self._reader = reader
        self._sleep = sleep

    async def read(self, rows: pa.Table, *, failed: Callable[[], None] = lambda: None) -> FeatureVectors:
        """Read the vectors of trigger rows.

        Args:
            rows: The rows.
            failed: Told of each read that fails.

        Raises:
            SinkUnavailableError: The online store does not answer.
        """
        values = await retried(lambda: self._read(rows), Step.FEATURES, failed=failed, sleep=self._sleep)
        columns = {item.name: values[item.view].features[item.feature] for item in self._spec.inputs}
        matrix, is_complete = self._spec.matrix(columns, n_rows=rows.num_rows)
        return FeatureVectors(rows=rows, values=values, columns=columns, matrix=matrix, is_complete=is_complete)

    async def _read(self, rows: pa.Table) -> dict[ViewReference, ViewValues]:
        """Read what the model looks up, all views in one round trip."""
        plans = plan_lookups(self._spec, rows, views=self._views)
        time_us = rows["event_time"].combine_chunks().cast(pa.int64())
        answers: Sequence[Sequence[Any]] = [()] * len(plans)
        if any(plan.keys for plan in plans.values()):
            requests = [(plan.view, plan.keys) for plan in plans.values()]
            answers = await self._reader.read_many(requests, now_us=pc.max(time_us).as_py())
        values = {self._spec.trigger: of_trigger(self._spec, rows)}
        for (reference, plan), answer in zip(plans.items(), answers, strict=True):
            values[reference] = resolve_lookup(self._spec, reference, plan=plan, answers=answer, time_us=time_us)
        return values
