"""Masks what is personal in a dead letter before it is shown."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jobs.application import Application
from jobs.dead_letters import LetterSource
from schemas.row import MASK
from schemas.topology import connect
from streams.dead_letter import DeadLetter


class LetterMask:
    """What is hidden of the letters of one source.

    Fields are known by the contract; so of a payload that is no JSON object, or was cut, nothing is shown at all.
    """

    def __init__(self, application: Application, source: LetterSource) -> None:
        views = list(application.views.values())
        if source.contract is not None:
            self._personal = source.contract.personal
            event_source = connect(views).sources[source.name]
            reading = [view.entity.key for view in views if event_source in view.sources]
            keys = reading if event_source.key is None else [event_source.key]
        else:
            (view,) = (
                application.views[model.trigger.name]
                for model in application.models.values()
                if model.topic == source.name
            )
            self._personal = view.personal
            keys = [view.entity.key]
        # A topic that is keyed by no field may be keyed by anything.
        self._is_key_hidden = bool(self._personal) and (not all(keys) or bool(self._personal & set(keys)))

    def key(self, letter: DeadLetter) -> bytes | None:
        """The record's key, as it may be shown."""
        return MASK.encode() if self._is_key_hidden and letter.key is not None else letter.key

    def value(self, letter: DeadLetter) -> bytes | None:
        """The record's payload, as it may be shown."""
        if not self._personal or letter.value is None:
            return letter.value
        if (document := _object(letter.value)) is None:
            return f"{MASK} ({len(letter.value)} bytes in which fields cannot be told; `--reveal` shows them)".encode()
        shown = {name: MASK if name in self._personal else value for name, value in document.items()}
        return json.dumps(shown).encode()

    def detail(self, letter: DeadLetter) -> str | None:
        """Why it is here: a letter of before a field was marked may quote it."""
        detail = letter.facts.get("detail")
        if not self._personal or detail is None:
            return detail
        if (document := _object(letter.value or b"")) is None:
            return detail if letter.reason == "decode_error" else MASK
        for name in self._personal:
            if detail.startswith((f"$.{name}:", f"$.{name}[")) and MASK not in detail:
                return f"$.{name}: {MASK}"
        quoted = {text for name in self._personal for text in _quotations(document.get(name))}
        for text in sorted(quoted, key=len, reverse=True):
            detail = detail.replace(text, MASK)
        return detail


def masked(letter: DeadLetter, mask: LetterMask) -> DeadLetter:
    """Make a letter that may be shown."""
    detail = mask.detail(letter)
    facts = letter.facts if detail is None else {**letter.facts, "detail": detail}
    return replace(letter, key=mask.key(letter), value=mask.value(letter), facts=facts)


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _quotations(value: Any) -> Iterator[str]:
    """Yield the ways in which a detail may quote a value."""
    if isinstance(value, list):
        yield repr(value)
        for item in value:
            yield from _quotations(item)
    elif value is not None and not isinstance(value, bool) and value not in ("", {}):
        yield from (repr(value), str(value), json.dumps(value))
