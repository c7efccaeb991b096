import asyncio

import faust
import pytest
from prometheus_client import CollectorRegistry

from streams.agents.worker import create_app
from streams.observability.metrics import Metrics
from streams.transport.consumer import ColumnarConsumer
from streams.transport.options import ConsumerOptions
from tests.support.consumer import Committed, FakePoller


@pytest.fixture
def committed() -> Committed:
    return Committed()


@pytest.fixture
def options(committed: Committed) -> ConsumerOptions:
    return ConsumerOptions(
        kafka={"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, max_held_bytes=2_100, commit=committed
    )


@pytest.fixture
async def app(options: ConsumerOptions) -> faust.App:
    made = create_app(
        "test", brokers="127.0.0.1:1", options=options, metrics=Metrics(CollectorRegistry()), commit_interval_s=0.0
    )
    made.topics.acks_enabled_for = lambda _: True
    return made


@pytest.fixture
async def consumer(app: faust.App) -> ColumnarConsumer:
    made: ColumnarConsumer = app.consumer
    made._main_loop = asyncio.get_running_loop()
    made.poller = FakePoller({("t", 0): None, ("t", 1): 40})
    made.poller.hold(("t", 0), ("t", 1))
    return made
