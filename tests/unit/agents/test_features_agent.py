import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from schemas.aggregation import count
from streams.agents import features as features_module
from streams.agents.features import FeaturesWorker, _Progress
from streams.observability.metrics import Metrics
from streams.pipeline import PartitionPipeline
from tests.support.feature_rows import T0_US, make_view
from tests.support.transport import make_batch

VIEW = make_view("counts", features={"n": count().over("1m")})
TOPIC = VIEW.sources[0].topic


class FakeEpoch:
    """An epoch that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[tuple[str, list[bytes | None], list[dict[str, Any]]]] = []

    def begin(self) -> int:
        return 1

    async def write_rows(
        self, topic: str, *, partition: int, keys: Sequence[bytes | None], values: Sequence[bytes]
    ) -> None:
        assert partition == 0
        self.written.append((topic, list(keys), [json.loads(value) for value in values]))


@pytest.fixture
async def worker() -> FeaturesWorker:
    worker = FeaturesWorker(
        [VIEW],
        application="shop",
        brokers="127.0.0.1:1",
        worker_id="w",
        metrics=Metrics(CollectorRegistry()),
        lineage=SimpleNamespace(batch_done=lambda *_, **__: None),  # type: ignore[arg-type]  # a fake
    )
    worker._epoch = FakeEpoch()  # type: ignore[assignment]  # a fake
    worker._pipelines[TOPIC, 0] = PartitionPipeline(VIEW.sources[0], [VIEW], partition=0)
    worker._progress[TOPIC, 0] = _Progress(next_offset=0, rejected_to=0, changelogs={})
    return worker


async def test_rows_of_a_tick_are_written_in_parts_and_in_order(
    worker: FeaturesWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_module, "_ROWS_AT_ONCE", 2)
    users = ["a", "b", "c", "d", "e"]
    times_ms = [*(T0_US // 1_000 for _ in users), T0_US // 1_000 + 3_600_000]
    values = [
        json.dumps({"user_id": user, "event_time": time_ms}).encode()
        for user, time_ms in zip([*users, "a"], times_ms, strict=True)
    ]
    batch = make_batch(values, topic=TOPIC, broker_time_us=T0_US + 3_600_000_000)
    worker._options.arriving(batch)  # type: ignore[misc]  # it is set
    await worker._process(batch)
    written = worker._epoch.written  # type: ignore[attr-defined]  # of the fake
    assert {topic for topic, _, _ in written} == {VIEW.topic}
    assert [len(keys) for _, keys, _ in written[:-1]] == [2] * (len(written) - 1)
    rows = [row for _, _, part in written for row in part]
    assert [row["user_id"].encode() for row in rows] == [key for _, keys, _ in written for key in keys]
    closed = [(row["user_id"], row["n"]) for row in rows if row["pane"] == "ON_TIME"]
    assert closed == [(user, 1) for user in users]
    assert worker._progress[TOPIC, 0].next_offset == len(values)
