"""An engine restored from changes and buckets, taken at any rows, goes on as one that was never stopped."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from schemas.time import MINUS_INFINITY_US
from schemas.view import FeatureView
from streams.windowing import N_BUCKETS, StepResult, WatermarkMarker, WindowEngine, read_header
from tests.property.test_engine_equals_oracle import (
    calendar_logs,
    calendar_views,
    is_same_bytes,
    logs,
    session_views,
    views,
)
from tests.support.builders import Row, make_batch

SECOND_US = 1_000_000
ACTIONS = st.sampled_from(["changes", "changes", "some buckets", "all buckets", "nothing", "crash", "crash", "marker"])


@dataclass
class Changelog:
    """What the features role keeps: the newest of each bucket, and the changes that some bucket still needs."""

    buckets: dict[int, bytes] = field(default_factory=dict)
    changes: list[bytes] = field(default_factory=list)

    def write(self, engine: WindowEngine, buckets: list[int]) -> None:
        self.changes.append(engine.changes())
        self.buckets |= {bucket: engine.bucket(bucket) for bucket in buckets}
        if len(self.buckets) == N_BUCKETS:
            oldest = min(read_header(blob).number for blob in self.buckets.values())
            self.changes = [blob for blob in self.changes if read_header(blob).number > oldest]

    @property
    def parts(self) -> list[bytes]:
        return [*self.changes[::-1], *self.buckets.values()]


@dataclass
class Step:
    rows: list[Row]
    marker_us: int | None = None

    def run(self, engine: WindowEngine, view: FeatureView) -> StepResult:
        if self.marker_us is not None:
            return engine.advance(WatermarkMarker(after_offset=engine.last_offset, watermark_us=self.marker_us))
        return engine.step(make_batch(view, self.rows), processing_time_us=0)


def check_parts(view: FeatureView, rows: list[Row], actions: list[tuple[int, str]]) -> None:
    engine, log = WindowEngine(view), Changelog()
    steps: list[Step] = []
    results: list[StepResult] = []
    n_kept, start = 0, 0

    def take(step: Step) -> None:
        steps.append(step)
        results.append(step.run(engine, view))

    for number, (size, action) in enumerate([*actions, (len(rows), "nothing")]):
        take(Step(rows[start : start + size]))
        start += size
        if action == "marker" and engine.last_offset is not None and engine.watermark_us > MINUS_INFINITY_US:
            take(Step([], marker_us=engine.watermark_us + 40 * SECOND_US))
        if action == "crash":
            engine = WindowEngine.restore_parts(view, log.parts)
            for step, result in zip(steps[n_kept:], results[n_kept:], strict=True):
                assert_same(step.run(engine, view), result)
        elif action not in {"nothing", "marker"}:
            chosen = range(number % 3, N_BUCKETS, 3) if action == "some buckets" else range(N_BUCKETS)
            log.write(engine, [] if action == "changes" else list(chosen))
            n_kept = len(steps)
    never_stopped = WindowEngine(view)
    for step, result in zip(steps, results, strict=True):
        assert_same(step.run(never_stopped, view), result)
    assert_same(engine.close(), never_stopped.close())
    assert engine.last_offset == never_stopped.last_offset


def assert_same(got: StepResult, expected: StepResult) -> None:
    assert is_same_bytes(got.rows, expected.rows)
    assert is_same_bytes(got.dead_letters, expected.dead_letters)
    assert (got.watermark_us, got.counts) == (expected.watermark_us, expected.counts)


@settings(max_examples=150, deadline=None)
@given(view=views(), rows=logs(), actions=st.lists(st.tuples(st.integers(0, 8), ACTIONS), min_size=1, max_size=10))
def test_a_sliding_view_goes_on_from_any_parts(
    view: FeatureView, rows: list[Row], actions: list[tuple[int, str]]
) -> None:
    check_parts(view, rows, actions)


@settings(max_examples=100, deadline=None)
@given(
    view=session_views(), rows=logs(), actions=st.lists(st.tuples(st.integers(0, 8), ACTIONS), min_size=1, max_size=10)
)
def test_a_session_view_goes_on_from_any_parts(
    view: FeatureView, rows: list[Row], actions: list[tuple[int, str]]
) -> None:
    check_parts(view, rows, actions)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    view=calendar_views(),
    actions=st.lists(st.tuples(st.integers(0, 8), ACTIONS), min_size=1, max_size=10),
)
def test_a_view_in_a_time_zone_goes_on_from_any_parts(
    data: st.DataObject, view: FeatureView, actions: list[tuple[int, str]]
) -> None:
    check_parts(view, data.draw(calendar_logs(view.time_zone or "")), actions)
