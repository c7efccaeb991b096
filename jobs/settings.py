"""Every environment variable that Headrace reads, in one table: name, type, default and what it is for."""

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from infra.local.service import ServiceAddresses
from infra.local.services import LocalServices
from jobs.directory import see_writable
from jobs.role import Role
from jobs.setting_text import (
    read_brokers,
    read_delta_options,
    read_duration_s,
    read_event_rate,
    read_flag,
    read_host_and_port,
    read_http_port,
    read_path,
    read_port,
    read_pseudonym_key,
    read_redis_url,
    read_registry_url,
    read_words,
)
from schemas.errors import ConfigError
from schemas.event_rate import MAX_EVENT_RATE
from streams.transport.options import Delivery

if TYPE_CHECKING:  # both load pyarrow
    from schemas.view import FeatureView
    from streams.sinks.pseudonym import Pseudonyms


@dataclass(frozen=True)
class Variable:
    """One row of the table of environment variables.

    Attributes:
        name: Name of the variable.
        kind: What a value looks like, for people.
        default: The value of an absent or empty variable; ``{home}`` and ``{user_cache}`` stand for directories.
        doc: What it is for.
        read: Makes the setting of the text; raises ValueError when it is wrong.
    """

    name: str
    kind: str
    default: str
    doc: str
    read: Callable[[str], Any] = field(repr=False)


@dataclass(frozen=True)
class Settings:
    """The settings of one run; ``from_environment`` reads them."""

    home: Annotated[
        Path,
        Variable(
            "HEADRACE_HOME",
            kind="directory",
            default=".headrace",
            doc="Data, logs and state of the local services, and whatever else a run keeps.",
            read=read_path,
        ),
    ]
    kafka: Annotated[
        str | None,
        Variable(
            "HEADRACE_KAFKA",
            kind="host:port, several with commas between",
            default="",
            doc="Bootstrap servers of a Kafka to use; without it the local one.",
            read=read_brokers,
        ),
    ]
    redis: Annotated[
        str | None,
        Variable(
            "HEADRACE_REDIS",
            kind="redis://host:port/database",
            default="",
            doc="URL of a Redis, redis+cluster:// for a cluster, redis+sentinel:// for sentinels, rediss for TLS; "
            "without it the local one.",
            read=read_redis_url,
        ),
    ]
    triton: Annotated[
        str | None,
        Variable(
            "HEADRACE_TRITON",
            kind="host:port",
            default="",
            doc="gRPC endpoint of a Triton to use; without it the local one.",
            read=read_host_and_port,
        ),
    ]
    schema_registry: Annotated[
        str | None,
        Variable(
            "HEADRACE_SCHEMA_REGISTRY",
            kind="http://host:port or https://user:password@host:port",
            default="",
            doc="URL of a Confluent-compatible schema registry, for contracts with `x-framing`; ?ssl_ca_certs=FILE.",
            read=read_registry_url,
        ),
    ]
    use_triton_fallback: Annotated[
        bool,
        Variable(
            "HEADRACE_TRITON_FALLBACK",
            kind="0 or 1",
            default="0",
            doc="1 runs a small KServe v2 server on onnxruntime in place of the local Triton.",
            read=read_flag,
        ),
    ]
    model_repository: Annotated[
        Path,
        Variable(
            "HEADRACE_MODEL_REPOSITORY",
            kind="directory",
            default="model_repository",
            doc="The models that Triton serves.",
            read=read_path,
        ),
    ]
    model_store: Annotated[
        str | None,
        Variable(
            "HEADRACE_MODEL_STORE",
            kind="directory or URL",
            default="",
            doc="Where model files are kept by their hash: a directory, s3://, gs:// or abfss://; without it, beside "
            "their cards alone.",
            read=lambda text: text or None,
        ),
    ]
    delta: Annotated[
        str,
        Variable(
            "HEADRACE_DELTA",
            kind="directory or URL",
            default="{home}/delta",
            doc="Root of the offline store's Delta tables.",
            read=str,
        ),
    ]
    delta_options: Annotated[
        dict[str, str] | None,
        Variable(
            "HEADRACE_DELTA_OPTIONS",
            kind="JSON object of texts",
            default="",
            doc="Options of the offline store's object store, as delta-rs takes them (S3, Azure, GCS); what the "
            "environment has of them (AWS_…, AZURE_…, GOOGLE_…) need not be repeated.",
            read=read_delta_options,
        ),
    ] = field(repr=False)
    lineage: Annotated[
        Path,
        Variable(
            "HEADRACE_LINEAGE",
            kind="file",
            default="{home}/lineage/events.ndjson",
            doc="File that takes the OpenLineage events.",
            read=read_path,
        ),
    ]
    metrics_port: Annotated[
        int,
        Variable(
            "HEADRACE_METRICS_PORT",
            kind="port from 1 to 65531, or 0",
            default="9101",
            doc="Port of the Prometheus endpoint of the features role; online, offline, scoring, serve take the next "
            "ones. 0 takes any free ones.",
            read=read_port,
        ),
    ]
    application: Annotated[
        str,
        Variable(
            "HEADRACE_APP",
            kind="name of a Python module",
            default="jobs.flights",
            doc="Module that defines VIEWS and MODELS.",
            read=str,
        ),
    ]
    metrics_address: Annotated[
        str,
        Variable(
            "HEADRACE_METRICS_ADDRESS",
            kind="address",
            default="127.0.0.1",
            doc="Address of the Prometheus endpoints; 0.0.0.0 in a container.",
            read=str,
        ),
    ]
    stall_timeout_s: Annotated[
        float,
        Variable(
            "HEADRACE_STALL_TIMEOUT",
            kind="duration of 1s or more, such as 60s",
            default="60s",
            doc="A worker that stands still for so long although records wait, and no service keeps it, ends with exit "
            "code 1.",
            read=read_duration_s,
        ),
    ]
    probe_every_s: Annotated[
        float,
        Variable(
            "HEADRACE_PROBE_EVERY",
            kind="duration of 1s or more, such as 5s",
            default="5s",
            doc="How often the scoring role asks each version of its model one row; two failures in a row of a version "
            "that Triton calls ready have it unloaded and loaded.",
            read=read_duration_s,
        ),
    ]
    http_port: Annotated[
        int,
        Variable(
            "HEADRACE_HTTP_PORT",
            kind="port from 1 to 65535, or 0",
            default="8080",
            doc="Port of the HTTP API of the serve role. 0 takes any free one.",
            read=read_http_port,
        ),
    ]
    http_address: Annotated[
        str,
        Variable(
            "HEADRACE_HTTP_ADDRESS",
            kind="address",
            default="127.0.0.1",
            doc="Address of the HTTP API; 0.0.0.0 in a container. Keys go over it as they are: put TLS in front.",
            read=str,
        ),
    ]
    event_rate: Annotated[
        int,
        Variable(
            "HEADRACE_EVENT_RATE",
            kind=f"events a second from 1 to {MAX_EVENT_RATE}",
            default="100000",
            doc="Events that all producers together may send to the HTTP API.",
            read=read_event_rate,
        ),
    ]
    is_open_to_events: Annotated[
        bool,
        Variable(
            "HEADRACE_OPEN_EVENTS",
            kind="0 or 1",
            default="0",
            doc="1 takes events over HTTP without a key of `headrace keys`; on loopback alone.",
            read=read_flag,
        ),
    ]
    pseudonym_key: Annotated[
        str | None,
        Variable(
            "HEADRACE_PSEUDONYM_KEY",
            kind="text of 16 bytes or more",
            default="",
            doc='Secret by which views with `Serving(personal="hash")` hash personal values before they go online; '
            "the same for all roles and readers.",
            read=read_pseudonym_key,
        ),
    ] = field(repr=False)
    delivery: Annotated[
        Delivery,
        Variable(
            "HEADRACE_DELIVERY",
            kind=" or ".join(Delivery),
            default=Delivery.EXACTLY_ONCE,
            doc="exactly_once: features and scores are in the transaction of their offsets. at_least_once: they are "
            "seen as soon as they are written, and after a failure some of them again.",
            read=Delivery,
        ),
    ]
    kafka_jvm_flags: Annotated[
        tuple[str, ...],
        Variable(
            "HEADRACE_KAFKA_JVM_FLAGS",
            kind="flags with spaces between",
            default="",
            doc="Further flags of the local Kafka's Java, such as -Xmx1g for benchmarks.",
            read=read_words,
        ),
    ]
    cache: Annotated[
        Path,
        Variable(
            "HEADRACE_CACHE",
            kind="directory",
            default="{user_cache}/headrace",
            doc="Downloads that all homes of a user share, such as the jars of Kafka.",
            read=read_path,
        ),
    ]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the settings were read from; the local services' own environments are made from it."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings":
        """Read every setting.

        Args:
            environ: The environment, usually ``os.environ``.

        Raises:
            ConfigError: A value is wrong, or a variable named ``HEADRACE_…`` is none of the table's.
        """
        variables = _variables(cls)
        known = [variable.name for variable in variables.values()]
        for name in environ:
            if name.startswith("HEADRACE_") and name not in known:
                msg = (
                    f"{name} is set, expected one of {', '.join(known)}; there is no such setting, correct or unset it"
                )
                raise ConfigError(msg)
        places = {"user_cache": environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"}
        values: dict[str, Any] = {}
        for attribute, variable in variables.items():
            text = environ.get(variable.name, "").strip() or variable.default.format(**places)
            try:
                values[attribute] = variable.read(text)
            except ValueError as exc:
                default = f" for the default, {variable.default}" if variable.default else ""
                msg = f"{variable.name} is {text!r}, expected {variable.kind}; correct or unset it{default}"
                raise ConfigError(msg) from exc
            places[attribute] = str(values[attribute])
        return cls(**values, environment=dict(environ))

    @classmethod
    def table(cls) -> list[Variable]:
        """List every environment variable, for help texts and documents."""
        return list(_variables(cls).values())

    def role_metrics_port(self, role: Role) -> int:
        """Give the port of a role's Prometheus endpoint; 0 for any free one."""
        return self.metrics_port + list(Role).index(role) if self.metrics_port else 0

    def pseudonyms(self, views: "Iterable[FeatureView]") -> "Pseudonyms":
        """Make what stands online for the personal values of views.

        Raises:
            ConfigError: A view asks for pseudonyms, and there is no key.
        """
        from streams.sinks.pseudonym import Pseudonyms  # noqa: PLC0415 - as above

        pseudonyms = Pseudonyms(self.pseudonym_key.encode() if self.pseudonym_key else None)
        pseudonyms.check(views)
        return pseudonyms

    def check_delta(self) -> None:
        """See that the offline store can be written to, where it is a directory; object stores are not asked.

        Raises:
            ConfigError: It cannot.
        """
        scheme, _, rest = self.delta.partition("://")
        if rest and scheme != "file":
            return
        see_writable(
            Path(rest or self.delta),
            named=f"HEADRACE_DELTA is {self.delta!r}",
            remedy="or a URL; correct it, or unset it for <home>/delta",
        )

    def check_local(self) -> None:
        """See that all workers can run on this machine with these settings, before anything is started.

        Raises:
            ConfigError: They cannot.
        """
        see_writable(self.home, named=f"HEADRACE_HOME is {str(self.home)!r}", remedy="; set it to one")
        self.check_delta()
        see_writable(
            self.lineage.parent,
            named=f"HEADRACE_LINEAGE is {str(self.lineage)!r}",
            remedy="to put that file into; correct it, or unset it for one below <home>",
        )
        if self.model_repository.exists() and not self.model_repository.is_dir():
            msg = (
                f"HEADRACE_MODEL_REPOSITORY is {str(self.model_repository)!r}, which is a file, expected a directory "
                "of models, which `headrace train` makes; correct it"
            )
            raise ConfigError(msg)
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                self.metrics_address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as server:
                server.bind(place)
        except OSError as exc:
            msg = (
                f"HEADRACE_METRICS_ADDRESS is {self.metrics_address!r}, where nothing can listen "
                f"({exc.strerror or exc}), expected an address of this machine, such as 127.0.0.1 or 0.0.0.0"
            )
            raise ConfigError(msg) from exc

    def given_addresses(self) -> ServiceAddresses:
        """Give the addresses that the environment names."""
        return ServiceAddresses(kafka=self.kafka, redis=self.redis, triton=self.triton)

    def addresses(self) -> ServiceAddresses:
        """Give the address of each service: the environment's, else that of the local service recorded as running."""
        return self.local_services().addresses()

    def address(self, name: str) -> str:
        """Give the address of one service (``kafka``, ``redis`` or ``triton``).

        Raises:
            ConfigError: Neither does the environment name it nor does a local one run.
        """
        address = self.addresses().get(name)
        if address is None:
            msg = (
                f"There is no {name}: HEADRACE_{name.upper()} is not set, and no local one runs under {self.home}. "
                f"Run `headrace services up`, or set HEADRACE_{name.upper()}"
            )
            raise ConfigError(msg)
        return address

    def local_services(self, *, notify: Callable[[str], None] = lambda line: None) -> LocalServices:
        """Make the local services of these settings; ``notify`` takes a line about what takes long."""
        return LocalServices(
            self.home,
            environment=self.environment,
            model_repository=self.model_repository,
            cache=self.cache,
            given=self.given_addresses(),
            use_triton_fallback=self.use_triton_fallback,
            kafka_jvm_flags=self.kafka_jvm_flags,
            notify=notify,
        )


def _variables(settings: type[Settings]) -> dict[str, Variable]:
    """Read the variable of each field off its annotation, in the order of declaration."""
    found: dict[str, Variable] = {}
    for attribute, hint in get_type_hints(settings, include_extras=True).items():
        for part in getattr(hint, "__metadata__", ()):
            if isinstance(part, Variable):
                found[attribute] = part
    return found
