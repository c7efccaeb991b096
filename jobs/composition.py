"""The composition root: puts settings, definitions, adapters and agents together into the worker of a role."""

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import faust
from confluent_kafka import Consumer

from jobs.application import Application, consumer_groups, contracts_of, scored_model, scores_kept
from jobs.role import Role
from jobs.schema_registry import check_registry
from jobs.scoring import compose_scoring
from jobs.settings import Settings
from jobs.topics import application_topics, ensure_topics
from schemas.errors import ConfigError
from schemas.topology import connect
from streams.agents.features import FeaturesWorker
from streams.agents.offline import OfflineWorker
from streams.agents.online import OnlineWorker
from streams.agents.worker import run
from streams.lineage.dataset import Stores
from streams.lineage.openlineage import LineageEmitter
from streams.observability.endpoint import serve
from streams.observability.health import Health
from streams.observability.metrics import Metrics
from streams.sinks.archive import ArchiveWriter
from streams.sinks.offline import OfflineWriter
from streams.sinks.online import OnlineReader, OnlineWriter
from streams.sinks.score_store import ScoreWriter
from streams.transport.options import Partition
from streams.transport.start import StartAt

_PATIENCE_S = 6.0
logger = logging.getLogger(__name__)


def run_worker(
    role: Role,
    application: Application,
    settings: Settings,
    *,
    worker_id: str,
    metrics_port: int,
    log_level: str,
    start_at: str | None = None,
) -> None:
    """Run the worker of a role until SIGTERM; exits the process.

    Raises:
        ConfigError: A setting or definition is wrong, or the model that is loaded is another than its card describes.
        ServiceError: Kafka cannot be reached.
    """
    brokers, redis_url = settings.address("kafka"), settings.address("redis")
    if role is Role.FEATURES:
        check_registry(settings, contracts_of(application.views.values()))
    begin_at = None if start_at is None else _begin_at(start_at, role, application)
    ensure_topics(brokers, application_topics(application), patience_s=_PATIENCE_S)
    metrics, health = Metrics(), Health()
    # Each worker appends to a file of its own, so that lines of two never mix.
    events = settings.lineage.with_name(f"{settings.lineage.stem}.{role}-{worker_id}{settings.lineage.suffix}")
    stores = Stores(kafka=brokers, redis=redis_url, delta=settings.delta)
    with ExitStack() as stack:
        server = stack.enter_context(serve(metrics, health, port=metrics_port, address=settings.metrics_address))
        lineage = stack.enter_context(LineageEmitter(events, stores=stores, metrics=metrics))
        logger.info("worker %s %s: metrics on %s, lineage in %s", role, worker_id, server.url, events)
        app = _compose(role, application, settings, worker_id=worker_id, metrics=metrics, lineage=lineage)
        app.headrace.begin_at = begin_at
        try:
            run(
                app,
                role=role,
                metrics=metrics,
                health=health,
                log_level=log_level,
                stall_timeout_s=settings.stall_timeout_s,
            )
        except SystemExit as exc:
            # Faust ends with 1 whatever went wrong. What a new start cannot mend must not look like what it can.
            if isinstance(app.crash_reason, ConfigError):
                raise app.crash_reason from exc
            raise


def _begin_at(
    start_at: str, role: Role, application: Application
) -> Callable[[Consumer, Collection[Partition]], dict[Partition, int]]:
    _, topics = consumer_groups(application).get(role, ("", []))
    if role is Role.FEATURES:
        # What stands on a repartition topic was let in at its source.
        topics = list(connect(list(application.views.values())).sources)
    start = StartAt.parse(start_at, topics=topics)
    return lambda consumer, partitions: start.resolve(consumer, [tp for tp in partitions if tp[0] in topics])


def _compose(
    role: Role,
    application: Application,
    settings: Settings,
    *,
    worker_id: str,
    metrics: Metrics,
    lineage: LineageEmitter,
) -> faust.App:
    brokers, redis_url = settings.address("kafka"), settings.address("redis")
    views = list(application.views.values())
    pseudonyms = settings.pseudonyms(views)
    common: dict[str, Any] = {
        "application": application.name,
        "brokers": brokers,
        "metrics": metrics,
        "lineage": lineage,
    }
    match role:
        case Role.FEATURES:
            return FeaturesWorker(views, worker_id=worker_id, delivery=settings.delivery, **common).app
        case Role.ONLINE:
            kept = scores_kept(application)
            score_writer = ScoreWriter(redis_url) if kept else None
            return OnlineWorker(
                views,
                writer=OnlineWriter(redis_url, pseudonyms=pseudonyms),
                scores=kept,
                score_writer=score_writer,
                reader=OnlineReader(redis_url, pseudonyms=pseudonyms),
                **common,
            ).app
        case Role.OFFLINE:
            return OfflineWorker(
                views,
                writer=OfflineWriter(settings.delta, storage_options=settings.delta_options),
                archive=ArchiveWriter(settings.delta, storage_options=settings.delta_options),
                archived=connect(views).topics,
                **common,
            ).app
        case Role.SCORING:
            if (model := scored_model(application)) is None:
                msg = f"{application.module} has no model in MODELS, expected one for the scoring role"
                raise ConfigError(msg)
            return compose_scoring(model, application, settings, worker_id=worker_id, metrics=metrics, lineage=lineage)
