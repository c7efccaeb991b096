"""The guard of the online store under writers that race each other, each with all rows, reordered and repeated."""

import asyncio
import random
import threading
from uuid import uuid4

import pyarrow as pa

from schemas.aggregation import count
from streams.sinks.online import OnlineReader, OnlineWriter, Status
from tests.support.feature_rows import T0_US, make_rows, make_view

VIEW = make_view("counts", features={"n": count().over("5m")})
ENTITIES = [f"u{i}" for i in range(40)]
WRITERS = 5
ROWS = 3_000
SEED = 11


def make_log() -> pa.Table:
    """Rows in the order in which an engine makes them: window ends that close late, panes that fire again."""
    chance = random.Random(SEED)
    rows = [
        {
            "user_id": chance.choice(ENTITIES),
            "window_end": T0_US + chance.randrange(-2, 3) * 60_000_000 + offset // 100,
            "pane_index": chance.randrange(3),
            "source_offset": offset,
            "n": offset,
        }
        for offset in range(ROWS)
    ]
    return make_rows(VIEW, rows)


def order(row: dict[str, int]) -> tuple[int, int, int]:
    return row["window_end"], row["pane_index"], row["source_offset"]


def test_writers_with_reordered_and_repeated_rows_end_with_the_newest_and_no_reader_sees_one_go_back(
    redis_url: str,
) -> None:
    prefix, log = f"test{uuid4().hex}", make_log()
    times = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in log.columns]
    newest: dict[str, dict[str, int]] = {}
    for row in pa.table(times, names=log.column_names).to_pylist():
        newest[row["user_id"]] = max(newest.get(row["user_id"], row), row, key=order)
    done = threading.Event()
    barrier = threading.Barrier(WRITERS + 1)
    failures: list[BaseException] = []
    written = 0
    lock = threading.Lock()

    def write(number: int) -> None:
        async def run() -> None:
            nonlocal written
            chance = random.Random(number)
            positions = list(range(ROWS)) * 2  # every row twice from each writer
            chance.shuffle(positions)
            async with OnlineWriter(redis_url, prefix) as writer:
                while positions:
                    size = chance.randrange(1, 400)
                    batch, positions = positions[:size], positions[size:]
                    result = await writer.write(log.take(pa.array(batch)), view=VIEW)
                    assert result.written + result.superseded == len(batch)
                    with lock:
                        written += result.written

        try:
            barrier.wait()
            asyncio.run(run())
        except BaseException as exc:
            failures.append(exc)

    def watch() -> None:
        async def run() -> None:
            seen: dict[str, tuple[int, int, int]] = {}
            async with OnlineReader(redis_url, prefix) as reader:
                while True:
                    is_last = done.is_set()
                    for value in await reader.read(VIEW, ENTITIES, now_us=T0_US):
                        if value.status is Status.MISSING:
                            assert str(value.entity) not in seen
                            continue
                        now = (value.window_end_us or 0, value.pane_index or 0, value.source_offset or 0)
                        assert seen.get(str(value.entity), now) <= now
                        assert value.features["n"] == value.source_offset  # never a mixture of two rows
                        seen[str(value.entity)] = now
                    if is_last:
                        assert seen == {entity: order(row) for entity, row in newest.items()}
                        return

        try:
            barrier.wait()
            asyncio.run(run())
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    watcher = threading.Thread(target=watch)
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert failures == []
    # Each entity was written at least once, and never more often than it has rows: a repeat replaces nothing.
    assert len(newest) <= written <= ROWS
