"""The features role on a real Kafka, across what a user does to its views and what becomes of its topics."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from jsonschema import Draft202012Validator

from infra.local.process import exit_code, wait_until
from jobs.consumer_group import committed_offsets
from jobs.scrape import scrape
from streams.transport.epoch import MAX_RECORD_BYTES
from tests.support.kafka import TIMEOUT_S
from tests.support.workbench import GROUP, N_PARTITIONS, T0_MS, Workbench, event


@pytest.fixture
def bench(kafka: str, tmp_path: Path) -> Iterator[Workbench]:
    made = Workbench(kafka, tmp_path)
    yield made
    if made.worker is not None and made.worker.is_alive():
        made.worker.end(grace_s=TIMEOUT_S)


def test_a_view_added_later_goes_over_all_that_is_there_and_the_others_send_nothing_again(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    for partition in range(N_PARTITIONS):
        bench.send(300, partition=partition)
    bench.send_values([b"{}"])
    bench.drain()
    bench.stop()
    bench.define("a", "b")
    bench.start()
    bench.until(lambda: len(bench.as_of("b")) > 0, "the new view has rows")
    bench.kill()
    bench.start()
    for partition in range(N_PARTITIONS):
        bench.send(50, partition=partition)
    bench.drain()
    expected = bench.as_of("a")
    assert expected == Counter((p, o) for p in (0, 1) for o in range(bench.sent[p]) if (p, o) != (0, 300))
    assert bench.as_of("b") == expected
    assert [letter["headrace.reason"] for letter in bench.dead()] == [b"schema_violation"]
    # The rows on the topic pass what `headrace schemas show` prints of it.
    shown = bench.run("schemas", "show", f"features.{bench.view('a')}")
    assert wait_until(lambda: not shown.is_alive(), timeout_s=TIMEOUT_S)
    log = bench.log.read_text()
    validator = Draft202012Validator(json.loads(log[log.rindex("\n{\n") :]))
    rows = bench.rows("a")
    assert {row["pane"] for row in rows} >= {"EARLY", "ON_TIME"}
    for row in rows:
        validator.validate(row)


def test_a_view_that_was_away_has_every_row_once_when_it_is_back(bench: Workbench) -> None:
    bench.define("a", "b")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.define("a", "b")
    bench.start()
    bench.send(100)
    bench.drain()
    assert bench.as_of("a") == bench.as_of("b") == bench.each_once(300)
    assert [row["x_2m"] for row in bench.rows("a")] == [row["x_2m"] for row in bench.rows("b")]


def test_a_new_version_starts_anew_beside_the_rows_of_the_old_one(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.define("a", version=2, feature='sum_("amount")')
    bench.start()
    bench.send(100)
    bench.drain()
    assert bench.as_of("a") == bench.each_once(100)
    assert bench.as_of("a", version=2) == bench.each_once(200)
    bench.stop()
    bench.define("a")
    bench.start()
    bench.drain()
    bench.until(lambda: len(bench.as_of("a")) == 200, "the old version has caught up")
    assert bench.as_of("a") == bench.each_once(200)


def test_a_group_whose_offsets_expired_sends_nothing_again(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.send_values([b"no json"])
    bench.drain()
    bench.stop()
    bench.forget_group()
    bench.start()
    bench.send(100)
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(201) if offset != 100)
    assert [letter["headrace.reason"] for letter in bench.dead()] == [b"decode_error"]


def test_what_retention_took_before_it_was_read_is_told_and_the_rest_is_processed(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.send(100)
    bench.delete_records(150)
    bench.start()
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(200) if not 100 <= offset < 150)
    lost = scrape([bench.port]).total("headrace_offsets_lost_total", role="features", topic=bench.topic)
    assert lost == 50
    assert f"{bench.topic}-0: offsets 100 to 149 are gone" in bench.log.read_text()


def test_an_event_larger_than_any_dead_letter_is_cut_and_the_worker_goes_on(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.allow_bytes(4 * MAX_RECORD_BYTES)
    huge = b'{"user_id": "' + b"x" * 2 * MAX_RECORD_BYTES + b'"}'
    bench.send_values([huge])
    bench.send(10)
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(1, 11))
    (letter,) = bench.dead()
    assert (letter["headrace.reason"], letter["headrace.offset"]) == (b"schema_violation", b"0")
    assert letter["headrace.value_sha256"] == hashlib.sha256(huge).hexdigest().encode()


def test_at_least_once_a_killed_worker_sends_some_rows_again_and_counts_nothing_twice(bench: Workbench) -> None:
    bench.settings["HEADRACE_DELIVERY"] = "at_least_once"
    bench.define("a")
    bench.start(module="tests.support.dying_worker state 2")
    bench.send(100)
    bench.send_values([b"no json"])
    bench.until(lambda: len(bench.as_of("a")) > 0, "the first epoch is there")
    bench.send(100)
    worker = bench.worker
    assert worker is not None
    bench.until(lambda: not worker.is_alive(), "the worker dies after the rows of an epoch, before its commit")
    bench.start()
    bench.drain()
    times = bench.as_of("a")
    assert times.keys() == {(0, offset) for offset in range(201) if offset != 100}
    assert set(times.values()) == {1, 2}
    assert {letter["headrace.offset"] for letter in bench.dead()} == {b"100"}
    values: dict[int, set[int]] = {}
    for row in bench.rows("a"):
        if row["pane"] == "EARLY":
            values.setdefault(row["source_offset"], set()).add(row["x_2m"])
    assert all(len(found) == 1 for found in values.values())


def test_a_new_group_begins_at_its_end_and_a_restart_finds_the_same_place(bench: Workbench) -> None:
    bench.define("a")
    bench.make_topics()
    bench.send(100)
    bench.start("--start-at", "end")
    bench.until(lambda: "the group begins at" in bench.log.read_text(), "the group has begun")
    bench.until(lambda: committed_offsets(bench.brokers, GROUP, bench.topic) == {0: 100, 1: 0}, "it is committed")
    bench.kill()
    bench.send(50)  # to begin at the end again would leave these out
    bench.start("--start-at", "end")
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(100, 150))
    first = next(row for row in bench.rows("a") if row["pane"] == "EARLY")
    assert first["x_2m"] == 1, "what is before does not count"
    bench.kill()
    bench.start()
    bench.send(50)
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(100, 200))


def test_a_start_in_seconds_is_refused_before_anything_is_done(bench: Workbench) -> None:
    bench.define("a")
    bench.start("--start-at", "1767225600")
    worker = bench.worker
    assert worker is not None
    bench.until(lambda: not worker.is_alive(), "the worker ends")
    assert exit_code(worker.pid) == 2
    assert "2026-01-01T00:00:00.000000Z if it is in seconds" in " ".join(bench.log.read_text().split())


def test_a_topic_that_was_made_again_is_refused(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    admin = AdminClient({"bootstrap.servers": bench.brokers})
    admin.delete_topics([bench.topic])[bench.topic].result(TIMEOUT_S)
    bench.start()
    assert bench.worker is not None
    bench.until(lambda: not bench.worker.is_alive(), "the worker ends")
    assert exit_code(bench.worker.pid) == 1
    assert f"{bench.topic}-0 is to be read from offset 100, but ends at 0" in bench.log.read_text()


def test_an_idle_partition_closes_its_windows_by_the_clock_and_a_restart_takes_the_same_decision(
    bench: Workbench,
) -> None:
    bench.define("a", emit="on_close", source='idle_timeout="1s", idle_advance=True')
    bench.start()
    # A first event near the end of its window, which closes 1 s (idle) + 6 s (out-of-orderness and rest) later.
    bench.send(2, at_ms=T0_MS + 58_000)
    bench.until(lambda: len(bench.rows("a")) >= 1, "the window is closed")
    (row, *_) = bench.rows("a")
    assert (row["pane"], row["x_2m"], row["source_offset"]) == ("ON_TIME", 2, 1)
    bench.kill()
    bench.start()
    bench.send_values([event(T0_MS + 59_500), event(T0_MS + 400_000)])
    bench.drain()
    panes = [(row["window_end"], row["pane"], row["pane_index"], row["x_2m"]) for row in bench.rows("a")]
    assert len(set(panes)) == len(panes)
    assert next(pane for pane in panes if pane[1] == "ON_TIME")[3] == 2
