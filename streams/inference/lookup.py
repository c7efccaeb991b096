"""What a model reads from the online store for a batch of rows, as columns. Pure: the read itself is the scorer's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.model import ModelSpec, ViewReference
from schemas.row import TIMESTAMP
from schemas.score import InputStatus
from schemas.view import FeatureView
from streams.ports import OnlineColumns

_USABLE = (str(InputStatus.PRESENT), str(InputStatus.EMPTY))
_TO_COME = pa.array([str(InputStatus.MISSING), str(InputStatus.STALE)])


@dataclass(frozen=True, kw_only=True)
class LookupPlan:
    """The distinct keys of one view that a batch asks for.

    Attributes:
        view: The view.
        keys: The keys, each once.
        positions: ``(n_rows,)`` int32, where each row's key stands in ``keys``; null for a row without one.
    """

    view: FeatureView
    keys: Sequence[str | int]
    positions: pa.Array


@dataclass(frozen=True, kw_only=True)
class ViewValues:
    """One view's values as columns of the rows scored, each of ``(n_rows,)``.

    Attributes:
        status: :class:`~schemas.score.InputStatus` of each row.
        event_time: Event time of the row read, ``timestamp("us", "UTC")``; null if there is none.
        age_ms: Event time scored less ``event_time``; null if there is none.
        features: Values by feature name; null where they must not be used.
    """

    status: pa.Array
    event_time: pa.Array
    age_ms: pa.Array
    features: Mapping[str, pa.Array]

    @property
    def is_to_come(self) -> NDArray[np.bool_]:
        """``(n_rows,)``: there is no value, or it is too old, so that another one may yet come."""
        is_to_come: NDArray[np.bool_] = pc.is_in(self.status, _TO_COME).to_numpy(zero_copy_only=False)
        return is_to_come

    def completed(self, later: "ViewValues", *, asked: NDArray[np.bool_]) -> "ViewValues":
        """Take what a later read found for the rows ``asked``, ``(n_rows,)``, in place of what had not come."""
        is_open = asked & self.is_to_come
        mask, found = pa.array(is_open), later.where(pa.array(is_open[asked]))
        return ViewValues(
            status=pc.replace_with_mask(self.status, mask, found.status),
            event_time=pc.replace_with_mask(self.event_time, mask, found.event_time),
            age_ms=pc.replace_with_mask(self.age_ms, mask, found.age_ms),
            features={
                name: pc.replace_with_mask(values, mask, found.features[name]) for name, values in self.features.items()
            },
        )

    def where(self, mask: pa.Array) -> "ViewValues":
        """Keep the rows of a mask."""
        return ViewValues(
            status=self.status.filter(mask),
            event_time=self.event_time.filter(mask),
            age_ms=self.age_ms.filter(mask),
            features={name: values.filter(mask) for name, values in self.features.items()},
        )


def plan_lookups(
    spec: ModelSpec, rows: pa.Table, *, views: Mapping[ViewReference, FeatureView]
) -> dict[ViewReference, LookupPlan]:
    """Say what to read for a batch of trigger rows, for each view that the model looks up."""
    plans = {}
    for reference, key in spec.lookups.items():
        encoded = rows[key].combine_chunks().dictionary_encode()
        plans[reference] = LookupPlan(
            view=views[reference], keys=encoded.dictionary.to_pylist(), positions=encoded.indices
        )
    return plans


def resolve_lookup(
    spec: ModelSpec, reference: ViewReference, *, plan: LookupPlan, answer: OnlineColumns, time_us: pa.Array
) -> ViewValues:
    """Lay what was read beside the rows that asked for it, and withhold what they must not see.

    Args:
        spec: The model.
        reference: The view.
        plan: What was asked.
        answer: The rows of ``plan.keys``.
        time_us: ``(n_rows,)`` int64 event times of the rows.
    """
    at = answer.row_of.take(plan.positions)
    event_us = pa.array(answer.event_time_us, pa.int64()).take(at)
    is_empty = pc.fill_null(pa.array(answer.is_empty, pa.bool_()).take(at), fill_value=False)
    age_us = pc.subtract(time_us, event_us)
    limits = [limit for limit in (spec.max_age_us, plan.view.ttl_us) if limit is not None]
    is_stale = pc.greater(age_us, min(limits)) if limits else pa.repeat(pa.scalar(value=False), len(time_us))
    status = pc.case_when(
        pc.make_struct(
            pc.is_null(event_us),
            pc.fill_null(pc.less(age_us, 0), fill_value=False),
            is_empty,
            pc.fill_null(is_stale, fill_value=False),
        ),
        *(str(s) for s in (InputStatus.MISSING, InputStatus.AHEAD, InputStatus.EMPTY, InputStatus.STALE)),
        str(InputStatus.PRESENT),
    )
    is_usable = pc.is_in(status, pa.array(_USABLE))
    types = plan.view.feature_schema
    features = {
        item.feature: pc.if_else(
            is_usable,
            pa.array(answer.features[item.feature], types.field(item.feature).type).take(at),
            None,
        )
        for item in spec.inputs_of(reference)
    }
    return ViewValues(status=status, event_time=event_us.cast(TIMESTAMP), age_ms=_whole_ms(age_us), features=features)


def of_trigger(spec: ModelSpec, rows: pa.Table) -> ViewValues:
    """What the trigger rows tell themselves; always there and of age 0."""
    n_rows = rows.num_rows
    return ViewValues(
        status=pa.repeat(str(InputStatus.PRESENT), n_rows),
        event_time=rows["event_time"].combine_chunks(),
        age_ms=pa.array(np.zeros(n_rows, dtype=np.int64)),
        features={item.feature: rows[item.feature].combine_chunks() for item in spec.inputs_of(spec.trigger)},
    )


def _whole_ms(age_us: pa.Array) -> pa.Array:
    """Milliseconds, rounded down also below 0."""
    is_null = pc.is_null(age_us).to_numpy(zero_copy_only=False)
    whole: NDArray[np.int64] = pc.fill_null(age_us, 0).to_numpy() // 1_000
    return pa.array(whole, mask=is_null)
