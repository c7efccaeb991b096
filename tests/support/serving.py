"""The HTTP API under test: a real server in a thread, over a real store."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from infra.local.process import wait_until
from schemas.use_case import UseCase
from schemas.view import FeatureView
from streams.observability.serving import ServingMetrics
from streams.serving.api import make_api
from streams.serving.event_intake import EventIntake
from streams.serving.store import AsyncOnlineStore


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
