"""How good the predictions turn out: scores matched with the landings that follow them."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
import polars as pl
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from jobs.flights.model import LATE_ARRIVAL, LATE_MINUTES
from jobs.flights.views import landings
from offline.evaluation import brier, roc_auc
from schemas.errors import ServiceError

_POLL_S = 0.2
_MAX_RECORDS = 5_000
# librdkafka tells that brokers are away, and tries again by itself.
_PASSING = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._TIMED_OUT)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of the predictions whose flights have landed.

    Attributes:
        flights: Flights that were scored and have landed.
        late_share: Share of them that landed late.
        auc: Area under the ROC curve; None while all were late or none was.
        brier: Brier score; None while there is no flight.
    """

    flights: int
    late_share: float
    auc: float | None
    brier: float | None


class Scoreboard:
    """Follows the scores and the landings on a thread of its own.

    Args:
        brokers: Kafka bootstrap servers.
        start_offsets: First offset to read, by topic and partition.
    """

    def __init__(self, brokers: str, *, start_offsets: Mapping[str, Mapping[int, int]]) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": brokers,
                "group.id": "headrace-scoreboard",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "log_level": 2,  # each try to connect is an error of level 3, and would tear up what is shown
            }
        )
        self._consumer.assign(
            [
                TopicPartition(topic, number, offset)
                for topic, at in start_offsets.items()
                for number, offset in at.items()
            ]
        )
        self._lock = threading.Lock()
        self._scores: dict[str, tuple[float, bool]] = {}
        self._landings: dict[str, bool] = {}
        self.n_scores = 0
        self.n_complete = 0
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="scoreboard", daemon=True)
        self._thread.start()

    def quality(self, *, complete_only: bool = False) -> Quality:
        """Measure the predictions so far; ``complete_only`` leaves out those that lacked an input.

        Raises:
            ServiceError: Scores and landings can no longer be followed.
        """
        if self._failure is not None:
            msg = f"scores and landings can no longer be followed: {self._failure}"
            raise ServiceError(msg) from self._failure
        with self._lock:
            matched = [
                (self._scores[flight][0], is_late)
                for flight, is_late in self._landings.items()
                if flight in self._scores and (self._scores[flight][1] or not complete_only)
            ]
        frame = pl.DataFrame(matched, schema={"probability": pl.Float64, "late": pl.Boolean}, orient="row")
        late = frame["late"].to_numpy()
        if not frame.height:
            return Quality(flights=0, late_share=0.0, auc=None, brier=None)
        probability = frame["probability"].to_numpy()
        return Quality(
            flights=frame.height,
            late_share=float(late.mean()),
            auc=roc_auc(late, probability),
            brier=brier(late, probability),
        )

    def close(self) -> None:
        """Stop following."""
        self._stopping.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for message in self._consumer.consume(_MAX_RECORDS, _POLL_S):
                    if (error := message.error()) is None:
                        self._take(message.topic() or "", message.value() or b"")
                    elif not error.retriable() and error.code() not in _PASSING:
                        raise KafkaException(error)
        except Exception as exc:
            self._failure = exc

    def _take(self, topic: str, value: bytes) -> None:
        try:
            document = orjson.loads(value)
        except orjson.JSONDecodeError:
            return  # a corrupted landing: the pipeline has made a dead letter of it
        with self._lock:
            if topic == LATE_ARRIVAL.topic:
                self._scores[document["entity"]] = (document["late_probability"], document["complete"])
                self.n_scores += 1
                self.n_complete += document["complete"]
            elif topic == landings.topic and isinstance(document.get("arrival_delay"), int | float):
                self._landings[document["flight_id"]] = document["arrival_delay"] > LATE_MINUTES
