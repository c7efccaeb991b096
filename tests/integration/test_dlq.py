"""``headrace dlq`` on a real Kafka: what is listed, what is sent again, and that nothing goes twice or for ever."""

import hashlib
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

import jobs.redrive
from jobs.application import load_application
from jobs.commands import app
from jobs.dead_letters import Choice, choose_sources, letter_sources
from jobs.dead_letters import Letters as DeadLetters
from jobs.topic_reader import read_topic
from jobs.topics import Topic, ensure_topics
from schemas.errors import ConfigError, ServiceError
from tests.support.kafka import TIMEOUT_S, make_topic
from tests.support.workbench import T0_MS, Workbench, event

APPLICATION = """
from streams import Entity, EventSource, FeatureView, count

user = Entity("user", key="user_id")
events = EventSource("{topic}", contract="shop_event@1", max_out_of_orderness="5s")
common = dict(version=1, entity=user, source=events, slide="1m", emit="every_event")
VIEWS = [
    FeatureView("strict_{name}", allowed_lateness="0s", features={{"x_2m": count().over("1m")}}, **common),
    FeatureView("patient_{name}", allowed_lateness="1h", features={{"x_2m": count().over("1m")}}, **common),
]
"""


class Letters:
    """An application whose source has dead letters, written by the test."""

    def __init__(self, brokers: str, directory: Path) -> None:
        self.brokers = brokers
        self.topic = make_topic(brokers, "events", partitions=3, config={"max.message.bytes": str(8 * 2**20)})
        self.name = self.topic.rpartition(".")[2]
        self.application = directory / "shop.py"
        self.application.write_text(APPLICATION.format(topic=self.topic, name=self.name))
        self._producer = Producer({"bootstrap.servers": brokers, "message.max.bytes": 8 * 2**20})
        self.dead_letter_topic = f"dlq.{self.topic}"
        ensure_topics(brokers, [Topic(name=self.dead_letter_topic)], partitions=1)
        self.send(self.dead_letter_topic, b"something else", headers=[])

    def send(self, topic: str, value: bytes | None, *, partition: int = 0, key: bytes = b"u1", headers: Any) -> None:
        told: list[Any] = []
        self._producer.produce(
            topic, value, key=key, partition=partition, headers=headers, on_delivery=lambda error, _: told.append(error)
        )
        self._producer.flush(TIMEOUT_S)
        assert told == [None]

    def write(
        self,
        *,
        value: bytes | None = b"v",
        partition: int = 0,
        offset: int,
        reason: str = "schema_violation",
        view: str | None = None,
        headers: Any = (),
        **facts: Any,
    ) -> None:
        told = {"reason": reason, "detail": f"why {offset}", "topic": self.topic, "partition": partition}
        told |= {"offset": offset, "view": view, **facts}
        own = [(f"headrace.{name}", str(fact).encode()) for name, fact in told.items() if fact is not None]
        self.send(self.dead_letter_topic, value, headers=[*headers, *own])

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["dlq", *arguments])

    def redrive(self, *options: str) -> dict[str, Any]:
        done = self.run("redrive", "--json", *options)
        assert done.exit_code == 0, done.output
        (document,) = json.loads(done.stdout)
        assert document["source"] == self.topic
        found: dict[str, Any] = document
        return found

    def sent(self) -> list[tuple[int, bytes | None, bytes | None, dict[str, bytes]]]:
        """Partition, key, value and headers of what stands on the source topic."""
        return [
            (batch.partition, key, value, dict(headers or ()))
            for batch in read_topic(self.brokers, self.topic)
            for key, value, headers in zip(batch.keys, batch.values, batch.headers, strict=True)
        ]


@pytest.fixture
def letters(kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Letters:
    found = Letters(kafka, tmp_path)
    monkeypatch.setenv("HEADRACE_KAFKA", kafka)
    monkeypatch.setenv("HEADRACE_APP", str(found.application))
    return found


def test_letters_are_listed_and_counted_by_reason_view_and_time(letters: Letters) -> None:
    strict = f"strict_{letters.name}"
    letters.write(offset=1)
    letters.write(offset=2, reason="late", view=strict, late_by_us=1_500)
    letters.write(offset=3, reason="late", view=f"patient_{letters.name}")

    def listed(*options: str) -> list[int]:
        done = letters.run("list", "--json", *options)
        assert done.exit_code == 0, done.output
        return [entry["offset"] for entry in json.loads(done.stdout)]

    assert listed() == [1, 2, 3]
    assert listed("--reason", "late") == [2, 3]
    assert listed("--view", strict) == [1, 2]
    assert listed("--source", letters.topic, "--limit", "1") == [3]
    assert listed("--from", "2100-01-01") == []
    assert listed("--to", "2100-01-01T00:00:00Z") == [1, 2, 3]
    (entry,) = json.loads(letters.run("list", "--json", "--reason", "late", "--view", strict).stdout)
    assert (entry["late_by_us"], entry["detail"], entry["view"]) == (1_500, "why 2", strict)
    text = letters.run("list")
    assert f"{entry['letter']}  {entry['time'][:19]}Z  late  view {strict}" in text.stdout
    assert f"{letters.dead_letter_topic}: 1 records are no dead letters" in text.stderr

    counts = json.loads(letters.run("stats", "--json").stdout)
    assert {(row["reason"], row["view"]): row["letters"] for row in counts} == {
        ("schema_violation", None): 1,
        ("late", strict): 1,
        ("late", f"patient_{letters.name}"): 1,
    }
    assert letters.run("stats", "--reason", "late").stdout.splitlines()[-1] == "        2  in all"


def test_one_letter_is_shown_whole(letters: Letters) -> None:
    letters.write(offset=4, value=b'{"a": 1}', headers=[("trace", b"\xff")])
    (entry,) = json.loads(letters.run("list", "--json").stdout)
    shown = json.loads(letters.run("show", entry["letter"], "--json").stdout)
    assert shown == entry | {"headers": {"trace": "\\xff"}, "value": {"a": 1}}
    assert "why 4" in letters.run("show", entry["letter"]).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--reason", "tired"], r"reason is tired, expected one of decode_error"),
        (["list", "--view", "none"], r"view 'none' is not defined"),
        (["list", "--source", "none"], r"source is 'none', expected one of"),
        (["stats", "--from", "yesterday"], r"`--from` is 'yesterday', expected RFC 3339"),
        (["stats", "--from", "2026-01-02", "--to", "2026-01-01"], r"is not before"),
        (["show", "twelve"], r"letter is 'twelve', expected topic-partition-offset"),
        (["show", "dlq.{topic}-0-99"], r"there is no dead letter"),
        (["redrive", "dlq.{topic}-7-0"], r"there is no dead letter"),
    ],
)
def test_what_there_is_none_of_is_told(letters: Letters, arguments: list[str], message: str) -> None:
    done = letters.run(*(argument.format(topic=letters.topic) for argument in arguments))
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise done.exception


def test_a_record_goes_again_as_it_was_to_the_partition_it_came_from_and_once(letters: Letters) -> None:
    letters.write(offset=5, partition=2, headers=[("trace", b"1")])
    letters.write(offset=6, partition=1, value=None)
    assert letters.redrive("--dry-run")["sent"] == 2
    assert letters.sent() == []
    assert letters.redrive()["letters_by_reason"] == {"schema_violation": 2}
    marks = {"headrace.redriven": b"1"}
    expected = [
        (1, b"u1", None, marks | {"headrace.origin": f"{letters.topic}-1-6".encode()}),
        (2, b"u1", b"v", marks | {"headrace.origin": f"{letters.topic}-2-5".encode(), "trace": b"1"}),
    ]
    assert sorted(letters.sent(), key=lambda record: record[0]) == expected
    for options in ([], ["--dry-run"]):
        done = letters.redrive(*options)
        assert (done["sent"], done["skipped"]) == (0, {"sent before": 2})
    assert len(letters.sent()) == 2


def test_of_two_redrives_at_once_the_later_one_goes_on_and_each_record_goes_once(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.redrive, "_CHUNK_ROWS", 4)
    for offset in range(20):
        letters.write(offset=offset, partition=offset % 3)
    application = load_application(str(letters.application))
    (source,) = choose_sources(letter_sources(application), [letters.topic])
    chosen = DeadLetters(letters.brokers, source, Choice())
    later: list[dict[str, Any]] = []

    def begin_another(_: object) -> None:
        if not later:
            later.append(letters.redrive())

    with pytest.raises(ServiceError, match=r"another redrive of .* has begun and ended this one"):
        jobs.redrive.redrive(letters.brokers, chosen, max_redrives=3, on_sent=begin_another)
    assert (later[0]["sent"], later[0]["skipped"]) == (16, {"sent before": 4})
    origins = Counter(headers["headrace.origin"] for *_, headers in letters.sent())
    assert origins == {f"{letters.topic}-{offset % 3}-{offset}".encode(): 1 for offset in range(20)}


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_redrive_that_is_killed_at_a_commit_goes_on_and_each_record_goes_once(letters: Letters, step: str) -> None:
    for offset in range(20):
        letters.write(offset=offset, partition=offset % 3)
    killed = subprocess.run(
        [sys.executable, "-m", "tests.support.dying_redrive", step, "3", "dlq", "redrive"],
        capture_output=True,
        check=False,
        timeout=2 * TIMEOUT_S,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    n_sent = {"before": 8, "after": 12}[step]
    assert len(letters.sent()) == n_sent
    assert letters.redrive()["sent"] == 20 - n_sent
    origins = Counter(headers["headrace.origin"] for *_, headers in letters.sent())
    assert origins == {f"{letters.topic}-{offset % 3}-{offset}".encode(): 1 for offset in range(20)}


def test_letters_of_several_views_are_one_record_that_is_meant_for_them(letters: Letters) -> None:
    views = [f"strict_{letters.name}", f"patient_{letters.name}"]
    for view in views:
        letters.write(offset=5, reason="missing_key", view=view)
    assert letters.redrive()["letters_by_reason"] == {"missing_key": 2}
    ((_, _, _, headers),) = letters.sent()
    assert headers["headrace.views"].decode().split(",") == sorted(views)


def test_late_rows_and_copies_go_only_where_they_are_asked_for(letters: Letters) -> None:
    for offset, reason in enumerate(["late", "duplicate", "overflow"]):
        letters.write(offset=offset, reason=reason, view=f"strict_{letters.name}")
    done = letters.redrive()
    assert done["letters_by_reason"] == {"overflow": 1}
    assert sum(done["skipped"].values()) == 2
    assert letters.redrive("--reason", "late")["letters_by_reason"] == {"late": 1}


def test_a_record_is_not_sent_for_ever(letters: Letters) -> None:
    letters.write(offset=9, headers=[("headrace.redriven", b"3"), ("headrace.origin", b"t-0-1")])
    done = letters.redrive()
    assert done["skipped"] == {"sent 3 times already (`--max-redrives` allows more)": 1}
    assert letters.redrive("--max-redrives", "4")["sent"] == 1
    ((_, _, _, headers),) = letters.sent()
    assert headers == {"headrace.redriven": b"4", "headrace.origin": b"t-0-1"}


def test_some_letters_are_chosen_by_name_number_and_rate(letters: Letters) -> None:
    for offset in range(10):
        letters.write(offset=offset)
    names = [entry["letter"] for entry in json.loads(letters.run("list", "--json").stdout)]
    assert letters.redrive(names[7], names[3])["sent"] == 2
    assert letters.redrive("--limit", "3", "--rate", "1000")["sent"] == 3
    assert letters.redrive("--rate", "50")["sent"] == 5
    origins = [headers["headrace.origin"].decode() for *_, headers in letters.sent()]
    assert sorted(origins) == [f"{letters.topic}-0-{offset}" for offset in range(10)]


def large(letters: Letters) -> bytes:
    """Put a record on the source that is too large for a letter, and its letter, which is cut."""
    value = bytes(range(256)) * 2**14
    letters.send(letters.topic, value, headers=[("trace", b"1")])
    digest = hashlib.sha256(value).hexdigest()
    letters.write(offset=0, value=value[:100], cut="value", value_bytes=len(value), value_sha256=digest)
    return value


def test_a_record_that_was_cut_is_sent_whole_from_its_source(letters: Letters) -> None:
    value = large(letters)
    assert letters.redrive()["sent"] == 1
    first, again = letters.sent()
    assert again[2] == first[2] == value
    assert again[3] == {"trace": b"1", "headrace.redriven": b"1", "headrace.origin": f"{letters.topic}-0-0".encode()}


def test_a_record_that_was_cut_and_is_gone_is_refused(letters: Letters) -> None:
    large(letters)
    at = TopicPartition(letters.topic, 0, 1)
    admin = AdminClient({"bootstrap.servers": letters.brokers})
    admin.delete_records([at])[at].result(TIMEOUT_S)
    done = letters.redrive()
    assert (done["sent"], done["skipped"]) == (0, {"cut, and the whole record is no longer on its source topic": 1})


def test_a_record_that_was_cut_is_not_mistaken_for_another_one(letters: Letters) -> None:
    letters.send(letters.topic, b"another", headers=[])
    letters.write(offset=0, value=b"v", cut="value", value_bytes=9, value_sha256="0" * 64)
    assert letters.redrive()["skipped"] == {"cut, and the record at its place on the source topic is another one": 1}


def test_partitions_and_topics_that_are_not_there_are_refused(letters: Letters) -> None:
    letters.write(offset=0, partition=7)
    letters.write(offset=0, topic="another")
    assert letters.redrive()["skipped"] == {
        f"of partition 7, which {letters.topic} has not (it has 3)": 1,
        f"of topic another, expected {letters.topic}": 1,
    }


def test_what_the_topic_does_not_take_is_an_error_and_sends_nothing_of_its_transaction(letters: Letters) -> None:
    letters.write(offset=0, value=b"small")
    # Larger than the source takes by now; it came when it took more.
    letters.write(offset=1, value=random.Random(1).randbytes(900_000))
    smaller(letters)
    done = letters.run("redrive")
    assert isinstance(done.exception, ServiceError)
    assert "does not take what is redriven" in str(done.exception)
    assert letters.sent() == []
    assert letters.redrive("--limit", "1")["sent"] == 1


def smaller(letters: Letters) -> None:
    bench = Workbench(letters.brokers, letters.application.parent)
    bench.topic = letters.topic
    bench.allow_bytes(100_000)


# -- with a worker ---------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    made = Workbench(kafka, tmp_path)
    (tmp_path / "shop.py").write_text(APPLICATION.format(topic=made.topic, name=made.name))
    monkeypatch.setenv("HEADRACE_KAFKA", kafka)
    monkeypatch.setenv("HEADRACE_APP", str(tmp_path / "shop.py"))
    yield made
    if made.worker is not None and made.worker.is_alive():
        made.worker.end(grace_s=TIMEOUT_S)


def test_a_row_that_one_view_had_counted_is_sent_again_for_the_other_alone(bench: Workbench) -> None:
    bench.start()
    # The third is late for the strict view, and in time for the patient one.
    bench.send_values([event(T0_MS), event(T0_MS + 300_000), event(T0_MS + 1_000)])
    bench.drain()
    redrive: Callable[..., Result] = lambda *options: CliRunner().invoke(  # noqa: E731
        app, ["dlq", "redrive", "--reason", "late", "--json", *options]
    )
    assert json.loads(redrive().stdout)[0]["sent"] == 1
    bench.drain()
    bench.until(lambda: len(bench.dead()) == 2, "it is late again")
    first, again = bench.dead()
    assert again["headrace.offset"] == b"3"
    assert again["headrace.origin"] == f"{bench.topic}-0-2".encode()
    assert {first["headrace.view"], again["headrace.view"]} == {f"strict_{bench.name}".encode()}
    assert bench.as_of("patient") == {(0, 0): 1, (0, 1): 1, (0, 2): 1}
    panes = {(row["window_end"], row["pane_index"]): row["x_2m"] for row in bench.rows("patient")}
    assert max(panes.values()) == 2
    refused = json.loads(redrive("--max-redrives", "1").stdout)[0]
    assert refused["sent"] == 0
    assert refused["skipped"]["sent 1 times already (`--max-redrives` allows more)"] == 1


def test_what_a_contract_marks_as_personal_is_shown_where_it_is_asked_for_alone(
    letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = json.loads((Path.cwd() / "schemas" / "events" / "shop_event@1.json").read_bytes())
    contract["properties"]["user_id"]["x-pii"] = True
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    (tmp_path / "schemas" / "events" / "private_event@1.json").write_text(json.dumps(contract))
    application = letters.application.read_text().replace("shop_event@1", "private_event@1")
    letters.application.write_text(application)
    monkeypatch.chdir(tmp_path)
    value = json.dumps({"user_id": "u1-secret", "amount": 5}).encode()
    letters.write(offset=1, value=value, detail="$.user_id: 'u1-secret' is too long")
    (entry,) = json.loads(letters.run("list", "--json").stdout)
    shown = letters.run("show", entry["letter"])
    for text in (letters.run("list").stdout, json.dumps(entry), shown.stdout):
        assert "***" in text
        assert "secret" not in text
        assert "u1" not in text
    assert json.loads(letters.run("show", entry["letter"], "--json").stdout)["value"] == {"user_id": "***", "amount": 5}
    revealed = json.loads(letters.run("show", entry["letter"], "--json", "--reveal").stdout)
    assert (revealed["key"], revealed["value"]["user_id"]) == ("u1", "u1-secret")
    assert "u1-secret" in letters.run("list", "--reveal").stdout
    # What is sent again is the record itself.
    assert letters.redrive()["sent"] == 1
    assert [(key, sent) for _, key, sent, _ in letters.sent()] == [(b"u1", value)]
