"""What would have to change for the topics on a broker to be as the application wants them, and doing it.

A change that could cost records or tear the rows of a key apart is refused, not made: fewer partitions (Kafka has no
such thing), more of them where there are records (keys would move to other partitions, away from their state), a
shorter retention, and a cleanup policy that deletes or compacts what was kept. On a topic that never held a record
nothing can be lost, and all of it is made. Whoever means such a change makes it with Kafka's own tools.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from jobs.reach import reach_kafka
from jobs.topic_reader import end_offsets
from jobs.topics import CONNECT_TIMEOUT_S, TIMEOUT_S, Topic, create_topics, expected_partitions, make_admin
from schemas.errors import ConfigError, ServiceError

_POLL_S: Final = 0.05
_AT_LEAST: Final = frozenset({"max.message.bytes"})
"""Settings of which more is as good."""


class Action(StrEnum):
    """What becomes of a topic."""

    CREATE = "create"
    CHANGE = "change"
    KEEP = "keep"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class TopicChange:
    """One topic as it is, and as it is to be.

    Attributes:
        topic: What the application wants.
        partitions: How many partitions it is to have.
        partitions_now: How many it has; None where there is no such topic.
        config: Settings that are to change, each with its value now (None: there is none) and the one wanted.
        refusals: Why it cannot be changed, each with what to do; empty where it can.
    """

    topic: Topic
    partitions: int
    partitions_now: int | None = None
    config: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    refusals: Sequence[str] = ()

    @property
    def action(self) -> Action:
        """What becomes of it."""
        if self.refusals:
            return Action.REFUSE
        if self.partitions_now is None:
            return Action.CREATE
        return Action.CHANGE if self.config or self.partitions != self.partitions_now else Action.KEEP


def compare_topics(brokers: str, topics: Sequence[Topic], *, partitions: int) -> list[TopicChange]:
    """Look at what is on the broker, and say what would change.

    Args:
        brokers: Kafka bootstrap servers.
        topics: What :func:`jobs.topics.application_topics` made.
        partitions: Partition count of new raw topics that say no other.

    Raises:
        ServiceError: The broker cannot be reached, or does not describe its topics.
    """
    reach_kafka(brokers, patience_s=0.0)
    admin = make_admin(brokers)
    try:
        metadata = admin.list_topics(timeout=CONNECT_TIMEOUT_S)
        there = [topic.name for topic in topics if topic.name in metadata.topics]
        configs = _describe(admin, there)
    except KafkaException as exc:
        msg = (
            f"Kafka at {brokers} does not describe its topics: {exc.args[0].str()}; expected a broker that lets us "
            "(operations Describe and DescribeConfigs): `headrace services up` starts one, HEADRACE_KAFKA names one"
        )
        raise ServiceError(msg) from exc
    counts = {name: len(found.partitions) for name, found in metadata.topics.items()}
    changes = []
    for topic in topics:
        wanted = expected_partitions(topic, counts, partitions=partitions)
        now = counts.get(topic.name)
        if now is not None and not (topic.is_exact if topic.like else topic.partitions is not None):
            wanted = now
        counts[topic.name] = wanted
        replicas = len(metadata.brokers)
        differing: dict[str, tuple[str | None, str]] = {key: (None, value) for key, value in topic.config.items()}
        refusals: list[str] = []
        if now is not None:
            found = metadata.topics[topic.name].partitions
            replicas = min((len(partition.replicas) for partition in found.values()), default=replicas)
            differing = _differing(configs[topic.name], topic.config)
            if (lost := _losses(topic, now=now, wanted=wanted, config=differing)) and _has_held_records(brokers, topic):
                refusals += lost
            elif wanted < now:
                refusals.append(_fewer(topic, now=now, wanted=wanted))
        if (needed := int(topic.config.get("min.insync.replicas", 1))) > replicas:
            refusals.append(
                f"min.insync.replicas {needed} where there are {replicas} replicas, expected at most as many: nothing "
                "could be written; take a smaller number, or give the topic more replicas"
            )
        change = TopicChange(
            topic=topic, partitions=wanted, partitions_now=now, config=differing, refusals=tuple(refusals)
        )
        changes.append(change)
    return changes


def apply_changes(brokers: str, changes: Sequence[TopicChange]) -> None:
    """Make changes: all of them, or none where one is refused.

    Raises:
        ConfigError: One is refused; nothing was done.
        ServiceError: The broker refuses; what it had done by then stays, and the next run does the rest.
    """
    check_refusals(changes)
    admin = make_admin(brokers)
    by_action = {action: [change for change in changes if change.action is action] for action in Action}
    missing = [NewTopic(c.topic.name, c.partitions, -1, config=c.topic.config) for c in by_action[Action.CREATE]]
    changed = by_action[Action.CHANGE]
    grown = [NewPartitions(c.topic.name, c.partitions) for c in changed if c.partitions != c.partitions_now]
    altered = [_alteration(change) for change in changed if change.config]
    try:
        create_topics(admin, missing)
        futures = [*(admin.create_partitions(grown, operation_timeout=TIMEOUT_S) if grown else {}).values()]
        futures += (admin.incremental_alter_configs(altered) if altered else {}).values()
        for future in futures:
            future.result(TIMEOUT_S)
        _wait_until_told(brokers, admin, changes)
    except KafkaException as exc:
        msg = (
            f"Kafka at {brokers} does not change topics: {exc.args[0].str()}; expected a broker that lets us "
            "(operations Create, Alter and AlterConfigs); `headrace topics plan` tells what is left to do"
        )
        raise ServiceError(msg) from exc


def _wait_until_told(brokers: str, admin: AdminClient, changes: Sequence[TopicChange]) -> None:
    """Wait until the brokers, which hear of a change a moment after it was made, tell it."""
    deadline_s = time.monotonic() + TIMEOUT_S
    waiting = [change for change in changes if change.action is not Action.KEEP]
    while waiting:
        found = admin.list_topics(timeout=CONNECT_TIMEOUT_S).topics
        there = [change for change in waiting if change.topic.name in found]
        configs = _describe(admin, [change.topic.name for change in there])
        told = [
            change.topic.name
            for change in there
            if len(found[change.topic.name].partitions) >= change.partitions
            and not _differing(configs[change.topic.name], change.topic.config)
        ]
        waiting = [change for change in waiting if change.topic.name not in told]
        if waiting and time.monotonic() > deadline_s:
            names = ", ".join(change.topic.name for change in waiting)
            msg = (
                f"Kafka at {brokers} has taken the changes, and does not tell those of {names} within {TIMEOUT_S:.0f} "
                "s; `headrace topics plan` tells whether they have come by now"
            )
            raise ServiceError(msg)
        if waiting:
            time.sleep(_POLL_S)


def check_refusals(changes: Sequence[TopicChange]) -> None:
    """Make sure that no change is refused.

    Raises:
        ConfigError: One is, with all the reasons.
    """
    refused = [f"topic {change.topic.name}: {why}" for change in changes for why in change.refusals]
    if refused:
        msg = f"{len(refused)} change{'s are' if len(refused) > 1 else ' is'} refused, nothing was done: "
        raise ConfigError(msg + "; ".join(refused))


def _describe(admin: AdminClient, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    described = admin.describe_configs(resources, request_timeout=TIMEOUT_S) if resources else {}
    return {resource.name: future.result(TIMEOUT_S) for resource, future in described.items()}


def _differing(now: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
    differing = {}
    for key, value in wanted.items():
        found = None if key not in now else now[key].value
        is_enough = key in _AT_LEAST and found is not None and int(found) >= int(value)
        if not is_enough and _words(found) != _words(value):
            differing[key] = (found, value)
    return differing


def _words(value: str | None) -> frozenset[str] | None:
    # `compact,delete` and `delete,compact` are one policy.
    return None if value is None else frozenset(part.strip() for part in value.split(","))


def _losses(topic: Topic, *, now: int, wanted: int, config: Mapping[str, tuple[str | None, str]]) -> list[str]:
    """Say what would be lost of a topic that has held records."""
    losses = []
    if wanted > now:
        because = _because(topic)
        losses.append(
            f"{now} partitions, expected {wanted} {because}: more would move keys to other partitions, away from "
            "their records and state; delete it, if it can be made again, or take a topic of another name"
        )
    if wanted < now:
        losses.append(_fewer(topic, now=now, wanted=wanted))
    for key, (found, value) in config.items():
        if key == "retention.ms" and found is not None and _is_shorter(int(value), than=int(found)):
            losses.append(
                f"retention.ms {found}, expected {value}: a shorter one would delete records; alter it with Kafka's "
                "kafka-configs if they may go, or say the longer one in TOPICS"
            )
        if key == "cleanup.policy" and (added := (_words(value) or frozenset()) - (_words(found) or frozenset())):
            losses.append(
                f"cleanup.policy {found}, expected {value}: to {' and '.join(sorted(added))} would remove records that "
                "are kept; alter it with Kafka's kafka-configs if they may go, or delete the topic"
            )
    return losses


def _because(topic: Topic) -> str:
    if topic.is_single:
        return "for all workers"
    return f"as {topic.like[0]} has" if topic.like else "as TOPICS says"


def _fewer(topic: Topic, *, now: int, wanted: int) -> str:
    because = _because(topic)
    return f"{now} partitions, expected {wanted} {because}: Kafka takes none away; delete it, or correct the number"


def _is_shorter(retention_ms: int, *, than: int) -> bool:
    return retention_ms >= 0 and (than < 0 or retention_ms < than)


def _has_held_records(brokers: str, topic: Topic) -> bool:
    return any(end_offsets(brokers, topic.name).values())


def _alteration(change: TopicChange) -> ConfigResource:
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, (_, value) in change.config.items()
    ]
    return ConfigResource(ResourceType.TOPIC, change.topic.name, incremental_configs=entries)
