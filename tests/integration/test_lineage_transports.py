import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client import CollectorRegistry

from schemas.errors import ConfigError
from streams.lineage.openlineage import LineageEmitter
from streams.observability.metrics import Metrics
from tests.support.feature_rows import T0_US, make_view

VIEW = make_view()


def tell(emitter: LineageEmitter, *, partition: int = 0) -> None:
    emitter.batch_done(
        "online", view=VIEW, topic=VIEW.topic, partition=partition, offsets=(0, 10), rows=10, started_us=T0_US
    )


@pytest.fixture
def lineage_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server that takes events as a lineage service does."""
    events: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", events
        server.shutdown()
        thread.join()


def test_a_file_takes_one_event_a_line_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "events.ndjson"
    metrics = Metrics(CollectorRegistry())
    for partition in (0, 1):
        with LineageEmitter(path, metrics=metrics) as emitter:
            tell(emitter, partition=partition)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["eventType"] for event in events] == ["COMPLETE", "COMPLETE"]
    assert len({event["run"]["runId"] for event in events}) == 2
    assert metrics.registry.get_sample_value("headrace_lineage_events_total") == 2


def test_a_file_that_cannot_be_written_is_counted_and_raises_nothing(tmp_path: Path) -> None:
    metrics = Metrics(CollectorRegistry())
    with LineageEmitter(tmp_path, metrics=metrics) as emitter:  # a directory
        tell(emitter)
    assert metrics.registry.get_sample_value("headrace_lineage_failures_total", {"reason": "rejected"}) == 1


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        LineageEmitter(tmp_path / "file" / "events.ndjson")


def test_http_takes_events(lineage_server: tuple[str, list[dict[str, Any]]]) -> None:
    url, events = lineage_server
    with LineageEmitter({"type": "http", "url": url}) as emitter:
        tell(emitter)
    (event,) = events
    assert event["job"]["name"] == "online.user_activity"


def test_a_service_that_is_down_is_counted_and_raises_nothing() -> None:
    metrics = Metrics(CollectorRegistry())
    down = {"type": "http", "url": "http://127.0.0.1:1", "timeout": 1, "retry": {"total": 0}}
    with LineageEmitter(down, metrics=metrics) as emitter:
        tell(emitter)
    assert metrics.registry.get_sample_value("headrace_lineage_failures_total", {"reason": "rejected"}) == 1


def test_kafka_takes_events(kafka: str) -> None:
    topic = f"lineage.{uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    config = {"type": "kafka", "topic": topic, "config": {"bootstrap.servers": kafka}, "flush": True}
    with LineageEmitter(config) as emitter:
        tell(emitter)
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        assert json.loads(message.value())["job"]["name"] == "online.user_activity"
    finally:
        consumer.close()
