"""The newest rows in the offline store, for views whose ``fallback`` asks for it: explicit, because it takes long.

Each look-up scans the table for its keys. So there is one scan of a view at a time, in which all that wait take part,
and what it finds, or does not find, stands for a while.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from cachetools import TTLCache

from schemas.row import Pane
from schemas.view import FeatureView
from streams.serving.flight import Flights
from streams.sinks.offline import scan_features
from streams.sinks.packing import UnpackedValue
from streams.sinks.rows import ORDER_COLUMNS, newest_rows

KEEP_S: Final = 10.0
"""Seconds for which what a scan found, or did not find, stands."""
_MAX_KEPT: Final = 100_000
_ENGINE: Final = ("event_time", "pane", "watermark", "broker_time", *ORDER_COLUMNS)

Found = Mapping[str | int, UnpackedValue | None]


class LatestOffline:
    """Looks up the newest rows of entities in Delta tables; belongs to one event loop.

    Args:
        root: Directory or object store URL that holds the tables.
        timer: Seconds of a monotonic clock.
        storage_options: Options of the object store, as delta-rs takes them.
    """

    def __init__(
        self, root: str | Path, *, timer: Callable[[], float], storage_options: Mapping[str, str] | None = None
    ) -> None:
        self._storage_options = storage_options
        self._root = root
        self._timer = timer
        self._flights: dict[str, Flights[str | int, UnpackedValue | None]] = {}
        self._kept: dict[str, TTLCache[str | int, UnpackedValue | None]] = {}

    async def get(self, view: FeatureView, entities: Sequence[str | int]) -> dict[str | int, UnpackedValue | None]:
        """Look up entities; None for those that have no row.

        Raises:
            SinkUnavailableError: There is no table, or the storage does not answer.
            SchemaMismatchError: The table belongs to another definition.
        """
        tag = f"{view.name}:{view.version}:{view.definition_hash}"
        kept = self._kept.setdefault(tag, TTLCache(_MAX_KEPT, KEEP_S, timer=self._timer))
        found = {entity: kept[entity] for entity in entities if entity in kept}
        if wanted := [entity for entity in entities if entity not in found]:
            flights = self._flights.setdefault(tag, Flights(partial(self._fetch, view), max_flying=1))
            scanned = await flights.get(wanted)
            kept.update(scanned)
            found |= scanned
        return found

    async def close(self) -> None:
        """Call off what is being looked up."""
        for flights in self._flights.values():
            await flights.close()

    async def _fetch(self, view: FeatureView, entities: Sequence[str | int]) -> Found:
        return await asyncio.to_thread(self._scan, view, entities)

    def _dataset(self, view: FeatureView) -> ds.Dataset:
        return scan_features(self._root, view, storage_options=self._storage_options)

    def _scan(self, view: FeatureView, entities: Sequence[str | int]) -> Found:
        key = view.entity.key
        wanted = pa.array(entities, view.feature_schema.field(key).type)
        columns = [key, *_ENGINE, *view.definitions]
        rows = self._dataset(view).to_table(columns=columns, filter=pc.field(key).isin(wanted))
        newest = newest_rows(rows, view=view)
        plain = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in newest.columns]
        found: dict[str | int, UnpackedValue | None] = dict.fromkeys(entities)
        for row in pa.table(plain, names=newest.column_names).to_pylist():
            found[row[key]] = UnpackedValue(
                window_end_us=row["window_end"],
                pane_index=row["pane_index"],
                source_offset=row["source_offset"],
                event_time_us=row["event_time"],
                pane=Pane(row["pane"]),
                watermark_us=row["watermark"],
                broker_time_us=row["broker_time"],
                features={name: row[name] for name in view.definitions},
            )
        return found
