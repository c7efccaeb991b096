"""A worker that copies a topic to another, partition by partition, in epochs: as small as a worker of Headrace can be.

Run as ``python -m tests.support.copier BROKERS SOURCE OUTPUT GROUP NAME``, until SIGTERM.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import faust
from prometheus_client import CollectorRegistry

from streams.agents.worker import consume, consumer_config, create_app, run
from streams.observability.health import Health
from streams.observability.metrics import Metrics
from streams.transport.epoch import Epoch
from streams.transport.options import ConsumerOptions, Partition


def make_copier(brokers: str, source: str, output: str, group: str, name: str, *, metrics: Metrics) -> faust.App:
    """Make the app of a copier."""
    options = ConsumerOptions(
        kafka={**consumer_config(group, brokers=brokers), "session.timeout.ms": 6_000}, max_held_bytes=200_000
    )
    app = create_app(group, brokers=brokers, options=options, metrics=metrics, commit_interval_s=0.05)
    epoch = Epoch(
        {"bootstrap.servers": brokers},
        transactional_id=f"{group}.{name}",
        group_metadata=lambda: app.consumer.poller.group_metadata,
    )

    async def copy(event: Any) -> None:
        batch = event.value
        await epoch.write_rows(output, partition=batch.partition, keys=batch.keys, values=batch.values)
        event.ack()

    async def commit(offsets: Mapping[Partition, int]) -> None:
        await epoch.commit(offsets)

    options.prepare, options.commit = epoch.start, commit
    consume(app, source, copy, lock=options.lock)
    return app


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    metrics = Metrics(CollectorRegistry())
    copier = make_copier(*sys.argv[1:], metrics=metrics)
    run(copier, role="copier", metrics=metrics, health=Health(), log_level="info")
