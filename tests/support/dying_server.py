"""The HTTP API, ended by SIGKILL as a request with an idempotency key has passed a step.

Run as ``python -m tests.support.dying_server STEP BROKERS REDIS_URL TOPIC PREFIX PORT``. The steps are those of
``streams/serving/once.py``.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

import uvicorn
from prometheus_client import CollectorRegistry

from streams.observability.serving import ServingMetrics
from streams.serving.api import make_api
from streams.serving.once import Claim, Once, StoredAnswer
from streams.serving.store import AsyncOnlineStore
from streams.transport.event_producer import Delivered, EventProducer, EventRecord, Undelivered
from tests.support.events import make_source, make_views
from tests.support.serving import make_intake

STEPS: Final = ("claimed", "handed", "acknowledged", "stored")
"""What has been done as it dies. ``claimed``: the key is claimed; ``handed``: half of the records are with Kafka's
client, and nothing is known of them; ``acknowledged``: Kafka has all of them; ``stored``: the answer is stored, and the
caller has not got it."""
SHORT: Final = {"lease_s": 3.0, "delivery_timeout_s": 1.0, "replica_lag_s": 0.5}
"""Leases that a test can wait for."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


class _MortalProducer(EventProducer):
    step = ""

    async def send(
        self, topic: str, records: Sequence[EventRecord], *, timestamp_ms: int
    ) -> list[Delivered | Undelivered]:
        if self.step == "claimed":
            _die()
        if self.step == "handed":
            client = self._producers[-1]
            for record in records[: len(records) // 2]:
                client.produce(
                    topic, record.value, key=record.key, headers=list(record.headers), timestamp=timestamp_ms
                )
            _die()
        found = await super().send(topic, records, timestamp_ms=timestamp_ms)
        if self.step == "acknowledged":
            _die()
        return found


def main(arguments: Sequence[str]) -> None:
    step, brokers, redis_url, topic, prefix, port = arguments
    if step not in STEPS:
        msg = f"{step!r} is no step, expected one of {STEPS}"
        raise SystemExit(msg)
    _MortalProducer.step = step
    store = Once.store

    async def store_and_die(once: Once, claim: Claim, answer: StoredAnswer) -> None:
        await store(once, claim, answer)
        _die()

    if step == "stored":
        Once.store = store_and_die  # type: ignore[method-assign]
    views = make_views(make_source(topic))
    metrics = ServingMetrics(CollectorRegistry())
    api = make_api(
        {view.name: view for view in views},
        make_store=lambda: AsyncOnlineStore(redis_url),
        intake=make_intake(views, brokers, redis_url, prefix=prefix, producer=_MortalProducer, **SHORT),
        metrics=metrics,
    )
    uvicorn.Server(uvicorn.Config(api, host="127.0.0.1", port=int(port), log_config=None, access_log=False)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
