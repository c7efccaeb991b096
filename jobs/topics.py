"""Topics that an application needs, made from its definitions."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from jobs.application import Application
from jobs.reach import reach_kafka
from schemas.errors import ConfigError, ServiceError
from schemas.model import ModelSpec
from schemas.topic import TopicSettings
from schemas.topology import connect
from schemas.view import FeatureView
from streams.state.changelog import state_topic
from streams.state.route_log import route_topic
from streams.transport.epoch import MAX_RECORD_BYTES

DEFAULT_PARTITIONS = 4
TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 6.0
_log = logging.getLogger(__name__)
# A dead letter is the raw record, which may be as large as a topic takes, and headers.
_LARGE_RECORDS = {"max.message.bytes": str(MAX_RECORD_BYTES)}
# Features are a function of the log, and events of a replay carry timestamps of years ago: a broker that deletes by the
# default of some days would delete them at once. Whoever wants less says so in TOPICS.
_KEPT_FOR_GOOD = {"retention.ms": "-1"}
# Compaction leaves the segment that is written to alone: small ones keep a topic of state near what it has to hold.
_COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "min.compaction.lag.ms": "60000",
    "delete.retention.ms": "60000",
    "segment.bytes": str(16 * 2**20),
    "segment.ms": "600000",
}


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One topic as the definitions want it.

    Attributes:
        name: Its name.
        like: Topics of which the one with the most partitions says how many it has; none of a topic of raw events.
        is_exact: Whether it must have as many; else only a new one is made so.
        partitions: How many a topic of raw events has to have; None for what is there, or the default.
        is_single: Whether it is one partition, whatever is asked for: what stands there is one for all workers.
        config: Topic configuration.
    """

    name: str
    like: tuple[str, ...] = ()
    is_exact: bool = True
    partitions: int | None = None
    is_single: bool = False
    config: dict[str, str] = field(default_factory=dict)

    @property
    def is_raw(self) -> bool:
        """Whether it takes raw events, whose partitions are the application's choice."""
        return not self.like and not self.is_single


def raw_topic(name: str) -> Topic:
    """Describe a topic of raw events."""
    return Topic(name=name, config=_KEPT_FOR_GOOD)


def redriven_topic(source: str) -> Topic:
    """Describe the topic that records which dead letters of a source have been sent again."""
    return Topic(name=f"redriven.{source}", like=(source,), is_exact=False, config={"cleanup.policy": "compact"})


def application_topics(application: Application) -> list[Topic]:
    """List the topics of an application, raw topics first, as its ``TOPICS`` wants them.

    Raises:
        ConfigError: ``TOPICS`` names a topic that there is not, or partitions of one that follows its source.
    """
    planned = plan_topics(list(application.views.values()), list(application.models.values()))
    return _with_settings(planned, application.topics, where=f"application {application.module!r}")


def _with_settings(topics: Sequence[Topic], settings: Mapping[str, TopicSettings], *, where: str) -> list[Topic]:
    by_name = {topic.name: topic for topic in topics}
    for pattern, wanted in settings.items():
        matching = [topic for name, topic in by_name.items() if fnmatchcase(name, pattern)]
        raw = [topic for topic in matching if topic.is_raw]
        if not matching or (wanted.partitions is not None and not raw):
            what = "no topic" if not matching else "topics whose number of partitions is given"
            expected = sorted(name for name, topic in by_name.items() if not matching or topic.is_raw)
            msg = f"{where}: {pattern!r} in TOPICS is {what}, expected one of {expected}, or a pattern such as 'dlq.*'"
            raise ConfigError(msg)
        for topic in matching:
            count = wanted.partitions if topic.is_raw and wanted.partitions is not None else topic.partitions
            by_name[topic.name] = replace(topic, partitions=count, config=topic.config | wanted.config)
    return list(by_name.values())


def plan_topics(views: Sequence[FeatureView], models: Sequence[ModelSpec]) -> list[Topic]:
    """List the topics of views and models, raw topics first."""
    topics: dict[str, Topic] = {}
    topology = connect(views)

    def add(name: str, *like: str, config: dict[str, str] = _LARGE_RECORDS, is_exact: bool = True) -> None:
        topics[name] = Topic(name=name, like=like, config=config, is_exact=is_exact)

    for topic in topology.sources:
        topics[topic] = raw_topic(topic)
    for topic, found in topology.inputs.items():
        sources = [source.topic for source in found.sources]
        add(topic, *sources, config=_LARGE_RECORDS | _KEPT_FOR_GOOD, is_exact=False)
        add(route_topic(found), *sources, config=_COMPACTED, is_exact=False)
    for source in topology.sources.values():
        add(source.dead_letter_topic, source.topic)
        topics[redriven_topic(source.topic).name] = redriven_topic(source.topic)
    for view in views:
        add(view.topic, view.input.topic)
        add(state_topic(view.name), view.input.topic, config=_COMPACTED)
    for model in models:
        trigger = f"features.{model.trigger.name}"
        add(model.topic, trigger)
        add(model.dead_letter_topic, trigger)
        rollout = model.rollout_topic
        topics[rollout] = Topic(name=rollout, partitions=1, is_single=True, config=_COMPACTED)
    return list(topics.values())


def ensure_topics(
    brokers: str,
    topics: Sequence[Topic],
    *,
    partitions: int = DEFAULT_PARTITIONS,
    replication: int = -1,
    patience_s: float = 0.0,
) -> list[str]:
    """Create the topics that are missing and check the partition counts of those that are there.

    Args:
        brokers: Kafka bootstrap servers.
        topics: What :func:`plan_topics` made.
        partitions: Partition count of new raw topics; all others take that of their source.
        replication: Replication factor of new topics, -1 for the broker's default.
        patience_s: How long to wait for a broker that is just starting.

    Returns:
        Names of the topics that were created.

    Raises:
        ConfigError: A topic has another partition count than its source.
        ServiceError: The broker cannot be reached or refuses.
    """
    reach_kafka(brokers, patience_s=patience_s)
    admin = make_admin(brokers)
    try:
        found = admin.list_topics(timeout=CONNECT_TIMEOUT_S).topics
        counts = {name: len(topic.partitions) for name, topic in found.items()}
        missing = []
        for topic in topics:
            expected = expected_partitions(topic, counts, partitions=partitions)
            if topic.name not in counts:
                counts[topic.name] = expected
                missing.append(NewTopic(topic.name, expected, replication, config=topic.config))
            elif topic.like and topic.is_exact and counts[topic.name] != expected:
                like = topic.like[0]
                msg = (
                    f"topic {topic.name} has {counts[topic.name]} partitions, expected {expected} as {like} has; "
                    f"delete {topic.name} (it is made again) or give {like} the same count"
                )
                raise ConfigError(msg)
            elif topic.is_single and counts[topic.name] != expected:
                msg = (
                    f"topic {topic.name} has {counts[topic.name]} partitions, expected 1: what stands there is one for "
                    "all workers; delete it, it is made again"
                )
                raise ConfigError(msg)
        create_topics(admin, missing)
    except KafkaException as exc:
        msg = (
            f"Kafka at {brokers} does not create topics: {exc.args[0].str()}; expected a broker that lets us: "
            "`headrace services up` starts one, HEADRACE_KAFKA or --brokers names one"
        )
        raise ServiceError(msg) from exc
    return [topic.topic for topic in missing]


def expected_partitions(topic: Topic, counts: Mapping[str, int], *, partitions: int) -> int:
    """Tell how many partitions a topic should have, by those that others have."""
    return max((counts[name] for name in topic.like), default=topic.partitions or partitions)


def create_topics(admin: AdminClient, missing: Sequence[NewTopic]) -> None:
    """Create topics; one that another process has just made is as good.

    Raises:
        KafkaException: The broker refuses.
    """
    for future in admin.create_topics(list(missing), operation_timeout=TIMEOUT_S).values() if missing else ():
        try:
            future.result()
        except KafkaException as exc:
            if exc.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise


def count_partitions(brokers: str, names: Sequence[str]) -> dict[str, int]:
    """Tell how many partitions each of these topics has; one that is not there is left out.

    Raises:
        ServiceError: The broker does not answer.
    """
    try:
        found = make_admin(brokers).list_topics(timeout=CONNECT_TIMEOUT_S).topics
    except KafkaException as exc:
        msg = f"Kafka at {brokers} does not list its topics: {exc.args[0].str()}; see `headrace services status`"
        raise ServiceError(msg) from exc
    return {name: len(found[name].partitions) for name in names if name in found}


def make_admin(brokers: str) -> AdminClient:
    """Make a client that administers topics; it connects when it is first used."""
    config: dict[str, str | int | float | bool] = {
        "bootstrap.servers": brokers,
        "client.id": "headrace-topics",
        "socket.timeout.ms": 10_000,
        "log_level": 3,
    }
    return AdminClient(config, logger=_log)
