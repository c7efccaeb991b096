"""The HTTP API under test: a real server in a thread, over a real store."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final
from uuid import uuid4

import uvicorn
from prometheus_client import CollectorRegistry

from infra.local.process import wait_until
from schemas.use_case import UseCase
from schemas.view import FeatureView
from streams.observability.serving import ServingMetrics
from streams.serving.api import make_api
from streams.serving.event_admission import make_admissions
from streams.serving.event_intake import EventIntake
from streams.serving.gate import Gate
from streams.serving.once import Once
from streams.serving.producer_key import Rate
from streams.serving.producer_store import ProducerStore
from streams.serving.sent import find_sent
from streams.serving.store import AsyncOnlineStore
from streams.transport.event_producer import EventProducer

PLENTY: Final = Rate(1_000_000, 1_000_000)


def make_intake(
    views: Sequence[FeatureView],
    brokers: str,
    redis_url: str,
    *,
    prefix: str = "",
    metrics: ServingMetrics | None = None,
    is_open: bool = True,
    global_rate: Rate = PLENTY,
    producer: Callable[..., EventProducer] = EventProducer,
    delivery_timeout_s: float = 10.0,
    timeout_s: float = 5.0,
    **once: Any,
) -> EventIntake:
    """Make what takes events of views, by default from anybody and in a part of Redis that nobody else has."""
    metrics = metrics or ServingMetrics(CollectorRegistry())
    admissions, without = make_admissions(views)
    store = ProducerStore(redis_url, prefix or f"test:{uuid4().hex}", timeout_s=timeout_s)
    return EventIntake(
        admissions,
        without=without,
        store=store,
        gate=Gate(store, global_rate=global_rate, is_open=is_open, store_unavailable=metrics.store_unavailable),
        once=Once(store, delivery_timeout_s=delivery_timeout_s, **once),
        make_producer=lambda: producer(brokers, delivery_timeout_s=delivery_timeout_s),
        find_sent=partial(find_sent, brokers),
        metrics=metrics,
    )


@contextlib.contextmanager
def serving(
    views: Sequence[FeatureView],
    redis_url: str,
    *,
    use_cases: Sequence[UseCase] = (),
    metrics: ServingMetrics | None = None,
    intake: EventIntake | None = None,
    model_version: str = "none",
    **store: Any,
) -> Iterator[str]:
    """Serve views; yields the URL."""
    by_name: Mapping[str, FeatureView] = {view.name: view for view in views}
    metrics = metrics or ServingMetrics(CollectorRegistry())
    api = make_api(
        by_name,
        use_cases=use_cases,
        make_store=lambda: AsyncOnlineStore(redis_url, observer=metrics, **store),
        intake=intake,
        metrics=metrics,
        model_version=model_version,
    )
    server = uvicorn.Server(uvicorn.Config(api, host="127.0.0.1", port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, name="api")
    thread.start()
    try:
        assert wait_until(lambda: server.started or not thread.is_alive(), timeout_s=30)
        (listener,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
