"""``headrace bench engine``: the event-time engine alone, columns in and columns out, on one core.

Every figure is of processor time, so that what else the machine does shows as little as can be. Rounds of all
configurations are interleaved with rounds of the ceiling on the same events; a figure is the median of its rounds.
State is full before a round counts: each user has had an event in each minute of the window. Windows close once a
minute for all users, which at 250,000 events a second is one closing pane in 750 events of 20,000 users: rounds hold
none, and closing panes have a figure of their own.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil
import pyarrow as pa

from jobs.bench.ceiling import decode, group
from jobs.bench.figure import Figure
from jobs.bench.job import KEYS, OUT_OF_ORDERNESS_MS, EventStream, make_view, to_json
from jobs.bench.kind import make_rigs
from jobs.bench.state import measure_floor, measure_state
from jobs.bench.witness import Witness
from streams.windowing import StepResult, WindowEngine

_BATCH_ROWS: Final = 20_000
_ROUND_BATCHES: Final = 5
_FILL_ROWS: Final = 100_000
_WITNESSED: Final = 40
_FEWEST_ROUNDS: Final = 3
_QUICK_S: Final = 28.0
"""When a quick run begins no more rounds: what comes after them takes a few seconds more."""
_MANY: Final = 1_000_000
_KEY_COUNTS: Final = (10_000, 100_000, _MANY)
_NAMES: Final = {10_000: "10k", 100_000: "100k", _MANY: "1m"}

Tell = Callable[[str], None]


@dataclass
class Rig:
    """An engine with its stream of events, and the times it took."""

    n_keys: int
    emit: str
    events_per_s: list[float] = field(default_factory=list)
    rows_per_event: float = 0.0

    def __post_init__(self) -> None:
        self.stream = EventStream(self.n_keys)
        self.engine = WindowEngine(make_view(self.emit))
        users = self.stream.users[:: max(1, self.n_keys // _WITNESSED)].to_pylist()
        self._witness = Witness(
            users,
            out_of_orderness_us=OUT_OF_ORDERNESS_MS * 1_000,
            as_of="last_in_batch" if self.emit == "latest" else "all",
        )

    def fill(self) -> None:
        """Give each user an event in each minute of the window."""
        for batch in self.stream.fill(_FILL_ROWS):
            self._step(batch)

    def round(self) -> list[pa.Table]:
        """Time one round; returns its events."""
        batches = [self.stream.batch(_BATCH_ROWS) for _ in range(_ROUND_BATCHES)]
        steps = [self._step(batch) for batch in batches]
        self.events_per_s.append(_BATCH_ROWS * _ROUND_BATCHES / sum(taken_s for taken_s, _ in steps))
        self.rows_per_event = sum(result.rows.num_rows for _, result in steps) / (_BATCH_ROWS * _ROUND_BATCHES)
        return batches

    def close_windows(self) -> float:
        """Let the watermark pass the end of a window of all users.

        Returns:
            Closing panes a second, by what the batch that closes them takes beyond the others.
        """
        self.stream.time_ms += OUT_OF_ORDERNESS_MS + 1_000
        usual_s = _BATCH_ROWS / statistics.median(self.events_per_s)
        taken_s, result = self._step(self.stream.batch(_BATCH_ROWS))
        return (result.counts.on_time + result.counts.empty) / max(taken_s - usual_s, 1e-9)

    def change_some(self) -> None:
        """Give events of one key in a hundred, or a little less."""
        self._step(self.stream.batch(max(1, self.n_keys // 100)))

    def check(self) -> int:
        """Compare what the engine made of some users with what polars makes of them."""
        return self._witness.check()

    def _step(self, batch: pa.Table) -> tuple[float, StepResult]:
        started_s = time.process_time()
        result = self.engine.step(batch, processing_time_us=0)
        taken_s = time.process_time() - started_s
        self._witness.see(batch, result.rows)
        return taken_s, result


def run(*, quick: bool, tell: Tell) -> list[Figure]:
    """Measure the engine.

    Args:
        quick: Fewer rounds, and a million keys in one emit mode, neither closing nor restored.
        tell: Takes a line of progress.

    Raises:
        WindowingError: The engine's rows are wrong.
    """
    started_s = time.monotonic()
    floor_s = measure_floor(_KEY_COUNTS[0], _MANY)
    tell(f"filling {_MANY:,} keys")
    many, state = _fill_many(is_restored=not quick)
    rigs = [*(Rig(n_keys, "latest") for n_keys in (KEYS, *_KEY_COUNTS) if n_keys != _MANY), many]
    rigs += [Rig(n_keys, "every_event") for n_keys in (KEYS, *_KEY_COUNTS) if n_keys != _MANY or not quick]
    for rig in rigs:
        if rig is many:
            continue
        tell(f"filling {rig.n_keys:,} keys, {rig.emit}")
        rig.fill()
    kinds, ceiling = make_rigs(), list[float]()
    n_rounds = 5 if quick else 11
    for number in range(n_rounds):
        if quick and number >= _FEWEST_ROUNDS and time.monotonic() - started_s > _QUICK_S:
            break
        tell(f"round {number + 1} of {n_rounds}")
        for rig in rigs:
            batches = rig.round()
            if rig.n_keys == KEYS and rig.emit == "latest":
                ceiling.append(_ceiling([to_json(batch) for batch in batches]))
        for kind in kinds:
            kind.round()
    closing = [rig for rig in rigs if rig.emit == "latest" and (rig.n_keys != _MANY or not quick)]
    panes_per_s = {rig.n_keys: rig.close_windows() for rig in closing}
    checked = sum(rig.check() for rig in rigs) + sum(kind.check() for kind in kinds)
    tell(f"{checked:,} rows of output are what polars computes")
    usual = statistics.median(ceiling)
    return [*_speeds(rigs, usual, panes_per_s, floor_s), *(kind.figure(usual) for kind in kinds), *state]


def _ceiling(payloads: Sequence[bytes]) -> float:
    started_s = time.process_time()
    for payload in payloads:
        group(decode(payload))
    return _BATCH_ROWS * len(payloads) / (time.process_time() - started_s)


def _speeds(
    rigs: Sequence[Rig], ceiling: float, panes_per_s: dict[int, float], floor_s: dict[int, float]
) -> list[Figure]:
    speeds = {(rig.n_keys, rig.emit): statistics.median(rig.events_per_s) for rig in rigs}
    n_out = {(rig.n_keys, rig.emit): rig.rows_per_event for rig in rigs}
    figures = [Figure(name="engine.ceiling", value=ceiling, unit="events/s")]

    def add(name: str, speed: float, *, bar: float | None = None) -> None:
        ratio = speed / ceiling
        figures.append(
            Figure(name=name, value=speed, unit="events/s", bar=bar, compared_with="engine.ceiling", ratio=ratio)
        )

    for emit, bar in (("latest", 1_000_000), ("every_event", 400_000)):
        add(f"engine.{emit}", speeds[KEYS, emit], bar=bar)
        counts = [n_keys for n_keys in _KEY_COUNTS if (n_keys, emit) in speeds]
        for n_keys in counts:
            add(f"engine.{emit}.keys_{_NAMES[n_keys]}", speeds[n_keys, emit])
            name = f"engine.{emit}.rows_out.keys_{_NAMES[n_keys]}"
            figures.append(Figure(name=name, value=n_out[n_keys, emit], unit="rows/event"))
        few, many = counts[0], counts[-1]
        growth = speeds[few, emit] / speeds[many, emit]
        grown = {f"engine.{emit}.growth_to_{_NAMES[many]}": growth}
        if many in floor_s:
            above = growth - (floor_s[many] - floor_s[few]) * speeds[few, emit]
            grown[f"engine.{emit}.growth_above_floor_to_{_NAMES[many]}"] = above
        if emit == "latest":
            alike_s = _cost_at(n_out[many, emit], few, speeds, n_out)
            grown[f"engine.{emit}.growth_at_equal_rows_to_{_NAMES[many]}"] = 1 / (speeds[many, emit] * alike_s)
        for name, value in grown.items():
            figures.append(
                Figure(
                    name=name,
                    value=value,
                    unit="x the cost",
                    bar=1.2,
                    is_lower_better=True,
                    compared_with=f"engine.{emit}.keys_{_NAMES[few]}",
                    ratio=value,
                )
            )
    for n_keys, taken_s in floor_s.items():
        figures.append(Figure(name=f"engine.floor.keys_{_NAMES[n_keys]}", value=taken_s * 1e9, unit="ns/event"))
    for n_keys, speed in panes_per_s.items():
        name = "engine.closing_panes" + (f".keys_{_NAMES[n_keys]}" if n_keys in _NAMES else "")
        figures.append(Figure(name=name, value=speed, unit="panes/s"))
    return figures


def _cost_at(
    rows_per_event: float, n_keys: int, speeds: dict[tuple[int, str], float], n_out: dict[tuple[int, str], float]
) -> float:
    """Seconds that an event of so many keys would take with so many rows of output: on the line of both emit modes.

    A batch of events of many keys makes more as-of rows of ``latest`` than one of few, for fewer events share a key.
    """
    costs = {emit: 1 / speeds[n_keys, emit] for emit in ("latest", "every_event")}
    share = (rows_per_event - n_out[n_keys, "latest"]) / (n_out[n_keys, "every_event"] - n_out[n_keys, "latest"])
    return costs["latest"] + share * (costs["every_event"] - costs["latest"])


def _fill_many(*, is_restored: bool) -> tuple[Rig, list[Figure]]:
    """Fill an engine with a million keys and see what its state takes."""
    before_bytes = _resident_bytes()
    rig = Rig(_MANY, "latest")
    rig.fill()
    resident = (_resident_bytes() - before_bytes) / _MANY
    name = f"keys_{_NAMES[_MANY]}"
    memory = Figure(name=f"engine.memory.{name}", value=resident, unit="bytes/key", bar=1_000, is_lower_better=True)
    if not is_restored:
        return rig, [memory]
    return rig, [memory, *measure_state(rig.engine, rig.change_some, n_keys=_MANY, name=name)]


def _resident_bytes() -> int:
    gc.collect()
    pa.default_memory_pool().release_unused()
    resident: int = psutil.Process().memory_info().rss
    return resident
