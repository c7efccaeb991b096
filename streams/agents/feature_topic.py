"""Reading a view's topic, on which rows of several of its definitions may stand: before and after its version rose."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.errors import DecodeError
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.wire import decode_rows

_DEFINITION = pa.schema([("definition_hash", pa.string())])


@dataclass(frozen=True, kw_only=True)
class FeatureRows:
    """Rows of one definition of a view, out of one batch of its topic.

    Attributes:
        rows: The rows, ``view.row_schema``.
        batch: The records that they were decoded from, one for each; the whole batch where there are none.
        of_other_definitions: How many rows of the batch were left out, being of another version of the view.
    """

    rows: pa.Table
    batch: RawBatch
    of_other_definitions: int


def decode_feature_rows(batch: RawBatch, view: FeatureView) -> FeatureRows:
    """Decode the rows of ``view``'s own definition; rows of another are not for its stores and models.

    Raises:
        DecodeError: A record is no feature row; only Headrace writes to these topics, so the worker must stop.
    """
    try:
        if (rows := _decoded(batch, view)) is not None:
            is_own = _is_of(rows, view)
            if is_own.all():
                return FeatureRows(rows=rows, batch=batch, of_other_definitions=0)
        else:
            # Another definition has a column of a name that this one has, of another type.
            is_own = _is_of(decode_rows(batch.values, _DEFINITION), view)
        own = np.flatnonzero(is_own)
        rows = decode_rows([batch.values[at] for at in own], view.row_schema)
    except DecodeError as exc:
        msg = f"{batch.topic}-{batch.partition} from offset {int(batch.offsets[0])}: {exc}"
        raise DecodeError(msg) from exc
    return FeatureRows(
        rows=rows, batch=batch.take(own) if len(own) else batch, of_other_definitions=len(batch) - len(own)
    )


def _decoded(batch: RawBatch, view: FeatureView) -> pa.Table | None:
    try:
        return decode_rows(batch.values, view.row_schema)
    except DecodeError:
        return None


def _is_of(rows: pa.Table, view: FeatureView) -> NDArray[np.bool_]:
    is_own = pc.equal(rows.column("definition_hash"), view.definition_hash)
    return np.asarray(pc.fill_null(is_own, fill_value=False).to_numpy(), dtype=bool)
