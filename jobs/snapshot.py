"""``headrace snapshot``: a compacted topic as a reference table in a version that never changes."""

import json
import os
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from jobs.reach import reach_kafka
from jobs.schema_registry import name_registry
from jobs.settings import Settings
from jobs.topic_reader import read_topic
from schemas.contract import Contract, load_contract
from schemas.errors import ConfigError, DecodeError
from schemas.field import EVENT_TIME_UNITS_US
from schemas.reference import Reference
from streams.batch import RawBatch
from streams.decoding import decode

_Place = tuple[int, int]


def snapshot(
    reference: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="The reference to make, e.g. planes@1.")],
    *,
    topic: Annotated[str, typer.Option(help="The compacted topic.")],
    contract: Annotated[str, typer.Option(help="Contract of its records, e.g. plane@1.")],
    key: Annotated[list[str], typer.Option(help="Column of the key; again for each further one.")],
    valid_from: Annotated[
        str | None, typer.Option(help="Column of the time from which a record holds.", show_default="always")
    ] = None,
) -> None:
    """Write what stands on a compacted topic now as a reference table that views can look up.

    Of records with one Kafka key the newest counts, a tombstone takes it out. The
    file is schemas/references/NAME@VERSION.parquet in the working directory, and
    is never written over: what has changed is another version.
    """
    name, at, version = reference.partition("@")
    if not at or not version.isdigit():
        msg = f"`{reference}` is no name@version, expected one such as planes@1"
        raise ConfigError(msg)
    path = Path.cwd() / "schemas" / "references" / f"{reference}.parquet"
    if path.exists():
        msg = f"{path} is there already, expected a version that is not: a version never changes; take the next"
        raise ConfigError(msg)
    rules = load_contract(contract)
    if unknown := sorted({*key, *([] if valid_from is None else [valid_from])} - set(rules.fields)):
        msg = f"columns {unknown} are no fields of {contract}, expected some of {list(rules.fields)}"
        raise ConfigError(msg)
    brokers = Settings.from_environment(os.environ).address("kafka")
    reach_kafka(brokers)
    name_registry()
    table, ends = read_newest(brokers, topic, rules)
    if valid_from is not None:
        table = _with_times(table, valid_from, rules)
    told = {"headrace.topic": topic, "headrace.end_offsets": json.dumps(ends)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(told), path)
    try:
        Reference(name, version=int(version), key=tuple(key), valid_from=valid_from)
    except ConfigError:
        path.unlink()
        raise
    typer.echo(f"{path}: {table.num_rows:,} rows of {topic}")


def read_newest(brokers: str, topic: str, contract: Contract) -> tuple[pa.Table, dict[int, int]]:
    """Read the newest record of each Kafka key, and every record without one; a tombstone takes its key out.

    Returns:
        The contract's columns, and how far each partition was read.

    Raises:
        DecodeError: One of these records does not pass the contract.
        ServiceError: The topic cannot be read.
    """
    newest: dict[bytes, _Place] = {}
    kept: dict[_Place, bytes] = {}
    ends: dict[int, int] = {}
    for batch in read_topic(brokers, topic):
        ends[batch.partition] = batch.next_offset
        for offset, record_key, value in zip(batch.offsets.tolist(), batch.keys, batch.values, strict=True):
            place = (batch.partition, offset)
            if record_key is not None:
                kept.pop(newest.get(record_key, place), None)
                newest[record_key] = place
            if value is not None:
                kept[place] = value
    places = sorted(kept)
    if not places:
        return contract.arrow_schema.empty_table(), ends
    numbers = np.arange(len(places))
    batch = RawBatch(
        topic=topic,
        partition=0,
        offsets=numbers,
        broker_time_us=np.zeros(len(places), np.int64),
        keys=[None] * len(places),
        values=[kept[place] for place in places],
        headers=[None] * len(places),
        next_offset=len(places),
    )
    decoded = decode(batch, contract)
    if decoded.rejected.num_rows:
        first = decoded.rejected.to_pylist()[0]
        partition, offset = places[first["_offset"]]
        msg = (
            f"record at {topic}-{partition}@{offset} and {decoded.rejected.num_rows - 1} others do not pass "
            f"{contract.reference}: {first['detail']}; expected none: send a right one, or a tombstone, with its key"
        )
        raise DecodeError(msg)
    return decoded.rows.select(contract.arrow_schema.names), ends


def _with_times(table: pa.Table, name: str, contract: Contract) -> pa.Table:
    """Make timestamps of times that are whole numbers; text stays as it is."""
    column = table.column(name)
    if not pa.types.is_integer(column.type):
        return table
    unit = contract.fields[name].get("x-unit")
    if unit is None:
        msg = (
            f"`{name}` of {contract.reference} is an integer without `x-unit`, expected one of {[*EVENT_TIME_UNITS_US]}"
        )
        raise ConfigError(msg)
    times = column.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp("us", "UTC"))
    return table.set_column(table.schema.get_field_index(name), name, times)
