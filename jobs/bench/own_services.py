"""Services of a benchmark's own, and the job's events on their Kafka."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Final

import pyarrow as pa
from confluent_kafka import Producer

from jobs.bench.job import EventStream, to_json
from jobs.settings import Settings
from schemas.errors import ServiceError

_TICK_S: Final = 0.005
NOT_PASSED_ON: Final = (
    "HEADRACE_APP",
    "HEADRACE_DELTA",
    "HEADRACE_KAFKA",
    "HEADRACE_LINEAGE",
    "HEADRACE_MODEL_REPOSITORY",
    "HEADRACE_REDIS",
    "HEADRACE_TRITON",
)


@contextmanager
def own_services(names: Sequence[str]) -> Iterator[Settings]:
    """Run services in a home of their own, which goes when the block is left; gives the settings that lead to them."""
    with TemporaryDirectory(prefix="headrace-bench-") as home:
        kept = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        own = {"HEADRACE_HOME": home, "HEADRACE_MODEL_REPOSITORY": f"{home}/model_repository"}
        settings = Settings.from_environment(kept | own)
        settings.model_repository.mkdir()
        services = settings.local_services()
        with services.guarded():
            services.up(names)
            yield settings


def event_producer(brokers: str, *, linger_ms: int = 20) -> Producer:
    """Make a producer that puts all events of a user on one partition."""
    return Producer(
        {
            "bootstrap.servers": brokers,
            "partitioner": "murmur2_random",
            "linger.ms": linger_ms,
            "batch.size": 2**20,
            "queue.buffering.max.messages": 1_000_000,
        }
    )


def send(producer: Producer, topic: str, events: pa.Table) -> None:
    """Hand events of the job to the producer.

    Raises:
        ServiceError: It does not take them all.
    """
    rows = zip(events["user_id"].to_pylist(), to_json(events).splitlines(), strict=True)
    messages = [{"key": user.encode(), "value": value} for user, value in rows]
    if producer.produce_batch(topic, messages) != len(messages):
        msg = f"Kafka's client did not take all {len(messages)} events of a batch, expected room for them"
        raise ServiceError(msg)


def paced(stream: EventStream, *, seconds: float) -> Iterator[pa.Table]:
    """Give the stream's events when they are due, by the clock and the rate of the stream."""
    began_s, first = time.monotonic(), stream.n_rows
    while (passed_s := time.monotonic() - began_s) < seconds:
        if n_due := int(passed_s * stream.events_per_s) - (stream.n_rows - first):
            yield stream.batch(n_due)
        time.sleep(_TICK_S)
