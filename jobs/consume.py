"""``headrace consume``: print what arrives on a topic."""

import asyncio
import json
import os
import sys
from typing import Annotated

import typer
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError

from jobs.reach import reach_kafka
from jobs.settings import Settings
from schemas.errors import ConfigError, ServiceError


def consume(
    topic: Annotated[
        str, typer.Argument(help="E.g. scores.late_arrival, features.airport_departures, dlq.flights.landed.")
    ],
    *,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Start at the first record, not the next.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many records.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for more at the end of the topic; Ctrl-C ends it.")] = True,
    headers: Annotated[bool, typer.Option("--headers", help="Print key and headers too, around the value.")] = False,
) -> None:
    """Print the committed records of a topic, one JSON object a line.

    Joins no consumer group and commits nothing: looking does not disturb anyone.
    """
    brokers = Settings.from_environment(os.environ).address("kafka")
    reach_kafka(brokers)
    try:
        asyncio.run(
            _print(
                topic,
                brokers=brokers,
                from_beginning=from_beginning,
                limit=limit,
                follow=follow,
                headers=headers,
            )
        )
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        sys.stderr.close()


async def _print(
    topic: str, *, brokers: str, from_beginning: bool, limit: int | None, follow: bool, headers: bool
) -> None:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=brokers.split(","),
        auto_offset_reset="earliest" if from_beginning else "latest",
        isolation_level="read_committed",
        enable_auto_commit=False,
    )
    try:
        await consumer.start()
    except KafkaConnectionError as exc:
        await consumer.stop()
        msg = f"no Kafka answers at {brokers}: {exc}; expected a reachable broker, see `headrace services status`"
        raise ServiceError(msg) from exc
    try:
        partitions = await _partitions(brokers, topic)
        consumer.assign(partitions)
        await _print_records(consumer, partitions, limit=limit, follow=follow, headers=headers)
    except KafkaError as exc:
        msg = f"reading {topic} failed: {exc}"
        raise ServiceError(msg) from exc
    finally:
        await consumer.stop()


async def _partitions(brokers: str, topic: str) -> list[TopicPartition]:
    admin = AIOKafkaAdminClient(bootstrap_servers=brokers.split(","))
    await admin.start()
    try:
        if topic not in (known := await admin.list_topics()):
            shown = sorted(name for name in known if not name.startswith("__"))
            known_ones = (
                f"expected one of {', '.join(shown)}" if shown else "and no other; `headrace topics apply` makes them"
            )
            msg = f"there is no topic {topic!r}, {known_ones}"
            raise ConfigError(msg)
        (described,) = await admin.describe_topics([topic])
    finally:
        await admin.close()
    return [TopicPartition(topic, found["partition"]) for found in described["partitions"]]


async def _print_records(
    consumer: AIOKafkaConsumer,
    partitions: list[TopicPartition],
    *,
    limit: int | None,
    follow: bool,
    headers: bool,
) -> None:
    ends = await consumer.end_offsets(partitions)
    printed = 0
    while follow or any([await consumer.position(tp) < ends[tp] for tp in partitions]):
        for records in (await consumer.getmany(timeout_ms=200)).values():
            for record in records:
                sys.stdout.write(_line(record, headers=headers) + "\n")
                printed += 1
                if printed == limit:
                    sys.stdout.flush()
                    return
        sys.stdout.flush()


def _line(record: ConsumerRecord, *, headers: bool) -> str:
    value = None if record.value is None else record.value.decode("utf-8", "replace")
    if not headers:
        return value if value is not None else "null"
    try:
        shown = None if value is None else json.loads(value)
    except ValueError:
        shown = value
    return json.dumps(
        {
            "partition": record.partition,
            "offset": record.offset,
            "timestamp_ms": record.timestamp,
            "key": None if record.key is None else record.key.decode("utf-8", "replace"),
            "headers": {name: (content or b"").decode("utf-8", "replace") for name, content in record.headers},
            "value": shown,
        },
        ensure_ascii=False,
    )
