"""What a replay has made, against what was live: rows, online values and dead letters, to the bit.

A replay's records stand at other offsets of another topic. What names them is put back first: offsets, and request ids
that are made of them. Then rows are compared as :mod:`offline.parity` compares, with the replay in the place of the
engine that makes rows anew.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from offline.parity import COMPARED_ROWS, Comparison, Mismatch, compare_online, compare_rows
from schemas.row import Pane
from schemas.view import FeatureView
from streams.sinks.online import OnlineValue
from streams.sinks.pseudonym import NO_PSEUDONYMS, Pseudonyms


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A dead letter, by the record that it is of and why.

    Attributes:
        partition: Partition of its source.
        offset: Offset there, of the record as it was live.
        reason: Reason code.
        view: The view that rejected it; None where every view does.
    """

    partition: int
    offset: int
    reason: str
    view: str | None


def restore_places(
    rows: pa.Table, *, replayed: FeatureView, view: FeatureView, originals: Mapping[int, NDArray[np.int64]]
) -> pa.Table:
    """Have a replay's rows name the records that they were made of as those were live.

    Args:
        rows: Rows of the replay, ``replayed.row_schema`` at least.
        replayed: The view in its namespace.
        view: The view.
        originals: By partition, the offset of each record as it was live, by its offset in the replay.
    """
    partitions = rows["source_partition"].to_numpy()
    there = rows["source_offset"].to_numpy()
    here = np.empty(len(there), np.int64)
    for number, offsets in originals.items():
        mine = partitions == number
        here[mine] = offsets[there[mine]]
    made, meant = (
        _places(topic, partitions, at) for topic, at in ((replayed.input.topic, there), (view.input.topic, here))
    )
    request_ids = rows["request_id"].combine_chunks()
    is_own = pc.fill_null(pc.equal(request_ids, made), False)
    values = {
        "source_offset": pa.array(here),
        "request_id": pc.if_else(is_own, meant, request_ids),
        "definition_hash": pa.repeat(pa.scalar(view.definition_hash), rows.num_rows),
        "source_topic": pa.repeat(pa.scalar(view.input.topic), rows.num_rows),
        "view": pa.repeat(pa.scalar(view.name), rows.num_rows),
    }
    for name, column in values.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), column)
    return rows


def _places(topic: str, partitions: NDArray[np.int32], offsets: NDArray[np.int64]) -> pa.Array:
    numbers = [pa.array(column).cast(pa.string()) for column in (partitions, offsets)]
    return pc.binary_join_element_wise(pa.scalar(topic), *numbers, "-")


def compare_replay(
    view: FeatureView,
    *,
    replayed: FeatureView,
    live: ds.Dataset,
    made: ds.Dataset,
    values: Mapping[int, Sequence[OnlineValue]],
    originals: Mapping[int, NDArray[np.int64]],
    wanted: Mapping[int, range],
    pseudonyms: Pseudonyms = NO_PSEUDONYMS,
) -> list[Comparison]:
    """Compare rows and online values of a replay with the rows that the live path has stored.

    Args:
        view: The view.
        replayed: The view in its namespace.
        live: Its table.
        made: The table that the replay has written.
        values: The replay's online values, by the partition that their entity is in.
        originals: As for :func:`restore_places`.
        wanted: By partition, the offsets (as they were live) whose rows are compared.
        pseudonyms: What stands online for personal values of views that ask for it.

    Returns:
        One for the rows, ``offline``, and one for the values, ``online``.
    """
    offline, online = Comparison(store="offline"), Comparison(store="online")
    spans = _spans(live)
    for number, offsets in sorted(originals.items()):
        left = {
            (value.window_end_us, value.pane_index, value.source_offset, value.entity): value
            for value in _at_home(values.get(number, ()), offsets, wanted[number])
        }
        span = spans.get(number, range(0))
        for stretch in _stretches(offsets, wanted[number]):
            here = _of(live.to_table(filter=_where(number, stretch)), view)
            first, stop = np.searchsorted(offsets, [stretch.start, stretch.stop]).tolist()
            there = _of(made.to_table(filter=_where(number, range(first, stop))), replayed)
            there = restore_places(there, replayed=replayed, view=view, originals={number: offsets})
            compare_rows(view, here, there, span=span, into=offline)
            compare_online(view, left, pseudonyms.rows(view, here), into=online)
        for place, value in left.items():
            # Of a view that emits the latest, the batches decided which as-of rows are there.
            is_known = place[2] in span and not (view.emit == "latest" and value.pane == Pane.EARLY)
            online.rows += is_known
            online.not_judged += not is_known
            if is_known:
                online.found([_unexpected(view, value, partition=number)])
    return [offline, online]


def _at_home(values: Iterable[OnlineValue], offsets: NDArray[np.int64], wanted: range) -> Iterator[OnlineValue]:
    for value in values:
        if value.source_offset is not None:
            original = int(offsets[value.source_offset])
            if original in wanted:
                yield replace(value, source_offset=original)


def _unexpected(view: FeatureView, value: OnlineValue, *, partition: int) -> Mismatch:
    return Mismatch(
        store="online",
        kind="missing",
        entity=value.entity,
        column=None,
        served=None,
        recomputed=None,
        lineage={
            "source_topic": view.input.topic,
            "source_partition": partition,
            "source_offset": value.source_offset,
            "pane": value.pane,
            "pane_index": value.pane_index,
            "window_end": value.window_end_us,
        },
    )


def compare_letters(
    live: AbstractSet[Letter],
    made: AbstractSet[Letter],
    *,
    wanted: Mapping[int, range],
    ends: Mapping[int, int],
    is_whole: bool,
) -> Comparison:
    """Compare the dead letters of a replay with those that the live path has written.

    Args:
        live: Of the live path.
        made: Of the replay.
        wanted: By partition, the offsets that are compared.
        ends: By partition, the offset up to which the live path has committed its letters; a partition that it has not
            begun is left out.
        is_whole: Whether the topic of the live path's letters still has all that were ever there.
    """
    here, there = (
        {letter for letter in letters if letter.offset in wanted.get(letter.partition, ())} for letters in (live, made)
    )
    found = Comparison(store="dead letters", rows=len(here & there), values=len(here & there))
    missing = there - here
    unknown = {letter for letter in missing if not is_whole or letter.offset >= ends.get(letter.partition, 0)}
    found.not_judged = len(unknown)
    missing -= unknown
    for kind, letters in (("missing", missing), ("unexpected", here - there)):
        found.rows += len(letters)
        ordered = sorted(
            letters, key=lambda letter: (letter.partition, letter.offset, letter.reason, letter.view or "")
        )
        found.found(
            Mismatch(
                store=found.store,
                kind=kind,
                entity=letter.view,
                column="reason",
                served=letter.reason if kind == "unexpected" else None,
                recomputed=letter.reason if kind == "missing" else None,
                lineage={"source_partition": letter.partition, "source_offset": letter.offset, "reason": letter.reason},
            )
            for letter in ordered
        )
    return found


def _stretches(offsets: NDArray[np.int64], wanted: range) -> Iterator[range]:
    """Cut the offsets that are wanted into parts of so many records."""
    first, stop = np.searchsorted(offsets, [wanted.start, wanted.stop]).tolist()
    start = wanted.start
    for at in range(first + COMPARED_ROWS, stop, COMPARED_ROWS):
        yield range(start, int(offsets[at]))
        start = int(offsets[at])
    yield range(start, wanted.stop)


def _where(partition: int, offsets: range) -> ds.Expression:
    offset = pc.field("source_offset")
    return (pc.field("source_partition") == partition) & (offset >= offsets.start) & (offset < offsets.stop)


def _of(rows: pa.Table, view: FeatureView) -> pa.Table:
    return rows.select(view.row_schema.names).cast(view.row_schema)


def _spans(rows: ds.Dataset) -> dict[int, range]:
    """Tell the source offsets that a table has rows of, from the first to the last."""
    spans: dict[int, range] = {}
    for batch in rows.to_batches(columns=["source_partition", "source_offset"]):
        edges = pa.Table.from_batches([batch]).group_by("source_partition")
        for row in edges.aggregate([("source_offset", "min"), ("source_offset", "max")]).to_pylist():
            found = range(row["source_offset_min"], row["source_offset_max"] + 1)
            before = spans.get(row["source_partition"], found)
            spans[row["source_partition"]] = range(min(before.start, found.start), max(before.stop, found.stop))
    return spans
