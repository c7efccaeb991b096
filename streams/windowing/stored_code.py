"""Codes of value pools in a part of the state: numbered anew, beside the values that the part holds, and no others."""

from typing import Final

import numpy as np

from streams.windowing.columns import Pools
from streams.windowing.segment import Array, Ints
from streams.windowing.snapshot import Content

_SECTION: Final = "pool.{}"


class CodeWriter:
    """Numbers the values that a part holds."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._stored_of: dict[str, Ints] = {}
        self._used: dict[str, list[Ints]] = {}

    def store(self, column: str, codes: Array) -> Array:
        """Number in the part of each of these codes of a column's pool."""
        if not len(pool := self._pools.pools[column]):
            return codes
        if column not in self._used:
            self._stored_of[column], self._used[column] = np.full(len(pool), -1, dtype=np.int64), []
        stored_of, used = self._stored_of[column], self._used[column]
        fresh = np.unique(codes[stored_of[codes] < 0])
        stored_of[fresh] = sum(map(len, used)) + np.arange(len(fresh))
        used.append(fresh)
        return stored_of[codes]

    def finish(self, content: Content) -> None:
        """Add the values to the part."""
        for column, used in self._used.items():
            content.tables[_SECTION.format(column)] = self._pools.pools[column].to_table(np.concatenate(used))


class CodeReader:
    """Knows the values of a part by the numbers they have in it."""

    def __init__(self, pools: Pools, content: Content) -> None:
        self._code_of = {
            column: pool.encode(table.column("value").combine_chunks())
            for column, pool in pools.pools.items()
            if (table := content.tables.get(_SECTION.format(column))) is not None
        }

    def load(self, column: str, stored: Array) -> Array:
        """Code in the column's pool of each of these numbers."""
        return self._code_of[column][stored] if column in self._code_of else stored
