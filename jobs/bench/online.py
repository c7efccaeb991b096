"""``headrace bench online``: the online store against a local Valkey, next to what its protocol can do unguarded.

Rounds of everything are interleaved, and a figure is the median of its rounds, by the clock: the server works in a
process of its own, so what is measured is how long a writer or reader waits. Processor time of a guarded row, on either
side, stands beside it: on a machine that is busy with other things that is what can be compared. Rows are those of the
benchmark job (5 features) and of a view of 50 features. After each round a sample of entities is read back and compared
with what was written, before its time counts.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa
from redis.asyncio import Redis

from infra.local.services import LocalServices
from jobs.bench.admission import measure_admission
from jobs.bench.figure import Figure
from jobs.bench.job import make_view
from jobs.settings import Settings
from schemas.aggregation import count, max_, mean, sum_
from schemas.errors import SinkError
from schemas.row import Pane
from schemas.serving import Serving
from schemas.view import FeatureView
from streams.serving.store import AsyncOnlineStore, OnlineStore
from streams.sinks.online import OnlineWriter, online_key
from streams.sinks.packing import pack_rows

_ROWS: Final = 20_000
_ROUNDS: Final = 9
_QUICK_ROUNDS: Final = 3
_QUICK_S: Final = 25.0
"""When a quick run begins no more rounds."""
_READS: Final = 1_000
"""Reads of one entity in a round; of a hundred entities a tenth."""
_MANY: Final = 100
_HSET_ROWS: Final = 2_000
"""Rows of an unguarded round: hashes of 50 features take long."""
_SAMPLE: Final = 50
_PATIENCE_S: Final = 30.0
"""A busy machine is no store that is down."""
_T0_US: Final = 1_700_000_000_000_000
_SOURCE: Final = make_view("latest")

Tell = Callable[[str], None]


def _wide_view() -> FeatureView:
    sizes = [f"{minutes}m" for minutes in range(1, 14)]
    made = {"count": count(), "sum": sum_("amount"), "mean": mean("amount"), "max": max_("amount")}
    features = {f"{name}_{size}": aggregation.over(size) for size in sizes for name, aggregation in made.items()}
    return FeatureView(
        "wide",
        version=1,
        entity=_SOURCE.entity,
        source=_SOURCE.source,
        slide="1m",
        serving=Serving(cache="0s"),  # what is measured is the read of the store
        features=dict(list(features.items())[:50]),
    )


@dataclass
class _Rig:
    """A view, its rows, and the times of everything that is done with them."""

    view: FeatureView
    url: str
    server: Redis
    writer: OnlineWriter
    round: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chance = np.random.default_rng(len(self.view.definitions))
        types = self.view.feature_schema
        self.entities = [f"user{number:05}" for number in range(_ROWS)]
        self._features: dict[str, pa.Array] = {}
        for name in self.view.definitions:
            values = chance.integers(0, 1_000, _ROWS)
            self._features[name] = pa.array(
                values if pa.types.is_integer(types.field(name).type) else values / 7, types.field(name).type
            )

    def rows(self, n_rows: int = _ROWS) -> pa.Table:
        """Rows of all entities, newer than any that were made before."""
        self.round += 1
        time_us, view = _T0_US + self.round, self.view
        plain: dict[str, Any] = {
            "event_time": time_us,
            "window_end": time_us,
            "pane": str(Pane.EARLY),
            "pane_index": 0,
            "is_final": False,
            "watermark": time_us - 5_000_000,
            "source_offset": self.round,
            "broker_time": time_us,
            "request_id": "r",
            "view": view.name,
            "view_version": view.version,
            "definition_hash": view.definition_hash,
            "source_topic": view.input.topic,
            "source_partition": 0,
            "computed_time": time_us,
            "epoch": 1,
        }
        columns = {
            view.entity.key: pa.array(self.entities),
            **self._features,
            **{
                name: pa.repeat(pa.scalar(value, view.row_schema.field(name).type), _ROWS)
                for name, value in plain.items()
            },
        }
        return pa.table([columns[name] for name in view.row_schema.names], schema=view.row_schema).slice(0, n_rows)

    async def timed(self, name: str, work: Callable[[], Awaitable[Any]], *, per: int = 1) -> Any:
        """Take note of the seconds that ``work`` takes, by ``per``."""
        started_s = time.perf_counter()
        answer = await work()
        self.times.setdefault(name, []).append((time.perf_counter() - started_s) / per)
        return answer

    def median(self, name: str) -> float:
        """Give the median of what was noted."""
        return statistics.median(self.times[name])

    async def write_round(self) -> None:
        """Write newer rows guarded, the same again, and what is about the same work unguarded; check what is stored."""
        rows = self.rows()
        server_s, client_s = await self._server_s(), time.process_time()
        result = await self.timed("guarded", lambda: self.writer.write(rows, view=self.view), per=_ROWS)
        self.times.setdefault("client", []).append((time.process_time() - client_s) / _ROWS)
        self.times.setdefault("server", []).append((await self._server_s() - server_s) / _ROWS)
        _refuse_unless(result.written == _ROWS, f"{result.written} rows were written, expected {_ROWS}")
        result = await self.timed("repeated", lambda: self.writer.write(rows, view=self.view), per=_ROWS)
        _refuse_unless(result.written == 0, f"{result.written} rows were written again, expected none")
        await self.timed("hset", lambda: self._hset(rows.slice(0, _HSET_ROWS)), per=_HSET_ROWS)
        packed = pack_rows(rows, view=self.view)
        await self.timed("set", lambda: self._set(packed), per=_ROWS)
        await self._check(rows)

    async def measure_memory(self) -> None:
        """Measure what a key takes as a packed string and as a hash, by what the server's memory grows."""
        for name in ("packed", "hash"):
            await self.server.execute_command("FLUSHALL SYNC")  # type: ignore[no-untyped-call]
            before = (await self.server.info("memory"))["used_memory"]
            rows = self.rows()
            if name == "packed":
                await self.writer.write(rows, view=self.view)
            else:
                for start in range(0, _ROWS, _HSET_ROWS):
                    await self._hset(rows.slice(start, _HSET_ROWS))
            _refuse_unless(await self.server.dbsize() == _ROWS, f"not {_ROWS} keys are stored")
            self.memory[name] = ((await self.server.info("memory"))["used_memory"] - before) / _ROWS
        await self.server.execute_command("FLUSHALL SYNC")  # type: ignore[no-untyped-call]

    async def _hset(self, rows: pa.Table) -> None:
        context = ["event_time", "window_end", "pane", "pane_index", "watermark", "source_offset", "broker_time"]
        kept = rows.select([*context, *self.view.definitions])
        plain = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in kept.columns]
        pipeline = self.server.pipeline(transaction=False)
        keys = rows[self.view.entity.key].to_pylist()
        for key, row in zip(keys, pa.table(plain, names=kept.column_names).to_pylist(), strict=True):
            pipeline.hset(f"hash:{self.view.name}:{{{key}}}", mapping=row)
        await pipeline.execute()

    async def _set(self, packed: Sequence[bytes]) -> None:
        pipeline = self.server.pipeline(transaction=False)
        for key, value in zip(self.entities, packed, strict=True):
            pipeline.set(f"plain:{self.view.name}:{{{key}}}", value)
        await pipeline.execute()

    async def _server_s(self) -> float:
        used = await self.server.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    async def _check(self, rows: pa.Table) -> None:
        step = max(1, _ROWS // _SAMPLE)
        expected = rows.take(pa.array(range(0, _ROWS, step))).select(list(self.view.definitions)).to_pylist()
        keys = [online_key(self.view, entity) for entity in self.entities[::step]]
        stored = await self.server.mget(keys)
        newest = f"{self.round}".encode()
        _refuse_unless(all(value is not None and newest in value for value in stored), "a key is missing or old")
        async with AsyncOnlineStore(self.url, timeout_s=_PATIENCE_S) as store:
            values = await store.read(self.view, self.entities[::step])
        _refuse_unless([value.features for value in values] == expected, "what was read is not what was written")


@dataclass
class _Reads:
    """Times of reads, a list a round, by what was read."""

    store: AsyncOnlineStore
    sync: OnlineStore
    server: Redis
    view: FeatureView
    entities: Sequence[str]
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    round_trips: float = 0.0

    async def round(self) -> None:
        """Read single entities and hundreds of them, and single values by nothing but the client."""
        chance = np.random.default_rng(len(self.seconds))
        ones = [self.entities[at] for at in chance.integers(0, len(self.entities), _READS)]
        await self._timed("get", ones, lambda entity: self.server.get(online_key(self.view, entity)))
        await self._timed("read_1", ones, lambda entity: self.store.read(self.view, [entity]))
        many = [list(self.entities[at : at + _MANY]) for at in range(0, _READS // 10 * 7, 7)]
        calls = await self._calls()
        await self._timed("read_100", many, lambda some: self.store.read(self.view, some))
        self.round_trips = (await self._calls() - calls) / len(many)
        self.seconds.setdefault("read_1_sync", []).append(await asyncio.to_thread(self._read_sync, ones))

    def quantile(self, name: str, q: float) -> float:
        """Give the median, over the rounds, of a quantile of the milliseconds of a read."""
        return statistics.median(float(np.quantile(times, q)) for times in self.seconds[name]) * 1_000

    async def _timed(self, name: str, asked: Sequence[Any], read: Callable[[Any], Awaitable[Any]]) -> None:
        times = []
        for what in asked:
            started_s = time.perf_counter()
            answer = await read(what)
            times.append(time.perf_counter() - started_s)
            _refuse_unless(bool(answer), f"{name}: nothing was read of {what}")
        self.seconds.setdefault(name, []).append(times)

    def _read_sync(self, ones: Sequence[str]) -> list[float]:
        times = []
        for entity in ones:
            started_s = time.perf_counter()
            (value,) = self.sync.read(self.view, [entity])
            times.append(time.perf_counter() - started_s)
            _refuse_unless(value.completeness == 1, f"{entity} was read incomplete, since {value.status}")
        return times

    async def _calls(self) -> int:
        commands = await self.server.info("commandstats")
        return int(commands.get("cmdstat_mget", {}).get("calls", 0))


def run(*, quick: bool, tell: Tell) -> list[Figure]:
    """Measure the online store.

    Args:
        quick: Fewer rounds.
        tell: Takes a line of progress.

    Raises:
        SinkError: What was read is not what was written.
        ServiceError: There is no Valkey to be started.
    """
    with TemporaryDirectory(prefix="headrace-bench-") as home:
        services = LocalServices(
            Path(home),
            environment=os.environ,
            model_repository=Path(home),
            cache=Settings.from_environment(os.environ).cache,
            has_standard_ports=False,
        )
        with services.guarded():
            url = services.up(["redis"]).redis
            if url is None:
                msg = "the Valkey that was started has no address, expected one"
                raise SinkError(msg)
            return asyncio.run(_measure(url, quick=quick, tell=tell))


async def _measure(url: str, *, quick: bool, tell: Tell) -> list[Figure]:
    started_s = time.monotonic()
    async with Redis.from_url(url) as server, OnlineWriter(url, timeout_s=_PATIENCE_S) as writer:
        narrow, wide = (_Rig(view, url, server, writer) for view in (_SOURCE, _wide_view()))
        tell("memory of a key")
        for rig in (narrow, wide):
            await rig.measure_memory()
        async with AsyncOnlineStore(url, timeout_s=_PATIENCE_S) as store:
            with OnlineStore(url, timeout_s=_PATIENCE_S) as sync:
                reads = _Reads(store, sync, server, wide.view, wide.entities)
                n_rounds = _QUICK_ROUNDS if quick else _ROUNDS
                for number in range(n_rounds):
                    if quick and number and time.monotonic() - started_s > _QUICK_S:
                        break
                    tell(f"round {number + 1} of {n_rounds}")
                    for rig in (narrow, wide):
                        await rig.write_round()
                    await reads.round()
    tell("admission")
    return [*_written(narrow, "5"), *_written(wide, "50"), *_read(reads), *measure_admission(quick=quick)]


def _written(rig: _Rig, name: str) -> list[Figure]:
    guarded, hset, plain = rig.median("guarded"), rig.median("hset"), rig.median("set")
    return [
        Figure(
            name=f"online.write.{name}_features",
            value=1 / guarded,
            unit="rows/s",
            bar=100_000 if rig.view is _SOURCE else None,
            compared_with=f"online.hset.{name}_features",
            ratio=hset / guarded,
        ),
        Figure(
            name=f"online.write_by_hset.{name}_features",
            value=guarded / hset,
            unit="x the time",
            bar=1.5,
            is_lower_better=True,
            compared_with=f"online.hset.{name}_features",
            ratio=guarded / hset,
        ),
        Figure(
            name=f"online.write_again.{name}_features",
            value=1 / rig.median("repeated"),
            unit="rows/s",
            compared_with=f"online.write.{name}_features",
            ratio=guarded / rig.median("repeated"),
        ),
        *(
            Figure(name=f"online.write_{where}.{name}_features", value=rig.median(where) * 1e6, unit="us of cpu/row")
            for where in ("client", "server")
        ),
        Figure(name=f"online.hset.{name}_features", value=1 / hset, unit="rows/s"),
        Figure(name=f"online.set_of_packed.{name}_features", value=1 / plain, unit="rows/s"),
        Figure(
            name=f"online.memory.{name}_features",
            value=rig.memory["packed"],
            unit="bytes/key",
            compared_with=f"online.memory_of_hash.{name}_features",
            ratio=rig.memory["packed"] / rig.memory["hash"],
        ),
        Figure(name=f"online.memory_of_hash.{name}_features", value=rig.memory["hash"], unit="bytes/key"),
    ]


def _read(reads: _Reads) -> list[Figure]:
    figures = [Figure(name="online.get_1.p50", value=reads.quantile("get", 0.5), unit="ms")]
    for name, bar in (("read_1", 3.0), ("read_1_sync", 3.0), ("read_100", None)):
        for quantile in (0.5, 0.99):
            value = reads.quantile(name, quantile)
            figures.append(
                Figure(
                    name=f"online.{name}.p{quantile * 100:.0f}",
                    value=value,
                    unit="ms",
                    bar=bar if quantile > 0.5 else None,
                    is_lower_better=True,
                    compared_with="online.get_1.p50",
                    ratio=value / figures[0].value,
                )
            )
    trips = Figure(
        name="online.read_100.round_trips", value=reads.round_trips, unit="a read", bar=1, is_lower_better=True
    )
    return [*figures, trips]


def _refuse_unless(is_right: bool, what: str) -> None:
    if not is_right:
        msg = f"online: {what}; its times count for nothing"
        raise SinkError(msg)
