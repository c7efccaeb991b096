"""The offline store at an ``s3://`` address: a server of S3's protocol on loopback, written, read and maintained."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from infra.local.port import accepts_connections, choose_ports
from infra.local.process import ProcessIdentity, spawn, wait_until
from offline.maintenance import find_tables, maintain
from schemas.errors import SinkUnavailableError
from streams.sinks.archive import Archive, ArchiveWriter
from streams.sinks.offline import OfflineWriter, read_features
from tests.support.history import FILES, N_RECORDS, TOPIC, Outcome, Place, content, expected
from tests.support.kafka import TIMEOUT_S

ROOT = "s3://lake/delta"


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket on a server of its own, which is another process: delta-rs waits for it with Python's lock held."""

    server: ProcessIdentity
    options: dict[str, str]

    def settings(self) -> dict[str, str]:
        return {"HEADRACE_DELTA": ROOT, "HEADRACE_DELTA_OPTIONS": json.dumps(self.options)}


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    port = choose_ports({"s3": 0})["s3"]
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = spawn(argv, environment=os.environ, cwd=tmp_path, log=tmp_path / "s3.log")
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_REGION": "eu-central-1",
    }
    try:
        assert wait_until(lambda: accepts_connections(f"127.0.0.1:{port}", service="S3"), timeout_s=TIMEOUT_S)
        httpx.put(
            f"{options['AWS_ENDPOINT_URL']}/lake",
            content=b"<CreateBucketConfiguration><LocationConstraint>eu-central-1</LocationConstraint>"
            b"</CreateBucketConfiguration>",
            headers={"Authorization": "AWS4-HMAC-SHA256 Credential=reader/20260101/eu-central-1/s3/aws4_request"},
        ).raise_for_status()
        yield Bucket(server=server, options=options)
    finally:
        server.end(grace_s=TIMEOUT_S)


@pytest.fixture
def place(tmp_path: Path, bucket: Bucket) -> Place:
    """A home whose topic is archived in the bucket."""
    place = Place(tmp_path, n_archived=0)
    writer = ArchiveWriter(ROOT, storage_options=bucket.options)
    for batches in place.batches.values():
        for batch in batches:
            writer.write(batch)
    return place


def run(place: Place, bucket: Bucket, *arguments: str, command: str) -> Outcome:
    return place.run(*arguments, command=command, settings=bucket.settings())


def stored(place: Place, bucket: Bucket) -> list[dict[str, object]]:
    rows = read_features(ROOT, place.view, storage_options=bucket.options)
    return content(rows.drop_columns(["event_date", "available_time"]))


def test_history_is_made_from_it_and_put_into_it_and_found_to_be_right(place: Place, bucket: Bucket) -> None:
    done = run(place, bucket, "--json", "--workers", "2", command="backfill activity")
    assert done.code == 0, done.err
    made = expected(place.view, place.live_rows(place.view))
    assert stored(place, bucket) == made
    assert json.loads(done.out)["rows_added"] == len(made)
    listed = json.loads(run(place, bucket, "--json", command="tables list").out)
    assert [(table["table"], table["backfills"]) for table in listed] == [("activity/v1", {}), (f"raw.{TOPIC}", {})]
    parity = run(place, bucket, "--no-online", "--json", command="parity activity")
    assert (parity.code, json.loads(parity.out)["stores"][0]["rows"]) == (0, len(made)), parity.err


def test_tables_are_maintained_beside_writers_that_race(place: Place, bucket: Bucket) -> None:
    view = place.view
    made = place.live_rows(view)

    def write(_: int) -> None:
        for partition, tables in made.items():
            reached = 0
            for rows in tables:
                # A writer of its own each time: it knows of what others have committed from the table alone.
                writer = OfflineWriter(ROOT, storage_options=bucket.options, attempts=30)
                offsets = range(reached, reached + rows.num_rows)
                writer.write(rows, view=view, partition=partition, offsets=offsets)
                reached = offsets.stop

    def keep_up(name: str) -> int:
        found = find_tables(ROOT, storage_options=bucket.options)
        return sum(maintain(t, retention_hours=0, attempts=50).files_removed for t in found if t.name == name)

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, n) for n in range(2)]
        removed = [pool.submit(keep_up, f"raw.{TOPIC}"), pool.submit(keep_up, f"raw.{TOPIC}")]
        for future in writing:
            future.result()
        assert sum(future.result() for future in removed) == 2 * FILES
    assert keep_up("activity/v1") == 2 * FILES
    assert stored(place, bucket) == expected(view, made)
    archive = Archive(ROOT, TOPIC, bucket.options)
    for partition in place.batches:
        read = [offset for batch in archive.read(partition, range(N_RECORDS)) for offset in batch.offsets.tolist()]
        assert read == list(range(N_RECORDS))


def test_compaction_by_the_command_sorts_what_is_asked_for(place: Place, bucket: Bucket) -> None:
    assert run(place, bucket, command="backfill activity").code == 0
    assert run(place, bucket, "--cluster", "--json", command="tables maintain").code == 0
    rows: pa.Table = read_features(ROOT, place.view, storage_options=bucket.options)
    keys = rows["user_id"].to_pylist()
    assert keys == sorted(keys)
    assert stored(place, bucket) == expected(place.view, place.live_rows(place.view))


def test_a_store_that_does_not_answer_is_told_without_its_secrets(place: Place, bucket: Bucket) -> None:
    assert bucket.server.end(grace_s=TIMEOUT_S)
    options = {**bucket.options, "AWS_MAX_RETRIES": "0", "timeout": "1s", "max_retries": "0", "retry_timeout": "1s"}
    with pytest.raises(SinkUnavailableError) as caught:
        list(Archive(ROOT, TOPIC, options).read(0, range(1)))
    assert "s3://lake/delta/raw.shop.events" in str(caught.value)
    assert "hidden" not in str(caught.value)
