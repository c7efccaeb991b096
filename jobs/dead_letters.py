"""Reads dead letters, and chooses among them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jobs.application import Application
from jobs.topic_reader import read_topic
from schemas.contract import Contract
from schemas.errors import ConfigError
from schemas.row import Reason
from schemas.time import parse_rfc3339_us
from schemas.topology import connect
from streams.dead_letter import DeadLetter, read_dead_letters


@dataclass(frozen=True, kw_only=True)
class LetterSource:
    """What has a dead-letter topic.

    Attributes:
        name: By which it is asked for: the topic of an event source, or ``scores.<model>``.
        dead_letter_topic: Its dead-letter topic.
        contract: Contract of the payloads; None of a model, whose letters are feature rows.
    """

    name: str
    dead_letter_topic: str
    contract: Contract | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which letters are meant; each condition holds where it is given.

    Attributes:
        reasons: Reason codes.
        views: Names of views; a letter that every view of a source would write is among those of each.
        from_us: First time of writing.
        to_us: End (exclusive) of times of writing.
        names: Places of letters, ``topic-partition-offset``.
    """

    reasons: frozenset[str] = field(default_factory=frozenset)
    views: frozenset[str] = field(default_factory=frozenset)
    from_us: int | None = None
    to_us: int | None = None
    names: frozenset[str] = field(default_factory=frozenset)

    def has(self, letter: DeadLetter) -> bool:
        """Tell whether a letter is meant."""
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (not self.views or letter.view is None or letter.view in self.views)
            and (self.from_us is None or letter.time_us >= self.from_us)
            and (self.to_us is None or letter.time_us < self.to_us)
            and (not self.names or letter.name in self.names)
        )


def letter_sources(application: Application) -> dict[str, LetterSource]:
    """List what has a dead-letter topic, by name."""
    sources = connect(list(application.views.values())).sources.values()
    found = [LetterSource(name=s.topic, dead_letter_topic=s.dead_letter_topic, contract=s.schema) for s in sources]
    models = application.models.values()
    found += [LetterSource(name=m.topic, dead_letter_topic=m.dead_letter_topic, contract=None) for m in models]
    return {source.name: source for source in found}


def choose_sources(known: Mapping[str, LetterSource], names: Sequence[str] | None) -> list[LetterSource]:
    """Find sources by name, or by the name of their dead-letter topic; all where none is named.

    Raises:
        ConfigError: There is none of a name.
    """
    chosen = {}
    for name in names or known:
        plain = name if name in known else name.removeprefix("dlq.")
        if plain not in known:
            msg = f"source is {name!r}, expected one of {sorted(known)}"
            raise ConfigError(msg)
        chosen[plain] = known[plain]
    return list(chosen.values())


def choose_letters(
    application: Application,
    *,
    reasons: Sequence[str] | None = None,
    views: Sequence[str] | None = None,
    from_time: str | None = None,
    to_time: str | None = None,
    names: Sequence[str] | None = None,
) -> Choice:
    """Make a choice of what is asked for on the command line.

    Raises:
        ConfigError: A reason or view is none, a time is no RFC 3339, or the range is empty.
    """
    if unknown := sorted(set(reasons or ()) - {reason.value for reason in Reason}):
        msg = f"reason is {', '.join(unknown)}, expected one of {', '.join(reason.value for reason in Reason)}"
        raise ConfigError(msg)
    from_us, to_us = _time_us(from_time, "--from"), _time_us(to_time, "--to")
    if from_us is not None and to_us is not None and from_us >= to_us:
        msg = f"`--from` {from_time} is not before `--to` {to_time}"
        raise ConfigError(msg)
    return Choice(
        reasons=frozenset(reasons or ()),
        views=frozenset(application.view(view).name for view in views or ()),
        from_us=from_us,
        to_us=to_us,
        names=frozenset(names or ()),
    )


def _time_us(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    # A day is what people ask for.
    whole = f"{text}T00:00:00Z" if len(text) == len("2026-01-31") else text
    try:
        return parse_rfc3339_us(whole)
    except ValueError as exc:
        msg = f"`{option}` is {text!r}, expected RFC 3339 such as '2026-01-31T12:00:00Z', or a day such as '2026-01-31'"
        raise ConfigError(msg) from exc


@dataclass
class Letters:
    """Chosen letters of one source.

    Attributes:
        brokers: Kafka bootstrap servers.
        source: Where they are from.
        choice: Which ones are meant.
        n_others: How many records of what has been read are no dead letters.
    """

    brokers: str
    source: LetterSource
    choice: Choice
    n_others: int = 0

    def batches(self, *, start_offsets: Mapping[int, int] | None = None) -> Iterator[list[DeadLetter]]:
        """Read the topic, some letters of one partition at a time.

        Raises:
            ServiceError: It cannot be read.
        """
        for batch in read_topic(self.brokers, self.source.dead_letter_topic, start_offsets=start_offsets):
            letters, n_others = read_dead_letters(batch)
            self.n_others += n_others
            yield [letter for letter in letters if self.choice.has(letter)]

    def __iter__(self) -> Iterator[DeadLetter]:
        """Read the topic, letter by letter."""
        for letters in self.batches():
            yield from letters
