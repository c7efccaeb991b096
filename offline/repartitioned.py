"""A view by way of a repartition topic, over a file: as if the topic had one partition and the order of the file.

The sources have the partitions that rows of the file are in. A source of which there is no row is idle; no other input
ever is, for a file knows no processing time: one that has no more rows holds the watermark back until ``--close``.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offline.event_file import UNKNOWN_US, EventCut
from schemas.row import ORIGIN_COLUMNS
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.decoding import decode
from streams.repartition import SourceAdmission, record_schema, with_event_ids
from streams.windowing.engine import WindowEngine


class RepartitionDriver:
    """Admits the rows of a file, partition by partition of each source, and drives one engine with them.

    Args:
        view: The view.
        partitions: Partitions of each source that rows of the file are in.

    Attributes:
        engine: The engine; offsets are numbers of rows in the file.
    """

    def __init__(self, view: FeatureView, partitions: list[list[int]]) -> None:
        self.engine = WindowEngine(view)
        self._view = view
        self._schema = record_schema(view.input)
        self._place = [{number: at for at, number in enumerate(numbers)} for numbers in partitions]
        self._admissions: dict[tuple[int, int], SourceAdmission] = {}
        self._origins = pa.schema([pa.field("number", pa.int64()), *ORIGIN_COLUMNS]).empty_table()
        self._announce()

    def _announce(self) -> None:
        """Tell the engine of all inputs before any of them has a row."""
        inputs = [
            {
                "_source": source.topic,
                "_source_partition": at,
                "_source_partitions": max(len(place), 1),
                "_is_idle": not place,
            }
            for source, place in zip(self._view.sources, self._place, strict=True)
            for at in range(max(len(place), 1))
        ]
        told = [{"_offset": number - len(inputs), "_is_event": False, **told} for number, told in enumerate(inputs)]
        self.engine.step(pa.Table.from_pylist(told, schema=self._schema), processing_time_us=0)

    def step(self, cut: EventCut) -> tuple[pa.Table, pa.Table]:
        """Take a cut.

        Returns:
            Feature rows, and :data:`schemas.row.REJECTED_COLUMNS` with numbers of rows in the file as ``_offset``.
        """
        records = [self._schema.empty_table()]
        rejected = []
        for number, source in enumerate(self._view.sources):
            mine = np.flatnonzero(cut.sources == number)
            if not len(mine):
                continue
            decoded = decode(_batch(cut, mine, source), source.schema.as_plain_json)
            rejected.append(decoded.rejected)
            numbers = decoded.rows["_offset"].to_numpy()
            partitions = cut.partitions[numbers - cut.first_number]
            for partition in np.unique(partitions).tolist():
                events = decoded.rows.take(pa.array(np.flatnonzero(partitions == partition)))
                admitted, letters = self._admit(events, number, partition, cut)
                records.append(admitted)
                rejected.append(letters)
        taken = pa.concat_tables(records).sort_by("_offset")
        self._know_origins(cut)
        result = self.engine.step(taken, processing_time_us=0)
        return result.rows, pa.concat_tables([*rejected, result.dead_letters])

    def _admit(self, events: pa.Table, number: int, partition: int, cut: EventCut) -> tuple[pa.Table, pa.Table]:
        source, place = self._view.sources[number], self._place[number]
        broker_time_us = cut.broker_time_us[events["_offset"].to_numpy() - cut.first_number]
        known = pa.array(broker_time_us, mask=broker_time_us == UNKNOWN_US)
        events = events.set_column(events.schema.get_field_index("_broker_time"), "_broker_time", known)
        admission = self._admissions.get((number, partition))
        if admission is None:
            admission = self._admissions[number, partition] = SourceAdmission(source, key=self._view.entity.key)
        admitted = admission.admit(events)
        rows = with_event_ids(events.take(pa.array(admitted.at)), source)
        offsets = cut.offsets[rows["_offset"].to_numpy() - cut.first_number].tolist()
        columns = {name: rows.column(name) for name in rows.column_names}
        fixed = {
            "_source": source.topic,
            "_source_partition": place[partition],
            "_source_partitions": len(place),
            "_is_event": True,
            "_is_idle": False,
        }
        columns |= {name: pa.repeat(pa.scalar(value), rows.num_rows) for name, value in fixed.items()}
        columns |= {
            "_request_id": pa.array([f"{source.topic}-{partition}-{offset}" for offset in offsets], pa.string()),
            "_watermark": pa.array(admitted.watermark_us),
            "_watermark_after": pa.array(admitted.after_us),
            "_time": pa.array(admitted.time_us),
        }
        arrays = [columns.get(field.name, pa.nulls(rows.num_rows, field.type)) for field in self._schema]
        return pa.table(arrays, schema=self._schema), admitted.rejected

    def _know_origins(self, cut: EventCut) -> None:
        """Remember where the rows of a cut come from, and the last row before it: the end of the file shows that."""
        topics = [source.topic for source in self._view.sources]
        columns = [
            cut.numbers,
            [topics[source] for source in cut.sources.tolist()],
            cut.partitions,
            cut.offsets,
        ]
        known = self._origins
        is_last = pa.array(known["number"].to_numpy() == self.engine.last_offset)
        fresh = pa.table([pa.array(c) for c in columns], names=known.column_names)
        self._origins = pa.concat_tables([known.filter(is_last), fresh])

    def with_origin(self, rows: pa.Table) -> pa.Table:
        """Name the record that made each row."""
        at = pa.array(np.searchsorted(self._origins["number"].to_numpy(), rows["source_offset"].to_numpy()))
        for field in ORIGIN_COLUMNS:
            rows = rows.append_column(field, self._origins[field.name].take(at))
        return rows


def _batch(cut: EventCut, mine: NDArray[np.int64], source: EventSource) -> RawBatch:
    return RawBatch(
        topic=source.topic,
        partition=0,
        offsets=cut.numbers[mine],
        broker_time_us=cut.broker_time_us[mine],
        keys=[None] * len(mine),
        values=[cut.values[at] for at in mine.tolist()],
        headers=[None] * len(mine),
        next_offset=cut.first_number + len(cut),
    )
