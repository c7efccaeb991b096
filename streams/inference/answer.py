"""What models answer, as output columns: tensors are checked row by row, and rows without a valid answer are told."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.model import ModelSpec, ServedVersion
from schemas.output import DATATYPES
from schemas.score import ServedBy
from streams.ports import Inference

SERVED_BY: Final = (ServedBy.MODEL, ServedBy.CACHE, ServedBy.LIGHT_MODEL, ServedBy.RULES)
"""Where an answer may come from, from the top; :attr:`Answers.served_by` counts in it."""
NOBODY: Final = -1
"""Nobody has answered the row."""
COLUMN_TYPES: Final[Mapping[str, Any]] = {"number": np.float32, "integer": np.int64, "boolean": np.bool_}
"""Type of an output column, by its declared type."""

Columns = dict[str, NDArray[Any]]
"""``(n_rows,)`` values by output column."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to the rows of a batch.

    Attributes:
        columns: Values by output column; any value where nobody has answered.
        served_by: ``(n_rows,)`` int8, index in :data:`SERVED_BY`, or :data:`NOBODY`.
        versions: The versions that have answered, or in whose place a lower rung did.
        version_of: ``(n_rows,)`` int8, index in ``versions``.
        is_canary: ``(n_rows,)``, the rows whose entity the canary is given, whoever has answered them in the end.
        faults: What was wrong with the model's answer, by row.
        fallen: Rows that went down the ladder, by why and by who answered them.
    """

    columns: Columns
    served_by: NDArray[np.int8]
    versions: tuple[ServedVersion, ...]
    version_of: NDArray[np.int8]
    is_canary: NDArray[np.bool_]
    faults: Mapping[int, str] = field(default_factory=dict)
    fallen: Counter[tuple[str, str]] = field(default_factory=Counter)

    @staticmethod
    def empty(spec: ModelSpec, served: ServedVersion, *, n_rows: int) -> "Answers":
        """Make room for the answers of a version to ``n_rows`` rows, none of which is answered yet."""
        return Answers(
            columns={output.column: np.zeros(n_rows, COLUMN_TYPES[output.type]) for output in spec.outputs},
            served_by=np.full(n_rows, NOBODY, dtype=np.int8),
            versions=(served,),
            version_of=np.zeros(n_rows, dtype=np.int8),
            is_canary=np.zeros(n_rows, dtype=np.bool_),
        )

    def put(self, rows: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], *, by: ServedBy) -> None:
        """Take answers to some rows, which changes these."""
        for name, values in columns.items():
            self.columns[name][rows] = values
        self.served_by[rows] = SERVED_BY.index(by)

    def joined(self, other: "Answers") -> "Answers":
        """Put the answers of another version to other rows of the batch beside these."""
        is_other = other.served_by != NOBODY
        versions = tuple(dict.fromkeys([*self.versions, *other.versions]))
        places = np.array([versions.index(served) for served in other.versions], dtype=np.int8)
        return Answers(
            columns={name: np.where(is_other, other.columns[name], values) for name, values in self.columns.items()},
            served_by=np.where(is_other, other.served_by, self.served_by),
            versions=versions,
            version_of=np.where(is_other, places[other.version_of], self.version_of),
            is_canary=self.is_canary | other.is_canary,
            faults={**self.faults, **other.faults},
            fallen=self.fallen + other.fallen,
        )


def read_outputs(spec: ModelSpec, inference: Inference, *, n_rows: int) -> tuple[Columns, dict[int, str]]:
    """Turn tensors into output columns, and find the rows whose answer is no score.

    Returns:
        Values by output column; and what is wrong, by row, in order. The columns hold any value there.
    """
    faults: dict[int, str] = {}
    for rows, fault in inference.rejected:
        faults |= dict.fromkeys(rows, fault)
    columns: Columns = {}
    for output in spec.outputs:
        tensor = inference.outputs.get(output.tensor)
        if tensor is None:  # every row was rejected
            tensor = np.zeros((n_rows, output.width), DATATYPES[output.datatype])
        raw = tensor[:, output.index]
        values = raw.astype(np.float64)
        is_wrong = output.wrong(values)
        for row in np.flatnonzero(is_wrong).tolist():
            faults.setdefault(row, output.fault(values[row], is_masked=True) or "")
        columns[output.column] = np.where(is_wrong, 0, raw).astype(COLUMN_TYPES[output.type])
    return columns, dict(sorted(fault for fault in faults.items() if fault[0] < n_rows))
