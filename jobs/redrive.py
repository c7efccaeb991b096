"""Sends dead letters to their sources again: each once, and none for ever.

What has been sent is recorded on ``redriven.<source>``, a compacted topic, in the Kafka transaction that sends it. So a
redrive that is killed, or run twice, or by two people at once, sends no row a second time: the transactional id is that
of the source, and who comes later fences who came earlier before it reads what has been sent.
"""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from jobs.dead_letters import Letters
from jobs.topic_reader import read_topic
from jobs.topics import count_partitions, ensure_topics, redriven_topic
from schemas.errors import ConfigError, ServiceError
from schemas.row import Reason
from streams.dead_letter import DeadLetter, marked, place_name

SENT_AGAIN_FOR_NOTHING: Final = frozenset({Reason.LATE, Reason.DUPLICATE})
"""Reasons that hold again, unless a definition has changed: these rows go only where they are asked for."""
_TIMEOUT_S: Final = 15.0
_CHUNK_ROWS: Final = 500
_CHUNK_BYTES: Final = 32 * 2**20
_LARGEST_RECORD: Final = 1_000_000_000
"""As large as the client can: what a topic takes is the broker's to say."""


@dataclass(kw_only=True)
class Redriven:
    """What became of letters.

    Attributes:
        n_sent: Records sent, or in a dry run those that would be.
        skipped: How many letters were not sent, by why not.
        by_reason: Letters sent, by reason.
    """

    n_sent: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)


@dataclass
class _Row:
    """A record to be sent, and the letters that it answers: one for each view that rejected it."""

    letters: list[DeadLetter]
    partition: int
    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def views(self) -> frozenset[str] | None:
        addressed = [letter.addressed for letter in self.letters]
        return None if None in addressed else frozenset[str]().union(*(views for views in addressed if views))

    @property
    def size_bytes(self) -> int:
        return len(self.key or b"") + len(self.value or b"")


def redrive(
    brokers: str,
    letters: Letters,
    *,
    max_redrives: int,
    limit: int | None = None,
    rate: float | None = None,
    is_dry_run: bool = False,
    on_sent: Callable[[Redriven], object] = lambda sent: None,
) -> Redriven:
    """Send letters to the partitions that they came from.

    Args:
        brokers: Kafka bootstrap servers.
        letters: Letters of one source.
        max_redrives: How often a record may be sent again in all.
        limit: Records that are sent at most.
        rate: Records a second at most.
        is_dry_run: Whether to look only.
        on_sent: Told after each commit.

    Raises:
        ConfigError: They are of a model.
        ServiceError: The broker cannot be reached, or does not take a record; what was committed before is recorded.
    """
    source = letters.source
    if source.contract is None:
        msg = (
            f"{source.dead_letter_topic} holds feature rows that a model gave no score for, expected letters of an "
            "event source: sent again they would stand twice in the offline store. The next row of each entity is "
            "scored anew"
        )
        raise ConfigError(msg)
    receipts = redriven_topic(source.name).name
    done = Redriven()
    if is_dry_run:
        sent = _read_receipts(brokers, receipts) if count_partitions(brokers, [receipts]) else set()
        for rows in _chunks(brokers, letters, sent, done, max_redrives=max_redrives, limit=limit, size=_CHUNK_ROWS):
            _count(done, rows)
        return done
    ensure_topics(brokers, [replace(redriven_topic(source.name), like=())], partitions=1)
    size = _CHUNK_ROWS if rate is None else max(1, min(_CHUNK_ROWS, int(rate)))
    with _transactions(brokers, source.name) as producer:
        sent = _read_receipts(brokers, receipts)
        due_s = time.monotonic()
        for rows in _chunks(brokers, letters, sent, done, max_redrives=max_redrives, limit=limit, size=size):
            time.sleep(max(0.0, due_s - time.monotonic()))
            _send(producer, source.name, receipts, rows)
            due_s = max(due_s, time.monotonic() - 1.0) + (len(rows) / rate if rate else 0.0)
            _count(done, rows)
            on_sent(done)
    return done


def _count(done: Redriven, rows: Sequence[_Row]) -> None:
    done.n_sent += len(rows)
    done.by_reason.update(letter.reason for row in rows for letter in row.letters)


def _chunks(
    brokers: str,
    letters: Letters,
    sent: set[str],
    done: Redriven,
    *,
    max_redrives: int,
    limit: int | None,
    size: int,
) -> Iterator[list[_Row]]:
    """Yield the records to send, with what is left of large ones fetched; ``sent`` takes what is yielded."""
    source = letters.source.name
    n_partitions = count_partitions(brokers, [source]).get(source, 0)
    n_left = sys.maxsize if limit is None else limit
    for batch in letters.batches():
        rows: dict[tuple[str, int, int], _Row] = {}
        for letter in batch:
            why = _refusal(letter, letters, sent, max_redrives=max_redrives, n_partitions=n_partitions)
            if why is not None:
                done.skipped[why] += 1
                continue
            sent.add(_receipt(letter))
            rows.setdefault(letter.place, _Row([], partition=letter.place[1])).letters.append(letter)
        chunk: list[_Row] = []
        n_bytes = 0
        for _, row in sorted(rows.items()):
            if n_left == 0:
                break
            if (why := _fill(brokers, row)) is not None:
                done.skipped[why] += len(row.letters)
                continue
            n_left -= 1
            n_bytes += row.size_bytes
            chunk.append(row)
            if len(chunk) >= size or n_bytes >= _CHUNK_BYTES:
                yield chunk
                chunk, n_bytes = [], 0
        if chunk:
            yield chunk
        if n_left == 0:
            return


def _refusal(
    letter: DeadLetter, letters: Letters, sent: set[str], *, max_redrives: int, n_partitions: int
) -> str | None:
    """Say why a letter is not sent; None where it may be."""
    topic, partition, _ = letter.place
    if _receipt(letter) in sent:
        return "sent before"
    if letter.reason in SENT_AGAIN_FOR_NOTHING and letter.reason not in letters.choice.reasons:
        return f"{letter.reason}, which it would be again (name it by `--reason` to send it all the same)"
    if letter.n_redriven >= max_redrives:
        return f"sent {letter.n_redriven} times already (`--max-redrives` allows more)"
    if topic != letters.source.name:
        return f"of topic {topic}, expected {letters.source.name}"
    if partition >= n_partitions:
        return f"of partition {partition}, which {topic} has not (it has {n_partitions})"
    return None


def _receipt(letter: DeadLetter) -> str:
    return place_name(*letter.place) + (f"/{letter.view}" if letter.view else "")


def _fill(brokers: str, row: _Row) -> str | None:
    """Put the record into a row: from its letter, or where that is cut from its source; else say why not."""
    letter = row.letters[0]
    row.key, row.value, row.headers = letter.key, letter.value, letter.headers
    if not letter.is_cut:
        return None
    found = _read_record(brokers, *letter.place)
    if found is None:
        return "cut, and the whole record is no longer on its source topic"
    if not all(_is_original(letter, name, content) for name, content in zip(("key", "value"), found[:2], strict=True)):
        return "cut, and the record at its place on the source topic is another one"
    row.key, row.value, row.headers = found
    return None


def _is_original(letter: DeadLetter, name: str, content: bytes | None) -> bool:
    digest = letter.facts.get(f"{name}_sha256")
    if digest is None:
        return content == {"key": letter.key, "value": letter.value}[name]
    return content is not None and hashlib.sha256(content).hexdigest() == digest


def _read_record(
    brokers: str, topic: str, partition: int, offset: int
) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes]]] | None:
    config: dict[str, Any] = {
        "bootstrap.servers": brokers,
        "group.id": "headrace-read",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "fetch.message.max.bytes": 1,  # one record is wanted: the first comes however large it is
        "log_level": 2,
    }
    consumer = Consumer(config)
    try:
        consumer.assign([TopicPartition(topic, partition, offset)])
        message = consumer.poll(_TIMEOUT_S)
        if message is None:
            msg = f"{place_name(topic, partition, offset)} at {brokers} cannot be read within {_TIMEOUT_S:.0f} s"
            raise ServiceError(msg)
        if (error := message.error()) is not None:
            if error.code() in (
                KafkaError._PARTITION_EOF,
                KafkaError._AUTO_OFFSET_RESET,
                KafkaError.OFFSET_OUT_OF_RANGE,
            ):
                return None
            raise KafkaException(error)
        if message.offset() != offset:
            return None
        headers: Any = message.headers() or []
        return message.key(), message.value(), headers
    except KafkaException as exc:
        msg = f"{place_name(topic, partition, offset)} at {brokers} cannot be read: {exc.args[0].str()}"
        raise ServiceError(msg) from exc
    finally:
        consumer.close()


def _read_receipts(brokers: str, topic: str) -> set[str]:
    return {(key or b"").decode() for batch in read_topic(brokers, topic) for key in batch.keys}


@contextmanager
def _transactions(brokers: str, source: str) -> Iterator[Producer]:
    producer = Producer(
        {
            "bootstrap.servers": brokers,
            "transactional.id": f"headrace.redrive.{source}",
            "message.max.bytes": _LARGEST_RECORD,
            "queue.buffering.max.kbytes": 1_024 * 1_024,
            "compression.type": "lz4",
            "log_level": 2,
        }
    )
    try:
        producer.init_transactions(_TIMEOUT_S)
        yield producer
    except KafkaException as exc:
        error: Any = exc.args[0]
        if error.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
            msg = f"another redrive of {source} has begun and ended this one; what was sent is recorded, and goes once"
        else:
            msg = (
                f"Kafka at {brokers} does not take what is redriven to {source}: {error.str()}; what was sent before "
                "is recorded: run it again once the topic takes it, or leave the record out (`--reason`, `--limit`)"
            )
        raise ServiceError(msg) from exc


def _send(producer: Producer, source: str, receipts: str, rows: Sequence[_Row]) -> None:
    """Send records, and record it, in one transaction."""
    failures: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, _: object) -> None:
        if error is not None:
            failures.append(error)

    producer.begin_transaction()
    try:
        for row in rows:
            late_for = frozenset[str]().union(*(letter.late_for for letter in row.letters))
            headers = marked(row.letters[0], headers=row.headers, views=row.views, late_for=late_for)
            producer.produce(
                source, key=row.key, value=row.value, headers=headers, partition=row.partition, on_delivery=on_delivery
            )
            for letter in row.letters:
                receipt = {"letter": letter.name, "reason": letter.reason, "redriven": letter.n_redriven + 1}
                producer.produce(receipts, key=_receipt(letter).encode(), value=json.dumps(receipt).encode())
            producer.poll(0)
        producer.flush(_TIMEOUT_S)
        if failures:
            raise KafkaException(failures[0])
        producer.commit_transaction(_TIMEOUT_S)
    except KafkaException as exc:
        if exc.args[0].code() not in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED):
            try:
                producer.abort_transaction(_TIMEOUT_S)
            except KafkaException as failure:
                exc.add_note(f"and is not aborted: {failure}; the broker does it in a minute")
        raise
