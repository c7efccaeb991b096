"""A naive second opinion on event-time features: one row at a time, plain dicts and lists, no engine code.

Written from the semantics in the design, not from the engine. It keeps every admitted row for ever and recomputes each
feature from its rows whenever one is asked for, so it is slow, has no state to expire and nothing to merge.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

from schemas.aggregation import Feature
from schemas.view import FeatureView

Row = dict[str, Any]
Predicates = Mapping[str, Callable[[Row], bool]]

MINUS_INFINITY = -math.inf
LAST_MOMENT = 253_402_300_799_999_999
UNITS = {"ns": 0.001, "us": 1, "ms": 1_000, "s": 1_000_000}


@dataclass
class Session:
    rows: list[Row]
    start: int
    end: int
    fired: int = 0
    sums: dict[str, Any] = field(default_factory=dict)


@dataclass
class Output:
    rows: list[Row] = field(default_factory=list)
    dead_letters: list[Row] = field(default_factory=list)
    admitted: int = 0
    partially_late: int = 0
    without_as_of: int = 0


class Oracle:
    """Runs one view over one partition; as-of rows are always those of ``every_event``."""

    def __init__(
        self,
        view: FeatureView,
        *,
        predicates: Predicates | None = None,
        derivations: Mapping[str, Callable[[Row], Any]] | None = None,
        partition: int = 0,
    ) -> None:
        self.view = view
        self.derivations = derivations or {}
        self.source = view.sources[0]
        self.predicates = predicates or {}
        self.prefix = f"{view.input.topic}-{partition}-"
        self.key = view.entity.key
        self.features = view.definitions
        self.watermark: float = MINUS_INFINITY
        self.last_offset: int | None = None
        self.admitted: list[Row] = []
        self.panes: dict[tuple[Any, int], list[Row]] = defaultdict(list)
        self.fired: Counter[tuple[Any, int]] = Counter()
        self.changed: set[tuple[Any, int]] = set()
        self.sessions: dict[Any, list[Session]] = defaultdict(list)
        self.history: dict[Any, list[Row]] = defaultdict(list)
        self.output = Output()
        sizes = [f.size_us for f in self.features.values() if f.size_us is not None]
        self.has_windows = bool(sizes) or view.gap_us is not None
        if view.slide_us is not None:
            self.longest = max(sizes, default=view.slide_us)
            self.tile = math.gcd(view.slide_us, *sizes)
        self.local_ends: list[int] = []

    # Rows in

    def run(self, rows: list[Row], *, close: bool = False) -> Output:
        for row in rows:
            self.step(row)
        if close:
            self.move_watermark(math.inf, maker=None)
        return self.output

    def step(self, row: Row) -> None:
        self.last_offset = row["_offset"]
        before = self.watermark
        reason, late_by = self.reject(row, before)
        if reason is not None:
            self.output.dead_letters.append({"_offset": row["_offset"], "reason": reason, "late_by_us": late_by})
            return
        self.output.admitted += 1
        row = row | {"_t": self.event_time(row), "_before": before}
        self.admitted.append(row)
        key = row[self.key]
        if self.history[key] and self.is_forgotten(key, before):
            self.history[key] = []
        self.history[key].append(row)
        if self.view.gap_us is None:
            self.add_to_windows(row)
        else:
            self.add_to_session(row)
        self.move_watermark(max(before, row["_t"] - self.source.max_out_of_orderness_us), maker=row)
        if self.view.emit != "on_close":
            self.as_of(row)

    def reject(self, row: Row, before: float) -> tuple[str | None, int | None]:
        value = row[self.source.event_time]
        unit = self.source.event_time_unit_us
        if value is not None and unit is None and parse_text(value) is None:
            return "schema_violation", None
        if row[self.key] is None:
            return "missing_key", None
        if value is None:
            return "missing_event_time", None
        low, high = self.source.plausible_from_us, self.source.plausible_until_us
        time = self.event_time(row)
        if not low <= time < high:
            if unit is not None and any(low <= value * other < high for other in UNITS.values()):
                return "timestamp_unit", None
            return "implausible_time", None
        skew, broker = self.source.max_future_skew_us, row["_broker_time"]
        if skew is not None and broker is not None and time > broker + skew:
            return "future_timestamp", None
        if self.is_duplicate(row, time, before):
            return "duplicate", None
        if self.is_late(row[self.key], time, before) or self.is_untellable(row, time, before):
            return "late", int(before) - time
        if self.overflows(row | {"_t": time, "_before": before}, before):
            return "overflow", None
        return None, None

    def event_time(self, row: Row) -> int:
        value, unit = row[self.source.event_time], self.source.event_time_unit_us
        if unit is not None:
            return int(value * unit)
        parsed = parse_text(value)
        assert parsed is not None
        return parsed

    def is_duplicate(self, row: Row, time: int, before: float) -> bool:
        window = self.source.dedup_window_us
        if window is None or row[self.source.event_id] is None:
            return False
        longest = self.view.gap_us or (self.longest + (self.view.slide_us or 0))
        if self.view.time_zone is not None:
            longest += 24 * 3_600_000_000
        memory = window + longest + self.view.allowed_lateness_us
        if self.view.gap_us is not None:
            memory += window
        return any(
            other[self.source.event_id] == row[self.source.event_id]
            and abs(other["_t"] - time) < window
            and before < other["_t"] + memory
            for other in self.admitted
        )

    def is_untellable(self, row: Row, time: int, before: float) -> bool:
        """Whether an open session would take in a row that may be a copy of one which is no longer remembered."""
        window, gap = self.source.dedup_window_us, self.view.gap_us
        if window is None or gap is None or row[self.source.event_id] is None:
            return False
        return time + window + gap + self.view.allowed_lateness_us <= before

    def is_late(self, key: Any, time: int, before: float) -> bool:
        if self.view.gap_us is None:
            return all(self.is_expired(end, before) for end in self.ends(time))
        return not self.overlapping(key, time, before) and self.is_expired(time + self.view.gap_us, before)

    def is_expired(self, end: int, watermark: float) -> bool:
        return end + self.view.allowed_lateness_us <= watermark

    def ends(self, time: int) -> list[int]:
        """Ends of all windows that contain the time, ascending."""
        slide, align = self.view.slide_us, self.view.align_to_us
        assert slide is not None
        if self.view.time_zone is not None:
            self.know_local_ends(time)
            after = bisect_right(self.local_ends, time)
            return self.local_ends[after : after + self.longest // slide]
        end = (time - align) // slide * slide + slide + align
        ends = []
        while end - self.longest <= time:
            ends.append(end)
            end += slide
        return ends

    def know_local_ends(self, time: int) -> None:
        """Let the zone's clock run, minute by minute, over all days around a time.

        A window ends whenever the clock comes to, or jumps over, a multiple of the slide for the first time, and when
        it shows one again a slide or more after the end before.
        """
        slide, reach = self.view.slide_us, self.longest + 3 * 86_400_000_000
        assert slide is not None
        assert self.view.time_zone is not None
        known = self.local_ends
        if known and known[0] <= time - reach and time + reach <= known[-1]:
            return
        low, high = min([time, *known]) - 2 * reach, max([time, *known]) + 2 * reach
        zone, epoch = ZoneInfo(self.view.time_zone), datetime(1970, 1, 1)  # noqa: DTZ001 - what a clock shows
        anchor = 0
        if self.view.align_to is not None:
            shown = datetime.fromisoformat(self.view.align_to).astimezone(zone).replace(tzinfo=None)
            anchor = (shown - epoch) // timedelta(microseconds=1)
        found: list[int] = []
        farthest = None
        for minute in range(low // 60_000_000, high // 60_000_000):
            now = minute * 60_000_000
            shown = datetime.fromtimestamp(minute * 60, tz=zone).replace(tzinfo=None)
            period, into = divmod((shown - epoch) // timedelta(microseconds=1) - anchor, slide)
            if farthest is not None and (period > farthest or (into == 0 and found and now - found[-1] >= slide)):
                found.append(now)
            farthest = period if farthest is None else max(period, farthest)
        self.local_ends = found

    def start_of(self, end: int, feature: Feature) -> int:
        """Start of a feature's window that ends then."""
        size, slide = feature.size_us, self.view.slide_us
        assert size is not None
        assert slide is not None
        if self.view.time_zone is None:
            return end - size
        self.know_local_ends(end)
        return self.local_ends[self.local_ends.index(end) - size // slide]

    def end_after(self, end: int) -> int:
        """The window end that follows one."""
        assert self.view.slide_us is not None
        return end + self.view.slide_us if self.view.time_zone is None else self.ends(end)[0]

    def overflows(self, row: Row, before: float) -> bool:
        key = row[self.key]
        for name, feature in self.features.items():
            if feature.function != "sum" or self.view.feature_schema.field(name).type != "int64":
                continue
            parts = [] if self.view.gap_us is None else self.overlapping(key, row["_t"], before)
            if not self.counts(row, feature) and len(parts) < 2:
                continue
            groups = []
            if feature.lifetime or feature.last is not None:
                alive = [] if self.is_forgotten(key, before) else self.history[key]
                groups.append(self.chosen([*alive, row], feature))
            elif self.view.gap_us is not None:
                groups.append([*(r for part in parts for r in part.rows), row])
            else:
                starts = {
                    end: self.start_of(end, feature) for end in self.ends(row["_t"]) if not self.is_expired(end, before)
                }
                groups += [
                    [r for r in [*self.panes.get((key, end), []), row] if r["_t"] >= start]
                    for end, start in starts.items()
                    if start <= row["_t"]
                ]
            for group in groups:
                total = sum(r[feature.column] for r in group if self.has_value(r, feature))
                if not -(2**63) <= total < 2**63:
                    return True
        return False

    # Windows

    def add_to_windows(self, row: Row) -> None:
        before, ends = row["_before"], self.ends(row["_t"])
        open_ends = [end for end in ends if not self.is_expired(end, before)]
        self.output.partially_late += len(open_ends) < len(ends)
        if not self.has_windows:
            return
        for end in open_ends:
            self.panes[row[self.key], end].append(row)
            if end <= before:
                self.changed.add((row[self.key], end))

    def add_to_session(self, row: Row) -> None:
        key, gap, before = row[self.key], self.view.gap_us, row["_before"]
        assert gap is not None
        parts = self.overlapping(key, row["_t"], before)
        merged = Session(rows=[], start=row["_t"], end=row["_t"] + gap)
        for part in parts:
            merged.rows += part.rows
            merged.start, merged.end = min(merged.start, part.start), max(merged.end, part.end)
            for name, total in part.sums.items():
                merged.sums[name] = total if merged.sums.get(name) is None else merged.sums[name] + total
            self.sessions[key].remove(part)
        merged.rows = sorted([*merged.rows, row], key=lambda r: r["_offset"])
        for name, feature in self.features.items():
            is_summed = feature.function in {"sum", "mean", "rate"} and feature.column is not None
            if feature.is_windowed and is_summed and self.has_value(row, feature):
                start = 0 if feature.function == "sum" else 0.0
                merged.sums[name] = merged.sums.get(name, start) + row[feature.column]
        self.sessions[key].append(merged)
        fired = [part for part in parts if part.fired]
        retracted = [part for part in fired if (part.start, part.end) != (merged.start, merged.end)]
        for part in sorted(retracted, key=lambda s: s.end):
            self.emit(row, key, "EMPTY", part.end, start=part.start, index=part.fired, session=Session([], 0, 0))
            part.fired += 1
        merged.fired = max((part.fired for part in fired), default=0)
        if fired or merged.end <= before:
            self.emit(row, key, "LATE", merged.end, start=merged.start, index=merged.fired, session=merged)
            merged.fired += 1

    def overlapping(self, key: Any, time: int, before: float) -> list[Session]:
        gap = self.view.gap_us
        assert gap is not None
        alive = [s for s in self.sessions[key] if not self.is_expired(s.end, before)]
        return sorted((s for s in alive if s.start < time + gap and time < s.end), key=lambda s: s.start)

    def move_watermark(self, after: float, *, maker: Row | None) -> None:
        before, self.watermark = self.watermark, after
        if not self.has_windows or after == before:
            return
        if self.view.gap_us is not None:
            due = [(s.end, k, s) for k, ss in self.sessions.items() for s in ss if before < s.end <= after]
            for end, key, session in sorted(due, key=lambda item: item[:2]):
                self.emit(maker, key, "ON_TIME", end, start=session.start, index=session.fired, session=session)
                session.fired += 1
            return
        if math.isfinite(before) and math.isfinite(after) and self.ends(int(before))[0] == self.ends(int(after))[0]:
            return
        fires: list[tuple[int, Any, str]] = [(end, key, "LATE") for key, end in self.changed]
        self.changed.clear()
        for key, end in list(self.panes):
            if before < end <= after:
                fires.append((end, key, "ON_TIME"))
            following = (key, self.end_after(end))
            if following[1] <= after and following not in self.panes and not self.fired[following]:
                fires.append((following[1], key, "EMPTY"))
        for end, key, pane in sorted(fires):
            self.emit(maker, key, pane, end, index=self.fired[key, end])
            self.fired[key, end] += 1

    def as_of(self, row: Row) -> None:
        key = row[self.key]
        if self.view.gap_us is not None:
            (session,) = [s for s in self.sessions[key] if row in s.rows]
            self.emit(row, key, "EARLY", session.end, start=session.start, index=session.fired, session=session)
            return
        end = self.ends(row["_t"])[0]
        if self.is_expired(end, row["_before"]):
            self.output.without_as_of += 1
            return
        self.emit(row, key, "EARLY", end, index=self.fired[key, end])

    # Rows out

    def watermark_at(self, maker: Row | None) -> float:
        """Watermark after a row, or after a step without one."""
        return max(self.watermark, maker["_t"] - self.source.max_out_of_orderness_us) if maker else self.watermark

    def emit(
        self,
        maker: Row | None,
        key: Any,
        pane: str,
        end: int,
        *,
        index: int,
        start: int | None = None,
        session: Session | None = None,
    ) -> None:
        watermark = self.watermark_at(maker)
        made_by = maker or {"_offset": self.last_offset, "_broker_time": None, "_request_id": None}
        at = made_by["_t"] if pane == "EARLY" else end
        out: Row = {self.key: key}
        for name, feature in self.features.items():
            if feature.function == "derived":
                out[name] = self.derivations[dict(feature.parameters)["expression"]](out)
            elif feature.function == "from_event":
                assert feature.column is not None
                out[name] = made_by[feature.column] if pane == "EARLY" else None
            elif not feature.is_windowed:
                alive = [] if self.is_forgotten(key, at) else self.history[key]
                out[name] = self.evaluate(
                    feature, self.chosen(alive, feature), order="time" if feature.last else "offset", at=at
                )
            elif session is not None:
                assert start is not None
                out[name] = self.evaluate_session(name, feature, session, at=at, span=end - start)
            else:
                opened = self.start_of(end, feature)
                inside = [r for r in self.panes.get((key, end), []) if opened <= r["_t"]]
                out[name] = self.evaluate(feature, inside, order="tile", at=at, span=end - opened)
            out[name] = finite(out[name])
        out |= {
            "event_time": at,
            "window_end": end,
            "pane": pane,
            "pane_index": index,
            "is_final": self.is_expired(end, watermark),
            "watermark": None if watermark == MINUS_INFINITY else min(watermark, LAST_MOMENT),
            "source_offset": made_by["_offset"],
            "broker_time": made_by["_broker_time"],
            "request_id": made_by["_request_id"] or f"{self.prefix}{made_by['_offset']}",
        }
        if start is not None:
            out["window_start"] = start
        self.output.rows.append(out)

    def is_forgotten(self, key: Any, watermark: float) -> bool:
        rows = self.history[key]
        return not rows or max(r["_t"] for r in rows) + self.view.state_ttl_us <= watermark

    def counts(self, row: Row, feature: Feature) -> bool:
        return feature.where is None or self.predicates[feature.where](row)

    def has_value(self, row: Row, feature: Feature) -> bool:
        if not self.counts(row, feature):
            return False
        if feature.column is None:
            return True
        value = row[feature.column]
        return value is not None and not (isinstance(value, float) and math.isnan(value))

    def chosen(self, rows: list[Row], feature: Feature) -> list[Row]:
        """Rows that a last-N or lifetime feature runs over."""
        if feature.last is None:
            return rows
        passing = sorted((r for r in rows if self.counts(r, feature)), key=lambda r: (r["_t"], r["_offset"]))
        return passing[-feature.last :]

    def evaluate_session(self, name: str, feature: Feature, session: Session, *, at: int, span: int) -> Any:
        if name in session.sums and any(self.has_value(r, feature) for r in session.rows):
            n_values = sum(self.has_value(r, feature) for r in session.rows)
            divisor = {"mean": n_values, "rate": span / 1_000_000, "sum": None}[feature.function]
            return session.sums[name] if divisor is None else session.sums[name] / divisor
        return self.evaluate(feature, session.rows, order="offset", at=at, span=span)

    def evaluate(self, feature: Feature, rows: list[Row], *, order: str, at: int, span: int = 0) -> Any:
        """Value of a feature over rows.

        Floats are added in ``order``; ``at`` is the event time of the row of output, ``span`` the length of the window.
        """
        rows = sorted((r for r in rows if self.has_value(r, feature)), key=lambda r: (r["_t"], r["_offset"]))
        if feature.function == "count":
            return len(rows)
        if feature.function == "rate" and feature.column is None:
            return len(rows) / (span / 1_000_000)
        if feature.function == "time_since_last":
            return max(0, at - max(r["_t"] for r in rows)) if rows else None
        assert feature.column is not None
        values = [r[feature.column] for r in rows]
        if feature.function in {"distinct", "approx_distinct"}:  # the sketch is exact while values are few
            return len(set(values))
        if not values:
            return None
        mean = 0.0
        if feature.function in {"variance", "stddev"}:
            if not all(map(math.isfinite, values)):
                return math.nan
            mean = math.fsum(values) / len(values)
        match feature.function:
            case "sum":
                return self.total(feature.column, rows, order=order)
            case "mean":
                return self.total(feature.column, rows, order=order, start=0.0) / len(values)
            case "rate":
                return self.total(feature.column, rows, order=order, start=0.0) / (span / 1_000_000)
            case "decayed_sum":
                half_life = dict(feature.parameters)["half_life_us"]
                until = max(at, *(r["_t"] for r in rows))
                ages = [(until - r["_t"]) / half_life for r in rows]
                return sum(v * max(0.5**age, 2.0**-1022) for v, age in zip(values, ages, strict=True))
            case "top_k":
                counts = Counter(values)
                return sorted(counts, key=lambda v: (-counts[v], v))[: dict(feature.parameters)["k"]]
            case "quantile":
                share = Fraction(str(dict(feature.parameters)["q"]))
                return nine_bits(sorted(values)[max(1, math.ceil(share * len(values))) - 1])
            case "min":
                return min(values)
            case "max":
                return max(values)
            case "variance":
                return math.fsum((v - mean) ** 2 for v in values) / len(values)
            case "stddev":
                return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
            case "first":
                return values[0]
            case "last":
                return values[-1]
            case "last_n":
                return values
            case "entropy":
                shares = [n / len(values) for n in Counter(values).values()]
                return -sum(p * math.log2(p) for p in shares)
        raise AssertionError(feature.function)

    def total(self, column: str, rows: list[Row], *, order: str, start: float = 0) -> Any:
        """Add up from ``start``: the rows of a tile in offset order, then the tiles in time order."""
        tiles: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            tile = 0
            if order == "tile" and self.view.time_zone is not None:
                tile = self.ends(row["_t"])[0]
            elif order == "tile":
                tile = (row["_t"] - self.view.align_to_us) // self.tile
            tiles[tile].append(row)
        total: Any = start
        for _, members in sorted(tiles.items()):
            part: Any = start
            for row in members if order == "time" else sorted(members, key=lambda r: r["_offset"]):
                part += row[column]
            total += part
        return total


def finite(value: Any) -> Any:
    """What stands in a row of output: no NaN and no infinity, not in a list either."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nine_bits(value: float) -> float:
    """The nearest number that nine binary digits can write, halves away from zero."""
    if not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.copysign(math.ldexp(math.floor(abs(mantissa) * 512 + 0.5), exponent - 9), value)


def parse_text(text: str) -> int | None:
    """Microseconds of an RFC 3339 date-time, None when it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
