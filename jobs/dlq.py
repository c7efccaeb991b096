"""The commands ``headrace dlq list|stats|show|redrive``."""

import json
import os
from collections import Counter, deque
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from jobs.application import Application, load_application
from jobs.dead_letters import Choice, Letters, choose_letters, choose_sources, letter_sources
from jobs.letter_mask import LetterMask, masked
from jobs.reach import reach_kafka
from jobs.redrive import Redriven
from jobs.redrive import redrive as send_again
from jobs.settings import Settings
from jobs.topics import count_partitions
from schemas.errors import ConfigError
from schemas.time import format_rfc3339
from streams.dead_letter import DeadLetter

app = typer.Typer(
    name="dlq",
    help="Look at rows that are in no feature or score, and send them again.",
    add_completion=False,
    no_args_is_help=True,
)

_Sources = Annotated[
    list[str] | None,
    typer.Option("--source", help="Topic of an event source, or scores.<model>; all when left out. May be repeated."),
]
_Reasons = Annotated[list[str] | None, typer.Option("--reason", help="Reason code, e.g. late. May be repeated.")]
_Views = Annotated[
    list[str] | None,
    typer.Option("--view", help="Letters of this view, and those of every view of its source. May be repeated."),
]
_From = Annotated[str | None, typer.Option("--from", help="Written at or after this time (RFC 3339, or a day).")]
_To = Annotated[str | None, typer.Option("--to", help="Written before this time.")]
_Reveal = Annotated[bool, typer.Option("--reveal", help="Show what the contract marks as personal (`x-pii`), too.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]


@app.command("list")
def list_(
    *,
    source: _Sources = None,
    reason: _Reasons = None,
    view: _Views = None,
    from_time: _From = None,
    to_time: _To = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest of each partition.")] = 50,
    reveal: _Reveal = False,
    as_json: _Json = False,
) -> None:
    """List dead letters, the newest last.

    Values that their contract marks as personal are masked.
    """
    application, brokers = _open()
    choice = choose_letters(application, reasons=reason, views=view, from_time=from_time, to_time=to_time)
    newest: deque[DeadLetter] = deque(maxlen=limit)
    for letters in _letters(application, brokers, source, choice):
        mask = LetterMask(application, letters.source)
        newest.extend(letter if reveal else masked(letter, mask) for letter in letters)
    shown = sorted(newest, key=lambda letter: (letter.time_us, letter.topic, letter.partition, letter.offset))
    if as_json:
        typer.echo(json.dumps([_document(letter) for letter in shown], indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    for letter in shown:
        where = f"view {letter.view}" if letter.view else "every view"
        again = f"  [yellow]sent again {letter.n_redriven} times[/]" if letter.n_redriven else ""
        console.print(
            f"[bold]{escape(letter.name)}[/]  {_time(letter)}  [cyan]{letter.reason}[/]  {escape(where)}{again}",
            soft_wrap=True,
        )
        console.print(f"    {escape(letter.facts.get('detail', ''))}", soft_wrap=True)
    if not shown:
        console.print("There are no such dead letters.")


@app.command()
def stats(
    *,
    source: _Sources = None,
    reason: _Reasons = None,
    view: _Views = None,
    from_time: _From = None,
    to_time: _To = None,
    as_json: _Json = False,
) -> None:
    """Count dead letters by source, reason and view."""
    application, brokers = _open()
    choice = choose_letters(application, reasons=reason, views=view, from_time=from_time, to_time=to_time)
    counts: Counter[tuple[str, str, str | None]] = Counter()
    times: dict[tuple[str, str, str | None], tuple[int, int]] = {}
    for letters in _letters(application, brokers, source, choice):
        for letter in letters:
            key = (letters.source.name, letter.reason, letter.view)
            counts[key] += 1
            first, last = times.get(key, (letter.time_us, letter.time_us))
            times[key] = (min(first, letter.time_us), max(last, letter.time_us))
    rows: list[dict[str, Any]] = [
        {
            "source": key[0],
            "reason": key[1],
            "view": key[2],
            "letters": count,
            "first": format_rfc3339(times[key][0]),
            "last": format_rfc3339(times[key][1]),
        }
        for key, count in counts.most_common()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        where = f"view {row['view']}" if row["view"] else "every view"
        typer.echo(f"{row['letters']:>9,}  {row['reason']:<17} {row['source']}, {where}, last {row['last'][:19]}Z")
    typer.echo(f"{counts.total():>9,}  in all")


@app.command()
def show(
    letter: Annotated[str, typer.Argument(help="As `headrace dlq list` names it, e.g. dlq.flights.landed-0-12.")],
    *,
    reveal: _Reveal = False,
    as_json: _Json = False,
) -> None:
    """Show one dead letter: the record, where it was, and why it is here.

    Values that its contract marks as personal are masked.
    """
    application, brokers = _open()
    found, source = _find(application, brokers, letter)
    if not reveal:
        found = masked(found, LetterMask(application, letter_sources(application)[source]))
    document = _document(found) | {"headers": _headers(found), "value": _value(found.value)}
    if as_json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    width = max(map(len, document))
    for name, value in document.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        typer.echo(f"{name:<{width}}  {text}")


@app.command()
def redrive(
    letter: Annotated[
        list[str] | None,
        typer.Argument(metavar="LETTER", help="As `headrace dlq list` names them; all that the options leave."),
    ] = None,
    *,
    source: _Sources = None,
    reason: _Reasons = None,
    view: _Views = None,
    from_time: _From = None,
    to_time: _To = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Records to send at most, from each source.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.1, help="Records a second at most.")] = None,
    max_redrives: Annotated[
        int, typer.Option(min=1, help="Refuse a record that has been sent again so often already.")
    ] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be sent, and send nothing.")] = False,
    as_json: _Json = False,
) -> None:
    """Send the records of dead letters again, to the partitions of the source that they came from.

    Each once: what has been sent is recorded in the same transaction, so that another redrive leaves it out. A record
    that some views had counted goes to the others alone. Rows that are late or duplicates would be so again: they are
    left out unless `--reason` names them.
    """
    application, brokers = _open()
    choice = choose_letters(application, reasons=reason, views=view, from_time=from_time, to_time=to_time, names=letter)
    if letter:
        source = sorted({_find(application, brokers, name)[1] for name in letter})
    elif not source:
        # What a model gave no score for can't be sent again: it is told where it is asked for.
        source = [name for name, found in letter_sources(application).items() if found.contract is not None]
    documents = []
    for letters in _letters(application, brokers, source, choice):
        done = send_again(brokers, letters, max_redrives=max_redrives, limit=limit, rate=rate, is_dry_run=dry_run)
        documents.append(_redriven_document(letters, done, is_dry_run=dry_run))
        if not as_json:
            _print_redriven(letters, done, is_dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(documents, indent=2))


def _redriven_document(letters: Letters, done: Redriven, *, is_dry_run: bool) -> dict[str, Any]:
    return {
        "source": letters.source.name,
        "dry_run": is_dry_run,
        "sent": done.n_sent,
        "letters_by_reason": dict(done.by_reason),
        "skipped": dict(done.skipped),
    }


def _print_redriven(letters: Letters, done: Redriven, *, is_dry_run: bool) -> None:
    verb = "would be sent" if is_dry_run else "sent"
    reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(done.by_reason.items()))
    typer.echo(f"{letters.source.name}: {done.n_sent:,} {verb}" + (f" ({reasons})" if reasons else ""))
    for why, count in done.skipped.most_common():
        typer.echo(f"  {count:,} left out: {why}")


def _open() -> tuple[Application, str]:
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    brokers = settings.address("kafka")
    reach_kafka(brokers)
    return application, brokers


def _letters(application: Application, brokers: str, names: list[str] | None, choice: Choice) -> Iterator[Letters]:
    """Letters of each source; one whose topic is not there has none, unless it was named."""
    sources = choose_sources(letter_sources(application), names)
    there = count_partitions(brokers, [source.dead_letter_topic for source in sources])
    for source in sources:
        if source.dead_letter_topic not in there:
            if names:
                msg = f"there is no topic {source.dead_letter_topic}, expected it; `headrace topics apply` makes it"
                raise ConfigError(msg)
            continue
        letters = Letters(brokers, source, choice)
        yield letters
        if letters.n_others:
            typer.echo(f"{source.dead_letter_topic}: {letters.n_others} records are no dead letters", err=True)


def _find(application: Application, brokers: str, name: str) -> tuple[DeadLetter, str]:
    """Find a letter, and the name of its source."""
    topic, *place = name.rsplit("-", 2)
    if len(place) != 2 or not all(number.isdigit() for number in place):
        msg = f"letter is {name!r}, expected topic-partition-offset as `headrace dlq list` names it"
        raise ConfigError(msg)
    partition, offset = map(int, place)
    choice = choose_letters(application, names=[name])
    for letters in _letters(application, brokers, [topic], choice):
        for batch in letters.batches(start_offsets={partition: offset}):
            for letter in batch:
                return letter, letters.source.name
    msg = f"there is no dead letter {name}: `headrace dlq list` names those that are there"
    raise ConfigError(msg)


def _document(letter: DeadLetter) -> dict[str, Any]:
    topic, partition, offset = letter.place
    late_by = letter.facts.get("late_by_us")
    return {
        "letter": letter.name,
        "time": format_rfc3339(letter.time_us),
        "reason": letter.reason,
        "detail": letter.facts.get("detail"),
        "view": letter.view,
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "late_by_us": None if late_by is None else int(late_by),
        "cut": letter.facts.get("cut"),
        "redriven": letter.n_redriven,
        "origin": letter.origin,
        "key": _text(letter.key),
    }


def _time(letter: DeadLetter) -> str:
    return f"{format_rfc3339(letter.time_us)[:19]}Z"


def _headers(letter: DeadLetter) -> dict[str, str | None]:
    return {name: _text(value) for name, value in letter.headers}


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode("utf-8", "backslashreplace")


def _value(content: bytes | None) -> Any:
    try:
        return json.loads(content or b"")
    except ValueError:
        return _text(content)
