"""A replay's namespace: topics, workers of the live path, a store of rows; and nothing of it at the end.

All of it is called by the namespace, whose name no one else has. So what a replay has left that was killed is found by
the directory that it made first and removed last: the next replay clears it up.
"""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from infra.local.port import choose_ports
from jobs.application import Application, consumer_groups, load_application
from jobs.consumer_group import committed_offsets, is_caught_up
from jobs.namespace import module_text, name_in
from jobs.role import Role
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from jobs.topic_reader import end_offsets
from jobs.topics import TIMEOUT_S, application_topics, ensure_topics, make_admin
from schemas.errors import ServiceError
from schemas.view import FeatureView
from streams.sinks.online import OnlineWriter
from streams.transport.epoch import MAX_RECORD_BYTES

ROLES: Final = (Role.FEATURES, Role.OFFLINE, Role.ONLINE)
"""In the order in which they run dry."""
_POLL_S: Final = 0.2
_GROUP_PATIENCE_S: Final = 60.0
"""A worker that was killed is a member of its group until the broker has missed it."""


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Where a replay runs.

    Attributes:
        name: Its name.
        directory: Its files: the module of its application, logs, its store of rows.
        brokers: Kafka bootstrap servers.
        redis_url: The online store.
    """

    name: str
    directory: Path
    brokers: str
    redis_url: str

    @property
    def delta(self) -> str:
        """Root of its store of rows."""
        return str(self.directory / "delta")

    def begin(
        self, application: Application, views: list[FeatureView], *, partitions: Mapping[str, int]
    ) -> Application:
        """Make its directory and its topics.

        Args:
            application: The application.
            views: Views of it that are replayed.
            partitions: By topic (in the namespace) of raw events, how many partitions it gets.

        Returns:
            The application in the namespace.
        """
        self.directory.mkdir(parents=True)
        module = self.directory / f"{self.name}.py"
        module.write_text(module_text(self.name, module=application.module, names=[view.name for view in views]))
        made = load_application(str(module))
        # The timestamps of the originals, whatever the broker does by itself.
        config = {"message.timestamp.type": "CreateTime", "max.message.bytes": str(MAX_RECORD_BYTES)}
        topics = [
            replace(topic, partitions=partitions[topic.name], config={**topic.config, **config})
            if topic.is_raw
            else topic
            for topic in application_topics(made)
        ]
        ensure_topics(self.brokers, topics)
        return made

    def workers(self, made: Application, settings: Settings, environment: Mapping[str, str]) -> Supervisor:
        """Make the workers of its live path."""
        own = {
            "HEADRACE_APP": made.module,
            "HEADRACE_HOME": str(self.directory),
            "HEADRACE_KAFKA": self.brokers,
            "HEADRACE_REDIS": self.redis_url,
            "HEADRACE_DELTA": self.delta,
            "HEADRACE_DELTA_OPTIONS": "",
            "HEADRACE_LINEAGE": str(self.directory / "lineage" / "events.ndjson"),
            "HEADRACE_CACHE": str(settings.cache),
        }
        ports = choose_ports(dict.fromkeys(ROLES, 0))
        return Supervisor(
            self.directory, environment={**environment, **own}, ports={role: ports[role] for role in ROLES}
        )

    def run_dry(
        self, made: Application, workers: Supervisor, *, stop: threading.Event, say: Callable[[str], object]
    ) -> bool:
        """Wait until its workers have done all that is there; False where it was stopped before.

        Raises:
            ServiceError: A worker fails again and again, or the broker does not answer.
        """
        groups = consumer_groups(made)
        for role in ROLES:
            group, topics = groups[role]
            for topic in topics:
                while not self._is_done(group, topic):
                    if stop.wait(_POLL_S):
                        return False
                    for line in workers.check():
                        say(line)
        return True

    def _is_done(self, group: str, topic: str) -> bool:
        # Raw events are written in no transaction: behind the last one is the end.
        if topic.startswith(f"{self.name}."):
            committed = committed_offsets(self.brokers, group, topic)
            return all(committed.get(number, 0) >= end for number, end in end_offsets(self.brokers, topic).items())
        return is_caught_up(self.brokers, group, topic)

    def clear(self) -> None:
        """Leave nothing behind: topics, groups, online values, files; safe to repeat.

        Raises:
            ServiceError: The broker does not answer, or a worker that was killed is still a member of its group.
            SinkError: The online store does not let its values be deleted.
        """
        admin = make_admin(self.brokers)
        topics = self._topics(admin)
        try:
            self._delete_groups(admin)
            for future in admin.delete_topics(topics, operation_timeout=TIMEOUT_S).values() if topics else ():
                _unless(future.result, KafkaError.UNKNOWN_TOPIC_OR_PART)
        except KafkaException as exc:
            msg = (
                f"Kafka at {self.brokers} does not delete what replay {self.name} made: {exc.args[0].str()}; the next "
                "replay tries again"
            )
            raise ServiceError(msg) from exc
        # Last of the services: where Redis refuses, its values alone are left, and the directory that tells of them.
        asyncio.run(self._forget())
        shutil.rmtree(self.directory, ignore_errors=True)

    def _topics(self, admin: AdminClient) -> list[str]:
        try:
            found = admin.list_topics(timeout=TIMEOUT_S).topics
        except KafkaException as exc:
            msg = f"Kafka at {self.brokers} does not list its topics: {exc.args[0].str()}; the next replay clears up"
            raise ServiceError(msg) from exc
        return sorted(name for name in found if self.name in name)

    def _delete_groups(self, admin: AdminClient) -> None:
        listed = admin.list_consumer_groups(request_timeout=TIMEOUT_S).result(TIMEOUT_S)
        names = [group.group_id for group in listed.valid if group.group_id.startswith(f"headrace.{self.name}.")]
        deadline_s = time.monotonic() + _GROUP_PATIENCE_S
        while names:
            left = []
            for name, future in admin.delete_consumer_groups(names, request_timeout=TIMEOUT_S).items():
                try:
                    _unless(future.result, KafkaError.GROUP_ID_NOT_FOUND)
                except KafkaException as exc:
                    if exc.args[0].code() != KafkaError.NON_EMPTY_GROUP or time.monotonic() > deadline_s:
                        raise
                    left.append(name)
            names = left
            if names:
                time.sleep(_POLL_S)

    async def _forget(self) -> None:
        async with OnlineWriter(self.redis_url, timeout_s=10.0) as writer:
            await writer.forget(name_in(self.name, "*"))


def _unless(call: Callable[[], object], code: int) -> None:
    """Call, and take one error for success."""
    try:
        call()
    except KafkaException as exc:
        if exc.args[0].code() != code:
            raise


def left_behind(root: Path, *, brokers: str, redis_url: str) -> list[Namespace]:
    """List what replays have left that were killed."""
    return [
        Namespace(name=found.name, directory=found, brokers=brokers, redis_url=redis_url)
        for found in sorted(root.glob("replay_*"))
        if found.is_dir()
    ]
