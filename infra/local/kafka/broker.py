"""Apache Kafka for laptops and tests: one node in KRaft mode, broker and controller in one process."""

import base64
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

from infra.local.health import check_kafka
from infra.local.kafka.jar import ensure_jars, kafka_version
from infra.local.kafka.java import Java, find_java
from infra.local.port import LOOPBACK
from infra.local.service import Launch, Notify
from schemas.errors import ServiceError

_LOG_DIRECTORY: Final = "log"
_FOREVER_MS: Final = 2**63 - 1
_JVM_FLAGS: Final = ("-Xms128m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_LOG_FLAGS: Final = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
)


class KafkaService:
    """A broker that keeps its log in ``<home>/kafka`` and takes records of any age."""

    name: ClassVar[str] = "kafka"
    title: ClassVar[str] = "Kafka"
    standard_ports: ClassVar[Mapping[str, int]] = {"broker": 9092, "controller": 9093}
    start_timeout_s: ClassVar[float] = 120.0
    grace_s: ClassVar[float] = 30.0

    def __init__(
        self,
        home: Path,
        *,
        environment: Mapping[str, str],
        cache: Path,
        notify: Notify,
        jvm_flags: tuple[str, ...] = (),
    ) -> None:
        self._directory = home / "kafka"
        self._environment = environment
        self._cache = cache
        self._notify = notify
        self._jvm_flags = jvm_flags

    @property
    def fingerprint(self) -> str:
        """The further flags of Java."""
        return " ".join(self._jvm_flags)

    def prepare(self, ports: Mapping[str, int]) -> Launch:
        """Fetch the jars, write the configuration, format the storage; see :class:`infra.local.service.Service`."""
        java = find_java(self._environment)
        jars = ensure_jars(self._cache, environment=self._environment, notify=self._notify)
        self._directory.mkdir(parents=True, exist_ok=True)
        configuration = self._directory / "server.properties"
        configuration.write_text(
            "".join(f"{key}={value}\n" for key, value in self._configuration(ports).items()), encoding="utf-8"
        )
        program = (str(java.program), *_JVM_FLAGS, *self._jvm_flags, *_LOG_FLAGS, "-cp", f"{jars}/*")
        if not (self._directory / _LOG_DIRECTORY / "meta.properties").exists():
            self._format(program, configuration.name)
        return Launch(
            argv=(*program, "kafka.Kafka", configuration.name),
            environment=self._environment,
            cwd=self._directory,
            address=f"{LOOPBACK}:{ports['broker']}",
            version=_version(java),
        )

    def check(self, address: str, *, timeout_s: float) -> str:
        """See :func:`infra.local.health.check_kafka`."""
        return check_kafka(address, timeout_s=timeout_s)

    def clean(self) -> None:
        """Nothing is left outside the home directory."""

    def _configuration(self, ports: Mapping[str, int]) -> dict[str, object]:
        broker, controller = f"{LOOPBACK}:{ports['broker']}", f"{LOOPBACK}:{ports['controller']}"
        listeners = f"PLAINTEXT://{broker},CONTROLLER://{controller}"
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.bootstrap.servers": controller,
            "controller.listener.names": "CONTROLLER",
            "listeners": listeners,
            "advertised.listeners": listeners,
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            # Relative to the working directory: in a path of any name, a comma would part two directories.
            "log.dirs": _LOG_DIRECTORY,
            "auto.create.topics.enable": "false",
            "num.partitions": 1,
            "default.replication.factor": 1,
            "min.insync.replicas": 1,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 8,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 8,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "share.coordinator.state.topic.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            # A broker that comes back after kill -9 is let in again only when its former session has run out.
            "broker.session.timeout.ms": 4_000,
            "broker.heartbeat.interval.ms": 1_000,
            # Records carry the times at which things happened, however long ago: none is refused, none expires.
            "log.message.timestamp.before.max.ms": _FOREVER_MS,
            "log.message.timestamp.after.max.ms": _FOREVER_MS,
            "log.retention.ms": -1,
            "log.retention.bytes": -1,
            "log.roll.hours": 24 * 3_650,
            # The default buffer of the log cleaner, 128 MiB, does not fit into this heap.
            "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        }

    def _format(self, program: tuple[str, ...], configuration: str) -> None:
        command = (*program, "kafka.tools.StorageTool", "format", "--standalone", "--ignore-formatted")
        try:
            subprocess.run(
                [*command, "-t", _cluster_id(), "-c", configuration],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
                env=dict(self._environment),
                cwd=self._directory,
            )
        except subprocess.CalledProcessError as exc:
            lines = [
                line for line in (exc.stdout + exc.stderr).splitlines() if line.strip() and not line.startswith("\t")
            ]
            msg = (
                f"Kafka could not format its storage in {self._directory}, exit code {exc.returncode}:\n"
                + "\n".join(f"    {line[:300]}" for line in lines[-10:])
                + f"\nCheck that there is room and that one may write there, or delete {self._directory} to start empty"
            )
            raise ServiceError(msg) from exc
        except (OSError, subprocess.TimeoutExpired) as exc:
            msg = f"Kafka could not format its storage in {self._directory}: {exc}; try again on a machine less busy"
            raise ServiceError(msg) from exc


def _cluster_id() -> str:
    """Make a cluster id as Kafka does: a random UUID in URL-safe base64, not starting with a dash (an option would)."""
    while True:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not cluster_id.startswith("-"):
            return cluster_id


def _version(java: Java) -> str:
    return f"Apache Kafka {kafka_version()} (Java {java.version})"
