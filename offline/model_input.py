"""The inputs of a model for rows that have been: what scoring had, or would have had, of each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from offline.point_in_time import read_as_of
from offline.training_set import describe_join
from schemas.model import ModelSpec
from schemas.row import Pane
from schemas.score import InputStatus
from schemas.view import FeatureView


@dataclass(frozen=True, kw_only=True)
class JoinedInputs:
    """Inputs of a model, a row for each row scored.

    Attributes:
        columns: Values by input name (``view.feature``), null where missing.
        views: What was read of each view (:func:`offline.training_set.describe_join`), the trigger first.
    """

    columns: Mapping[str, Any]
    views: tuple[Mapping[str, Any], ...]


def as_of_rows(rows: pa.Table) -> pa.Table:
    """Keep the rows that scoring scores: those as of an event."""
    return rows.filter(pc.equal(rows["pane"], str(Pane.EARLY)))


def join_inputs(
    spec: ModelSpec,
    triggers: pa.Table,
    *,
    views: Mapping[str, FeatureView],
    tables: Mapping[str, pa.Table],
    table_versions: Mapping[str, int] | None = None,
) -> JoinedInputs:
    """Join rows that are scored with what the online store would have answered at their moment.

    Args:
        spec: The model.
        triggers: Rows of its trigger view, of :func:`as_of_rows`.
        views: The views by name.
        tables: Offline rows by view name, in any order; later ones do no harm.
        table_versions: Versions of their tables, for the description.
    """
    at = table_versions or {}
    columns: dict[str, Any] = {item.name: triggers[item.feature] for item in spec.inputs_of(spec.trigger)}
    own = triggers.select([item.feature for item in spec.inputs_of(spec.trigger)])
    told = [
        describe_join(
            views[spec.trigger.name],
            own,
            statuses=[str(InputStatus.PRESENT)] * len(own),
            n_rows=tables[spec.trigger.name].num_rows,
            table_version=at.get(spec.trigger.name),
        )
    ]
    for reference, key in spec.lookups.items():
        found = read_as_of(
            triggers[key],
            triggers["event_time"],
            tables[reference.name],
            view=views[reference.name],
            max_age_us=spec.max_age_us,
        )
        columns |= {item.name: found.features[item.feature] for item in spec.inputs_of(reference)}
        told.append(
            describe_join(
                views[reference.name],
                found.features.select([item.feature for item in spec.inputs_of(reference)]),
                statuses=found.status.to_pylist(),
                n_rows=tables[reference.name].num_rows,
                table_version=at.get(reference.name),
            )
        )
    return JoinedInputs(columns=columns, views=tuple(told))


def matrix_without_defaults(spec: ModelSpec, columns: Mapping[str, Any], *, n_rows: int) -> NDArray[np.float32]:
    """Build the input matrix as :meth:`schemas.model.ModelSpec.matrix`, but leave NaN what a default stands in for."""
    bare = replace(spec, inputs=tuple(replace(item, default=None) for item in spec.inputs))
    matrix, _ = bare.matrix(columns, n_rows=n_rows)
    return matrix
