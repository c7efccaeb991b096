"""What other settings of bounded out-of-orderness would have done with a recorded log: rows lost, and time waited.

A smaller one closes windows sooner and makes more rows late; a larger one keeps the rows and lets every reader wait.
For each setting the engine itself runs over the log, with the view's windows and lateness and a count in place of its
features. Where windows are the same for all keys, all rows go under one key: what is late, and when a window closes,
depends on times alone.

*Staleness* of a row is by how much the closing of its window trails the window's end: the clock at the row that closed
it (its broker time if it names one, else its event time), less the window end. Of the windows that hold the row the
newest counts, the first to end. Idle timeouts need a running clock and are not played.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from offline.computation import DecodedCut
from offline.event_file import EventFile
from schemas.aggregation import count
from schemas.errors import ConfigError
from schemas.row import Pane, Reason
from schemas.time import format_duration, parse_duration_us
from schemas.view import FeatureView
from streams.windowing.engine import WindowEngine
from streams.windowing.event_time import read_event_times

SETTINGS: Final = ("0s", "1s", "2s", "5s", "10s", "30s", "1m", "2m", "5m")
"""Settings that a report shows beside the view's own."""
_ROWS: Final = "rows"
_ROWS_OF_LONGEST: Final = "rows_of_longest"

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SettingReport:
    """What one setting does.

    Attributes:
        max_out_of_orderness: The setting.
        is_own: Whether it is the view's own.
        late: Rows that would be dead letters, reason ``late``.
        partially_late: Rows that would miss some of their windows.
        after_close: Rows that count in all of their windows or some, after the first of them had closed: each such pane
            fires again, ``LATE``.
        open: Rows whose window no row of the log closes.
        staleness_p50_us: Half of the rows whose window closed on them waited at most so long; None when there are none.
        staleness_p99_us: 99 of 100 did.
        staleness_max_us: All did.
    """

    max_out_of_orderness: str
    is_own: bool
    late: int
    partially_late: int
    after_close: int
    open: int
    staleness_p50_us: int | None
    staleness_p99_us: int | None
    staleness_max_us: int | None


@dataclass(frozen=True, kw_only=True)
class LatenessReport:
    """What a recorded log says of the settings of a view.

    Attributes:
        view: The view.
        rows: Rows that are no dead letter for any other reason than lateness, under the view's own setting; shares are
            of these.
        rejected: The other rows, by reason.
        clock: What staleness was measured by: ``broker_time``, ``event_time``, or ``mixed``.
        settings: By rising out-of-orderness.
    """

    view: FeatureView
    rows: int
    rejected: dict[str, int]
    clock: str
    settings: Sequence[SettingReport]


def report_lateness(
    view: FeatureView, path: Path, *, settings: Sequence[str] = SETTINGS, batch_rows: int = 50_000
) -> LatenessReport:
    """Run a log through every setting and the view's own.

    Raises:
        ConfigError: The view reads several sources.
        DecodeError: The file cannot be read, or a ``_partition``, ``_offset`` or ``_broker_time`` is none.
        SchemaMismatchError: The offsets of a partition do not rise.
    """
    if len(view.sources) > 1:
        topics = [source.topic for source in view.sources]
        msg = f"view {view.name} reads {topics}, expected one source: a report tries settings of it"
        raise ConfigError(msg)
    own = view.sources[0].max_out_of_orderness
    by_size = {parse_duration_us(text, field="max_out_of_orderness"): text for text in (*settings, own)}
    trials = [_Trial(view, text) for _, text in sorted(by_size.items())]
    undecoded, with_broker_time, rows = Counter[str](), 0, 0
    for cut in EventFile(path, view.sources).cuts(batch_rows):
        decoded = DecodedCut.of(cut, view.sources[0])
        undecoded.update(decoded.rejected["reason"].to_pylist())
        rows += decoded.events.num_rows
        with_broker_time += decoded.events.num_rows - decoded.events["_broker_time"].null_count
        for partition, events, _ in decoded.by_partition():
            clock_us = _clock_us(events, view)
            reduced = _reduced(events, view)
            for trial in trials:
                trial.step(partition, reduced, clock_us)
    reports = [trial.finish(is_own=trial.setting == own) for trial in trials]
    (rejected,) = (trial.rejected for trial in trials if trial.setting == own)
    others = Counter({reason: number for reason, number in rejected.items() if reason != Reason.LATE})
    clocks = {rows: "broker_time", 0: "event_time"}
    return LatenessReport(
        view=view,
        rows=rows - others.total(),
        rejected=dict(sorted((undecoded + others).items())),
        clock=clocks.get(with_broker_time, "mixed"),
        settings=reports,
    )


def _clock_us(events: pa.Table, view: FeatureView) -> Ints:
    """Broker time of each row, or else its event time; meaningless where it has neither."""
    source = view.sources[0]
    column = events[source.event_time].combine_chunks()
    plausible_us = (source.plausible_from_us, source.plausible_until_us)
    times = read_event_times(column, unit_us=source.event_time_unit_us, plausible_us=plausible_us)
    broker = events["_broker_time"].combine_chunks()
    clock_us: Ints = pc.coalesce(broker, pa.array(times.time_us)).to_numpy()
    return clock_us


def _reduced(events: pa.Table, view: FeatureView) -> pa.Table:
    """Give all rows one key where windows are the same for all keys; rows without one keep none."""
    if view.gap_us is not None:
        return events
    position = events.schema.get_field_index(view.entity.key)
    keys = events.column(position)
    one = pa.scalar("" if pa.types.is_string(keys.type) else 0, keys.type)
    return events.set_column(position, events.schema.field(position), pc.if_else(pc.is_valid(keys), one, keys))


def _reduced_view(view: FeatureView, setting: str) -> FeatureView:
    """The view with the same windows and lateness, and counts in place of its features."""
    # A source that is not keyed by the entity is judged partition by partition, as it is sent on.
    source = replace(view.sources[0], max_out_of_orderness=setting, key=None)
    features: dict[str, Any] = {_ROWS: count()}
    if view.slide is not None:
        sizes = [f.size_us for f in view.definitions.values() if f.size_us is not None]
        longest = format_duration(max(sizes)) if sizes else view.slide
        features = {_ROWS: count().over(view.slide), _ROWS_OF_LONGEST: count().over(longest)}
    return replace(view, source=source, emit="on_close", features=features)


@dataclass
class _Trial:
    """One setting on its way through a log."""

    view: FeatureView
    setting: str
    _: KW_ONLY
    rejected: Counter[str] = field(default_factory=Counter)
    _engines: dict[int, WindowEngine] = field(default_factory=dict)
    _admitted: int = 0
    _partially_late: int = 0
    _waits: list[tuple[Ints, Ints]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reduced = _reduced_view(self.view, self.setting)
        definitions = self.view.definitions.values()
        self._closes = self.view.gap_us is not None or any(feature.is_windowed for feature in definitions)

    def step(self, partition: int, events: pa.Table, clock_us: Ints) -> None:
        if partition not in self._engines:
            self._engines[partition] = WindowEngine(self._reduced, source_partition=partition)
        result = self._engines[partition].step(events, processing_time_us=0)
        self.rejected.update(result.dead_letters["reason"].to_pylist())
        self._admitted += result.counts.admitted
        self._partially_late += result.counts.partially_late
        closed = _closed(result.rows)
        if closed.num_rows:
            makers = np.searchsorted(events["_offset"].to_numpy(), closed["source_offset"].to_numpy())
            ends_us = closed["window_end"].cast(pa.int64()).to_numpy()
            self._waits.append((clock_us[makers] - ends_us, closed[_ROWS].to_numpy()))

    def finish(self, *, is_own: bool) -> SettingReport:
        waited_us, weights = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in self._columns())
        still_open = sum(int(_sum(_closed(engine.close().rows)[_ROWS])) for engine in self._engines.values())
        p50, p99, highest = _quantiles(waited_us, weights, (0.5, 0.99, 1.0)) if self._closes else (None, None, None)
        return SettingReport(
            max_out_of_orderness=self.setting,
            is_own=is_own,
            late=self.rejected[Reason.LATE],
            partially_late=self._partially_late,
            after_close=self._admitted - int(weights.sum()) - still_open if self._closes else 0,
            open=still_open if self._closes else 0,
            staleness_p50_us=p50,
            staleness_p99_us=p99,
            staleness_max_us=highest,
        )

    def _columns(self) -> Iterator[list[Ints]]:
        for position in (0, 1):
            yield [part[position] for part in self._waits]


def _closed(rows: pa.Table) -> pa.Table:
    # A session that a late row lengthens closes once more, then with the number of that firing.
    return rows.filter(pc.and_(pc.equal(rows["pane"], str(Pane.ON_TIME)), pc.equal(rows["pane_index"], 0)))


def _sum(column: pa.ChunkedArray) -> int:
    return pc.sum(column, min_count=0).as_py() or 0


def _quantiles(values: Ints, weights: Ints, shares: Sequence[float]) -> list[int | None]:
    """The smallest values that these shares of the weight do not exceed; None where there is no weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    if not len(order) or not reached[-1]:
        return [None] * len(shares)
    return [int(values[order][np.searchsorted(reached, share * reached[-1])]) for share in shares]
