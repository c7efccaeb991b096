"""Values of a column as numbers: numeric columns as they are, text and lists as codes of a pool."""

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streams.windowing.segment import Array, Bools, Ints

_COMPACT_FROM: Final = 4_096


class ValuePool:
    """Distinct values met in a column, by code."""

    def __init__(self, arrow_type: pa.DataType) -> None:
        self.arrow_type = arrow_type
        self._codes: dict[Any, int] = {}
        self._values: list[Any] = []
        self._compact_at = _COMPACT_FROM

    def __len__(self) -> int:
        return len(self._values)

    def encode(self, column: pa.Array) -> Ints:
        """Code of each value; 0 where it is null."""
        if pa.types.is_list(self.arrow_type):
            # Lists can't be dictionary-encoded; they are rare in features.
            return np.array([self._code(value) for value in column.to_pylist()], dtype=np.int64)
        encoded = column.dictionary_encode()
        codes = np.array([self._code(value) for value in encoded.dictionary.to_pylist()], dtype=np.int64)
        indices = pc.fill_null(encoded.indices, 0).to_numpy(zero_copy_only=False)
        return codes[indices] if len(codes) else np.zeros(len(column), dtype=np.int64)

    def _code(self, value: Any) -> int:
        if value is None:
            return 0
        key = _hashable(value)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = len(self._values)
            self._values.append(value)
        return code

    def decode(self, codes: Ints, is_valid: Bools) -> pa.Array:
        """Values of codes, null where not valid."""
        values = pa.array(self._values, self.arrow_type)
        return values.take(pa.array(codes, mask=~is_valid))

    def to_table(self, codes: Ints) -> pa.Table:
        """Values of these codes as a table."""
        return pa.table({"value": pa.array([self._values[code] for code in codes.tolist()], self.arrow_type)})

    def ranks(self) -> Ints:
        """Rank of each code in the order of its values."""
        ranks = np.empty(len(self._values), dtype=np.int64)
        order = pc.array_sort_indices(pa.array(self._values, self.arrow_type)).to_numpy()
        ranks[order] = np.arange(len(order))
        return ranks

    @property
    def wants_compaction(self) -> bool:
        """Whether the pool has grown to where dropping unused values is worth a look."""
        return len(self._values) >= self._compact_at

    def compact(self, used: list[Array]) -> Ints:
        """Keep only the values with these codes; returns the new code by old one."""
        kept = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(codes.astype(np.int64) for codes in used)]))
        mapping = np.zeros(len(self._values), dtype=np.int64)
        mapping[kept] = np.arange(len(kept))
        self._values = [self._values[code] for code in kept.tolist()]
        self._codes = {_hashable(value): code for code, value in enumerate(self._values)}
        self._compact_at = max(_COMPACT_FROM, 2 * len(self._values))
        return mapping


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
