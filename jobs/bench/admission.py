"""What admission takes of the features role: the contract's rules and what each row decides alone, by processor time.

The role's time is that of a batch from raw payloads to the bytes of feature rows; what the client of Kafka takes comes
on top, so that the share of the whole role is smaller still. Both are measured on the same batches, in turns.
"""

import statistics
import time
from typing import Final

import numpy as np

from jobs.bench.figure import Figure
from jobs.bench.job import EventStream, make_view, to_json
from schemas.errors import WindowingError
from streams.batch import RawBatch
from streams.decoding import decode
from streams.json_decoding import suspect_rows
from streams.pipeline import PartitionPipeline
from streams.repartition import SourceAdmission
from streams.wire import encode_keys, encode_rows

_ROWS: Final = 20_000
_KEYS: Final = 20_000
_ROUNDS: Final = 11
_QUICK_ROUNDS: Final = 5
_BAR: Final = 0.15


def measure_admission(*, quick: bool) -> list[Figure]:
    """Measure it.

    Raises:
        WindowingError: A row of the benchmark was not admitted.
    """
    view = make_view("latest")
    (source,) = view.sources
    pipeline = PartitionPipeline(source, [view], partition=0)
    admission = SourceAdmission(source, key=view.entity.key)
    stream = EventStream(_KEYS)
    role_s, admission_s = [], []
    for number in range((_QUICK_ROUNDS if quick else _ROUNDS) + 1):
        batch = _raw(stream)
        started_s = time.process_time()
        done = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=0)
        rows = done.rows[view.name]
        keys, values = encode_keys(rows.column(view.entity.key)), encode_rows(rows)
        taken_s = time.process_time() - started_s
        decoded = decode(batch, source.schema).rows
        columns, read = decoded.select(source.schema.arrow_schema.names), np.arange(len(batch))
        started_s = time.process_time()
        suspects = suspect_rows(columns, source.schema, batch.values, read)
        admitted = admission.admit(decoded)
        own_s = time.process_time() - started_s
        if suspects or len(admitted.at) != len(batch) or done.dead_letters.num_rows or len(keys) != len(values):
            msg = f"admission: {len(admitted.at)} of {len(batch)} rows were admitted, expected all; no time counts"
            raise WindowingError(msg)
        if number:  # the first one fills what is made once
            role_s.append(taken_s)
            admission_s.append(own_s)
    share = statistics.median(own / whole for own, whole in zip(admission_s, role_s, strict=True))
    return [
        Figure(
            name="online.admission",
            value=share,
            unit="of the role's time",
            bar=_BAR,
            is_lower_better=True,
            compared_with="online.features_role",
            ratio=share,
        ),
        Figure(name="online.features_role", value=statistics.median(role_s) / _ROWS * 1e6, unit="us of cpu/event"),
    ]


def _raw(stream: EventStream) -> RawBatch:
    events = stream.batch(_ROWS)
    offsets = events.column("_offset").to_numpy()
    return RawBatch(
        topic="bench.events",
        partition=0,
        offsets=offsets,
        broker_time_us=events.column("event_time").to_numpy() * 1_000,
        keys=[None] * _ROWS,
        values=to_json(events).splitlines(),
        headers=[None] * _ROWS,
        next_offset=int(offsets[-1]) + 1,
    )
