"""Framed payloads and a real registry: Apicurio over HTTP, with a login before it that comes and goes."""

import base64
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient

from infra.local.apicurio import find_apicurio, run_apicurio
from jobs.settings import Settings
from schemas.errors import ConfigError, RegistryUnavailableError
from streams.decoding import decode
from streams.transport.schema_registry import SchemaRegistry
from streams.writer_schema import use_registry
from tests.support.contracts import (
    ORDER_FIELDS,
    avro_contract,
    avro_payload,
    framed,
    order_schema,
    proto_contract,
)
from tests.support.kafka import TIMEOUT_S
from tests.support.transport import make_batch
from tests.support.workbench import T0_MS, Workbench

LOGIN = "reader:s3cret"


@pytest.fixture(scope="module")
def registry_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cache = Settings.from_environment(os.environ).cache
    home = find_apicurio(environment=os.environ, cache=cache)
    with run_apicurio(home, directory=tmp_path_factory.mktemp("apicurio"), environment=os.environ) as url:
        yield url


@pytest.fixture
def registry(registry_url: str) -> Iterator[SchemaRegistry]:
    made = SchemaRegistry(registry_url)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_registry() -> Iterator[None]:
    yield
    use_registry(None)


class Door:
    """Lets requests with a login through to a registry, while it is open."""

    def __init__(self, url: str) -> None:
        self.asked: list[str] = []
        self.is_open = True
        wanted = f"Basic {base64.b64encode(LOGIN.encode()).decode()}"
        door = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                door.asked.append(self.path)
                status, body = 503, b'{"error_code": 503, "message": "closed"}'
                if self.headers.get("Authorization") != wanted:
                    status, body = 401, b'{"error_code": 401, "message": "no"}'
                elif door.is_open:
                    try:
                        with urllib.request.urlopen(url + self.path, timeout=TIMEOUT_S) as answer:  # noqa: S310
                            status, body = answer.status, answer.read()
                    except urllib.error.HTTPError as exc:
                        status, body = exc.code, exc.read()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def door(registry_url: str) -> Iterator[Door]:
    made = Door(registry_url)
    yield made
    made.close()


def register(url: str, subject: str, text: str, kind: str = "AVRO", references: Any = None) -> int:
    with SchemaRegistryClient({"url": url}) as client:
        return client.register_schema(subject, Schema(text, kind, references or []))


def order(**values: Any) -> dict[str, Any]:
    return {"key": "a", "at": 5, "n": 1, "kind": "click", "x": 2.5, "tags": ["t"], "raw": b""} | values


def test_rows_of_two_versions_are_read_by_what_wrote_them(registry_url: str, registry: SchemaRegistry) -> None:
    more = order_schema([*ORDER_FIELDS, {"name": "more", "type": "string", "default": ""}])
    first = register(registry_url, "orders-value", json.dumps(order_schema()))
    second = register(registry_url, "orders-value", json.dumps(more))
    assert first != second
    use_registry(lambda: registry)
    payloads = [
        framed(first, avro_payload(order_schema(), **order())),
        framed(second, avro_payload(more, **order(n=2), more="m")),
        framed(2_000_000_000, b""),
    ]
    decoded = decode(make_batch(payloads), avro_contract(**{"x-framing": "confluent"}))
    assert decoded.rows["n"].to_pylist() == [1, 2]
    (refused,) = decoded.rejected.to_pylist()
    assert (refused["_offset"], refused["reason"]) == (2, "decode_error")
    assert "schema 2000000000, which the schema registry does not know" in refused["detail"]


def test_schemas_that_refer_to_others_are_read_with_them(registry_url: str, registry: SchemaRegistry) -> None:
    kind = {"type": "enum", "name": "Kind", "namespace": "shop", "symbols": ["view", "click"]}
    register(registry_url, "kind", json.dumps(kind))
    fields = [{**field, "type": ["null", "shop.Kind"]} if field["name"] == "kind" else field for field in ORDER_FIELDS]
    number = register(
        registry_url, "refers-value", json.dumps(order_schema(fields)),
        references=[SchemaReference("shop.Kind", "kind", 1)],
    )  # fmt: skip
    use_registry(lambda: registry)
    payload = framed(number, avro_payload(order_schema(), **order()))
    decoded = decode(make_batch([payload]), avro_contract(**{"x-framing": "confluent"}))
    assert decoded.rejected.to_pylist() == []
    assert decoded.rows["kind"].to_pylist() == ["click"]


def test_protobuf_is_read_by_number_and_a_bigint_is_caught(registry_url: str, registry: SchemaRegistry) -> None:
    grown = 'syntax = "proto3"; package shop; message Order { string key = 1; int64 at = 2; int64 n = 3; }'
    number = register(registry_url, "grown-value", grown, "PROTOBUF")
    use_registry(lambda: registry)
    contract = proto_contract(options='framing: "confluent"')
    message = contract.wire.widened  # type: ignore[union-attr]
    payloads = [framed(number, b"\0" + message(key="a", at=5, n=n).SerializeToString()) for n in (7, 2**31, 2**40)]
    decoded = decode(make_batch(payloads), contract)
    assert decoded.rows["n"].to_pylist() == [7]
    assert [row["detail"] for row in decoded.rejected.to_pylist()] == [
        f"$.n: {n} is greater than the maximum of 2147483647 (contract order@1)" for n in (2**31, 2**40)
    ]


def test_the_login_goes_with_every_question_and_a_wrong_one_is_a_setting(door: Door, registry_url: str) -> None:
    number = register(registry_url, "login-value", json.dumps(order_schema()))
    with closing(SchemaRegistry(f"http://{LOGIN}@{door.place}")) as registry:
        found = registry.find(number)
    assert found is not None
    assert (found.kind, json.loads(found.text)["name"]) == ("AVRO", "Order")
    for login in ("", "reader:wrong@"):
        with (
            closing(SchemaRegistry(f"http://{login}{door.place}")) as registry,
            pytest.raises(ConfigError, match="refuses the login") as caught,
        ):
            registry.find(number)
        assert "wrong" not in str(caught.value)


def test_a_registry_that_is_away_is_told_from_one_that_knows_no_schema(door: Door) -> None:
    with closing(SchemaRegistry(f"http://{LOGIN}@{door.place}")) as registry:
        assert registry.find(2_000_000_001) is None
        door.is_open = False
        with pytest.raises(RegistryUnavailableError, match="503"):
            registry.find(2_000_000_002)
        door.close()
        with pytest.raises(RegistryUnavailableError, match="does not answer"):
            registry.find(2_000_000_003)


@pytest.mark.parametrize(
    "url",
    ["registry:8081", "ftp://registry", "http://", "http://registry?verify=0", "http://registry:99999", "http://["],
)
def test_an_address_that_is_none_is_a_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_SCHEMA_REGISTRY: schema registry address (has options|is no URL)"):
        Settings.from_environment({"HEADRACE_SCHEMA_REGISTRY": url})


CONTRACT = {
    "type": "record",
    "name": "Event",
    "x-framing": "confluent",
    "fields": [
        {"name": "user_id", "type": "string"},
        {"name": "event_time", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "amount", "type": "double"},
    ],
}


def test_rows_wait_in_kafka_for_a_registry_that_is_away_and_none_is_lost(
    kafka: str, tmp_path: Path, registry_url: str, door: Door
) -> None:
    bench = Workbench(kafka, tmp_path)
    bench.define("a")
    application = (tmp_path / "shop.py").read_text()
    (tmp_path / "shop.py").write_text(application.replace("shop_event@1", "framed_event@1"))
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    (tmp_path / "schemas" / "events" / "framed_event@1.avsc").write_text(json.dumps(CONTRACT))
    # Without an address nothing is begun.
    bench.make_topics()
    refused = bench.run("worker", "--role", "features", "--metrics-port", str(bench.port))
    bench.until(lambda: not refused.is_alive(), "the worker ends")
    assert "set HEADRACE_SCHEMA_REGISTRY" in bench.log.read_text()
    number = register(registry_url, f"{bench.topic}-value", json.dumps(CONTRACT))
    bench.settings["HEADRACE_SCHEMA_REGISTRY"] = f"http://{LOGIN}@{door.place}"
    door.is_open = False
    bench.start()
    payloads = [
        framed(number, avro_payload(CONTRACT, user_id="u", event_time=T0_MS + at * 1_000, amount=1.5))
        for at in range(50)
    ]
    try:
        bench.send_values([*payloads[:25], framed(2_000_000_009, b""), *payloads[25:]])
        bench.until(lambda: bench.log.read_text().count("schema registry unavailable, rows wait") >= 2, "it waits")
        assert bench.rows("a") == []
        assert bench.worker is not None
        assert bench.worker.is_alive()
        assert LOGIN.partition(":")[2] not in bench.log.read_text()
        door.is_open = True
        bench.drain()
        assert bench.as_of("a").keys() == {(0, offset) for offset in range(51) if offset != 25}
        assert set(bench.as_of("a").values()) == {1}
        (letter,) = bench.dead()
        assert (letter["headrace.reason"], letter["headrace.offset"]) == (b"decode_error", b"25")
        bench.stop()
    finally:
        if bench.worker is not None and bench.worker.is_alive():
            bench.worker.end(grace_s=TIMEOUT_S)
    ids = [path for path in door.asked if path.startswith(f"/schemas/ids/{number}")]
    assert ids
    assert len(ids) == len(set(ids)) + bench.log.read_text().count(f"gives no schema {number}")
