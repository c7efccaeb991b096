"""The serve role: the HTTP API over the online store, until SIGTERM."""

import logging
import signal
import socket
from functools import partial
from ipaddress import ip_address

import uvicorn

from jobs.application import Application, scored_model
from jobs.settings import Settings
from offline.card import load_card
from schemas.errors import ConfigError
from streams.observability.endpoint import serve
from streams.observability.health import Health
from streams.observability.serving import ServingMetrics
from streams.serving.api import make_api
from streams.serving.event_admission import make_admissions
from streams.serving.event_intake import MAX_BATCH_EVENTS, EventIntake
from streams.serving.gate import Gate
from streams.serving.once import Once
from streams.serving.producer_key import Rate
from streams.serving.producer_store import ProducerStore
from streams.serving.sent import find_sent
from streams.serving.store import AsyncOnlineStore
from streams.transport.event_producer import EventProducer

_GRACE_S = 10
logger = logging.getLogger(__name__)


def run_server(
    application: Application, settings: Settings, *, http_port: int, metrics_port: int, log_level: str
) -> None:
    """Serve until SIGTERM or SIGINT; what is being answered then is answered to its end.

    Args:
        application: What is served.
        settings: Where the stores are.
        http_port: Port of the API; 0 takes any free one.
        metrics_port: Port of metrics and health; 0 takes any free one.
        log_level: Log level.

    Raises:
        ConfigError: A port is taken, or a setting or the model's card is wrong.
    """
    redis_url = settings.address("redis")
    pseudonyms = settings.pseudonyms(application.views.values())
    metrics, health = ServingMetrics(), Health()
    health.waits_for(["the API is starting"])

    def make_store() -> AsyncOnlineStore:
        health.waits_for([])
        return AsyncOnlineStore(
            redis_url,
            offline=settings.delta,
            offline_options=settings.delta_options,
            observer=metrics,
            pseudonyms=pseudonyms,
        )

    api = make_api(
        application.views,
        use_cases=application.use_cases,
        make_store=make_store,
        intake=_intake(application, settings, metrics=metrics),
        metrics=metrics,
        model_version=_model_version(application, settings),
    )
    with (
        _listening(settings.http_address, http_port) as listener,
        serve(metrics, health, port=metrics_port, address=settings.metrics_address) as endpoint,
    ):
        address, port = listener.getsockname()[:2]
        logger.info("worker serve: API on http://%s:%d, metrics on %s", address, port, endpoint.url)
        config = uvicorn.Config(
            api,
            log_config=None,
            log_level=log_level,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        # The server passes a signal on once it has ended: it has been answered by then.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listener])


def _intake(application: Application, settings: Settings, *, metrics: ServingMetrics) -> EventIntake | None:
    """Make what takes events; None where no Kafka is named.

    Raises:
        ConfigError: Anybody could send them.
    """
    if settings.is_open_to_events and not _is_loopback(settings.http_address):
        msg = (
            f"HEADRACE_OPEN_EVENTS is set and HEADRACE_HTTP_ADDRESS is {settings.http_address}, expected a loopback "
            "address, since anybody there could send events; unset it, and give producers keys (`headrace keys create`)"
        )
        raise ConfigError(msg)
    brokers = settings.addresses().get("kafka")
    if brokers is None:
        logger.info("worker serve: no Kafka is named or runs here, so the API takes no events")
        return None
    admissions, without = make_admissions(list(application.views.values()))
    for reason in without.values():
        logger.info("worker serve: no events over HTTP: %s", reason)
    store = ProducerStore(settings.address("redis"))
    return EventIntake(
        admissions,
        without=without,
        store=store,
        gate=Gate(
            store,
            global_rate=Rate(settings.event_rate, max(settings.event_rate, MAX_BATCH_EVENTS)),
            is_open=settings.is_open_to_events,
            store_unavailable=metrics.store_unavailable,
        ),
        once=Once(store),
        make_producer=lambda: EventProducer(brokers),
        find_sent=partial(find_sent, brokers),
        metrics=metrics,
    )


def _is_loopback(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # that nothing can listen there is said when something is to
    return all(ip_address(place[0]).is_loopback for *_, place in found)


def _model_version(application: Application, settings: Settings) -> str:
    """Give the newest version, be it the champion or not; ``none`` without a model, or while it is not trained."""
    model = scored_model(application)
    if model is None or not (settings.model_repository / model.name / "config.pbtxt").is_file():
        return "none"
    card = load_card(settings.model_repository, model.name)
    card.check(model)
    return card.served_version.version


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The protocol is named, or asyncio leaves Nagle's algorithm on: then the body of an answer waits until the caller
    # has acknowledged its head, 40 ms later.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except OSError as exc:
        listener.close()
        msg = f"the API cannot be served on {address}:{port} ({exc.strerror}), expected a free port; 0 takes any"
        raise ConfigError(msg) from exc
    return listener
