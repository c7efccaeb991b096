"""Where the rollout of a model stands: topic ``rollout.<model>``, compacted, of one partition, one for all workers.

``state``            the state and its limits, under a generation that goes up with each change;
``evidence/WORKER``  what a worker has seen of each version in a generation, as sums since that began.

Kafka has no compare-and-set. A transaction under one transactional id per model is one: to register the id ends what
another writer has open and fences it off; then the topic is read to its end, so that nothing stands there that was not
looked at; what is decided by it is committed, or refused where yet another writer has registered meanwhile, who has
then not seen it and decides anew. (KIP-98: an id belongs to its newest epoch.)
"""

import contextlib
import itertools
import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from schemas.errors import ConfigError, ServiceError
from schemas.model import ModelSpec, ServedVersion
from streams.inference.latency import BINS
from streams.inference.rollout import Evidence, Limits, Rollout, Stage
from streams.inference.tally import Tally, count_bins, merged

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 15.0
_PATIENCE_S: Final = 60.0
"""Writers who take the id from one another are through long before this; one who isn't by then has a stranger to it."""
_MAX_WAIT_S: Final = 2.0
_STATE: Final = b"state"
_EVIDENCE: Final = "evidence/"
_QUIET: Final = {"log_level": 2}  # each try to connect is an error of level 3; the one that counts is raised
_UNKNOWN: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
_TAKEN: Final = (
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    # What Kafka 4.4 answers where the id is being taken while a commit under it comes in. It may mean anything, so a
    # change is looked for on the topic before it is made again.
    KafkaError.UNKNOWN,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The state, as it stands on the topic.

    Attributes:
        generation: Which one it is; each change makes the next one.
        state: The state.
        limits: What the candidate may be worse by.
        change: Names the change that made it, by which its writer finds it again.
    """

    generation: int
    state: Rollout
    limits: Limits = field(default_factory=Limits)
    change: str = ""


@dataclass(kw_only=True)
class View:
    """What has been read of the topic.

    Attributes:
        n_bins: Bins of the model's scores. Evidence in other bins, of another release or contract, counts for nothing.
        entry: The state; None before the first worker has served the model.
        seen: By worker, the generation of its evidence, and its sums by version.
        made: By change, the state that it made, as far back as the topic goes.
    """

    n_bins: int
    entry: Entry | None = None
    made: dict[str, Entry] = field(default_factory=dict)
    seen: dict[str, tuple[int, dict[str, Tally]]] = field(default_factory=dict)

    def tally(self, version: ServedVersion | None) -> Tally:
        """Add up what all workers have seen of a version since the present state began."""
        if self.entry is None or version is None:
            return Tally()
        of_now = [tallies for generation, tallies in self.seen.values() if generation == self.entry.generation]
        return merged(tallies[version.version] for tallies in of_now if version.version in tallies)

    def seen_by(self, worker: str) -> dict[str, Tally]:
        """What a worker has seen of each version since the present state began; nothing where it has posted nothing."""
        generation, tallies = self.seen.get(worker, (0, {}))
        return tallies if self.entry is not None and generation == self.entry.generation else {}

    def take(self, key: bytes, value: bytes | None) -> None:
        """Take a record; one that is taken back, or of a worker whose evidence nobody can read, counts for nothing."""
        if key == _STATE:
            self.entry = None if value is None else self._comparable(_read_entry(value))
            if self.entry is not None:
                self.made[self.entry.change] = self.entry
        elif key.startswith(_EVIDENCE.encode()):
            worker = key.decode().removeprefix(_EVIDENCE)
            self.seen.pop(worker, None)
            if value is None:
                return
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                document = json.loads(value)
                tallies = {
                    version: Tally.from_document(sums, n_bins=self.n_bins)
                    for version, sums in document["versions"].items()
                }
                self.seen[worker] = (document["generation"], tallies)

    def _comparable(self, entry: Entry) -> Entry:
        """Leave out a baseline in other bins: the champion that is watched is judged by its failures alone then."""
        baseline = entry.state.baseline
        if baseline is None or (
            len(baseline.scores) in (0, self.n_bins)
            and all(len(counts) == BINS for counts in baseline.latency.values())
        ):
            return entry
        return replace(entry, state=replace(entry.state, baseline=None))


Decide = Callable[[View], Entry | None]
"""Makes the next entry, its generation left as it is; None to leave things as they are."""


class RolloutLog:
    """Reads the topic, and goes on reading it; used by one thread at a time.

    Args:
        brokers: Kafka bootstrap servers.
        model: The model.
    """

    def __init__(self, brokers: str, model: ModelSpec) -> None:
        self._brokers = brokers
        self._model = model
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._n_bins = count_bins(model.outputs[0])
        self.view = View(n_bins=self._n_bins)
        """What has been read so far."""

    def read(self) -> View:
        """Read the topic up to its end as of now.

        Raises:
            ServiceError: The broker does not answer, or there is no such topic.
        """
        self._end_reading()
        self.view = View(n_bins=self._n_bins)
        topic = self._model.rollout_topic
        config: dict[str, Any] = {
            "bootstrap.servers": self._brokers,
            "group.id": "headrace-read",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
            **_QUIET,
        }
        with self._told():
            self._consumer = Consumer(config)
            found = self._consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic]
            if found.error is not None:
                raise KafkaException(found.error)
            self._consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
            while not self._take(_TIMEOUT_S, is_end_awaited=True):
                pass
        return self.view

    def begin(self, newest: Callable[[], ServedVersion], *, now_us: int) -> Entry:
        """Read the state; where there is none, the newest version becomes the champion, for all workers.

        Args:
            newest: Finds the newest version; asked only where there is no state.
            now_us: The time.

        Raises:
            ServiceError: The broker does not answer, or there is no such topic.
        """

        def decide(view: View) -> Entry | None:
            if view.entry is not None:
                return None
            champion = newest()
            reason = f"version {champion.version} was the newest as the first worker began"
            state = Rollout(model=self._model.name, champion=champion, since_us=now_us, reason=reason)
            return Entry(generation=0, state=state)

        if (entry := self.read().entry) is None and (entry := self.change(decide)) is None:
            entry = self.read().entry  # another worker was faster
        if entry is None:
            msg = (
                f"the state on topic {self._model.rollout_topic} was taken back as a worker began; see which program "
                "writes there, and start it again"
            )
            raise ServiceError(msg)
        return entry

    def poll(self, timeout_s: float) -> View:
        """Take what has come since, or comes within ``timeout_s``.

        Raises:
            ServiceError: The broker refuses; one that is away for a while is waited for.
        """
        with self._told():
            self._take(timeout_s, is_end_awaited=False)
        return self.view

    def change(self, decide: Decide) -> Entry | None:
        """Decide by all that stands there, and write what is decided; nobody else writes a state in between.

        Args:
            decide: Called once or more, each time with what stands there then.

        Returns:
            What was written; None where ``decide`` leaves things as they are.

        Raises:
            ServiceError: The broker does not answer, or takes no transactions.
        """
        deadline = time.monotonic() + _PATIENCE_S
        change = uuid.uuid4().hex
        with self._told():
            for attempt in itertools.count():
                try:
                    return self._try_change(decide, change)
                except KafkaException as exc:
                    if exc.args[0].code() not in _TAKEN:
                        raise
                    logger.info("another one changes the rollout of %s: looking again", self._model.name)
                # Writers who come back at once fence each other off for ever: to wait for a random while that doubles
                # lets one of them through (Metcalfe and Boggs 1976).
                wait_s = random.uniform(0, min(_MAX_WAIT_S, 0.05 * 2**attempt))  # noqa: S311  # no secret
                if time.monotonic() + wait_s > deadline:
                    break
                time.sleep(wait_s)
        msg = (
            f"the rollout of {self._model.name} was being changed by others for {_PATIENCE_S:.0f} s, expected to get a "
            "turn; see which programs write it"
        )
        raise ServiceError(msg)

    def post(self, worker: str, *, generation: int, tallies: Mapping[str, Tally]) -> None:
        """Write what a worker has seen of each version in a generation, in the place of what it wrote before.

        Raises:
            ServiceError: The broker does not answer.
        """
        document = {
            "generation": generation,
            "versions": {version: tally.to_document() for version, tally in tallies.items()},
        }
        with self._told():
            if self._producer is None:
                self._producer = Producer({"bootstrap.servers": self._brokers, "enable.idempotence": True, **_QUIET})
            key = f"{_EVIDENCE}{worker}".encode()
            try:
                self._producer.produce(self._model.rollout_topic, key=key, value=json.dumps(document), partition=0)
                self._producer.poll(0)
            except KafkaException:
                self._producer = None  # one that has failed for good never sends again, the next one does
                raise

    def close(self) -> None:
        """End reading; what was posted last is sent."""
        self._end_reading()
        if self._producer is not None:
            self._producer.flush(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_change(self, decide: Decide, change: str) -> Entry | None:
        producer = Producer(
            {
                "bootstrap.servers": self._brokers,
                "transactional.id": f"headrace.{self._model.rollout_topic}",
                "transaction.timeout.ms": int(_TIMEOUT_S * 1000),
                **_QUIET,
            }
        )
        producer.init_transactions(_TIMEOUT_S)
        with RolloutLog(self._brokers, self._model) as log:
            view = log.read()
        if change in view.made:  # its commit went through, though the answer did not
            return view.made[change]
        decided = decide(view)
        if decided is None:
            return None
        generation = 1 if view.entry is None else view.entry.generation + 1
        made = replace(decided, generation=generation, change=change)
        producer.begin_transaction()
        producer.produce(self._model.rollout_topic, key=_STATE, value=_write_entry(made), partition=0)
        producer.commit_transaction(_TIMEOUT_S)
        return made

    def _take(self, timeout_s: float, *, is_end_awaited: bool) -> bool:
        """Take records; tells whether the end was reached."""
        if self._consumer is None:
            msg = "the topic of a rollout is read before it is followed"
            raise AssertionError(msg)
        messages = self._consumer.consume(1, timeout_s)
        messages += self._consumer.consume(1_000, 0) if messages else []
        if not messages and is_end_awaited:
            msg = f"no answer within {timeout_s:.0f} s; a transaction may be open there"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, msg))
        is_end = False
        for message in messages:
            if (error := message.error()) is None:
                self.view.take(message.key() or b"", message.value())
            elif error.code() == KafkaError._PARTITION_EOF:
                is_end = True
            elif not error.retriable():
                raise KafkaException(error)
        return is_end

    def _end_reading(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as exc:
            topic = self._model.rollout_topic
            error = exc.args[0]
            if error.code() in _UNKNOWN:
                msg = (
                    f"there is no topic {topic} at {self._brokers}, expected it made already; run `headrace topics "
                    "apply` (or `up`, or a worker)"
                )
            else:
                msg = f"topic {topic} at {self._brokers} cannot be read or written: {error.str()}; see whether it is up"
            raise ServiceError(msg) from exc


def _write_entry(entry: Entry) -> bytes:
    return json.dumps(asdict(entry)).encode()


def _read_entry(value: bytes) -> Entry:
    try:
        document = json.loads(value)
        state = dict(document["state"])
        for name in ("champion", "candidate", "previous"):
            state[name] = None if state[name] is None else ServedVersion(**state[name])
        if (baseline := state["baseline"]) is not None:
            latency = {int(size): tuple(counts) for size, counts in baseline["latency"].items()}
            scores = tuple(baseline["scores"])
            state["baseline"] = Evidence(**{**baseline, "scores": scores, "latency": latency})
        state |= {"stage": Stage(state["stage"]), "shares": tuple(state["shares"])}
        return Entry(**{**document, "state": Rollout(**state), "limits": Limits(**document["limits"])})
    except (ValueError, KeyError, TypeError) as exc:
        msg = (
            f"the state of a rollout is {value[:200]!r} ({exc}), expected one that this release wrote; use the "
            "release that wrote it, or stop the workers and delete the topic: the next one begins with the newest "
            "version"
        )
        raise ConfigError(msg) from exc
