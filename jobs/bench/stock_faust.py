"""The job as a stock Faust application does it: one agent, one windowed table, aiokafka. A peer in ``bench live``.

A program of its own: ``python -m jobs.bench.stock_faust BROKERS TOPIC EVENTS`` prints how many events a second it did,
from the first event to the last of ``EVENTS``, and ends. Its producer's buffer is larger than stock: at the usual 100
messages it waits for the broker with nearly every event.
"""

import math
import os
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import faust
from faust.transport.producer import ProducerBuffer

from jobs.bench.job import SIZE_MS, SLIDE_MS

_LAST: Final = 3
_BUFFERED_MESSAGES: Final = 100_000
Aggregate = tuple[int, float, float]


def merge(one: Aggregate, other: Aggregate) -> Aggregate:
    """Count, sum and largest of two parts."""
    return one[0] + other[0], one[1] + other[1], max(one[2], other[2])


def make_app(brokers: str, topic: str, *, n_partitions: int, n_events: int) -> faust.App:
    """Make the application; the process ends after ``n_events``."""
    app = faust.App(
        f"stock-faust-{uuid4().hex[:8]}",
        broker=f"kafka://{brokers}",
        store="memory://",
        web_enabled=False,
        autodiscover=False,
        topic_disable_leader=True,
        topic_partitions=n_partitions,
    )
    aggregates = app.Table("aggregates", default=lambda: (0, 0.0, -math.inf)).hopping(
        SIZE_MS / 1_000, SLIDE_MS / 1_000, expires=timedelta(milliseconds=SIZE_MS)
    )
    by_time = aggregates.relative_to(lambda event: event.value["event_time"] / 1_000)
    categories = app.Table("categories", default=list)
    n_done, started_s = 0, 0.0

    async def compute(stream: Any) -> None:
        nonlocal n_done, started_s
        async for event in stream:
            started_s = started_s or time.perf_counter()
            user, amount = event["user_id"], event["amount"]
            by_time[user].apply(merge, (1, amount, amount))
            count, total, _ = by_time[user].value()
            last = categories[user] = [*categories[user], event["category"]][-_LAST:]
            shares = [seen / len(last) for seen in Counter(last).values()]
            _ = total / count, -sum(share * math.log2(share) for share in shares)
            n_done += 1
            if n_done == n_events:
                print(n_done / (time.perf_counter() - started_s), flush=True)
                os._exit(0)

    app.agent(app.topic(topic, value_type=None, value_serializer="json", key_serializer="raw"))(compute)
    return app


if __name__ == "__main__":
    ProducerBuffer.max_messages = _BUFFERED_MESSAGES
    brokers, topic, n_partitions, n_events = sys.argv[1:]
    application = make_app(brokers, topic, n_partitions=int(n_partitions), n_events=int(n_events))
    faust.Worker(application, loglevel="warning", redirect_stdouts=False).execute_from_commandline()
