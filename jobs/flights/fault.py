"""What can go wrong with a report on its way: it is delayed, or its payload is corrupted.

Whether and how is drawn for each report from the seed and the report's place among those of the whole year, so that
it does not depend on the range that is produced.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jobs.flights.dataset import LANDED
from schemas.errors import ConfigError
from schemas.row import Reason
from schemas.time import format_rfc3339, parse_rfc3339_us

MAX_DELAY_MINUTES: Final = 360
"""A delayed report becomes known 1 to this many minutes after the event, each equally likely."""
_DAY_US: Final = 86_400_000_000
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def _truncate(payload: bytes, _: dict[str, Any]) -> bytes:
    return payload[: len(payload) * 2 // 3]


def _retype_delay(_: bytes, event: dict[str, Any]) -> bytes:
    return _encode(event | {"departure_delay": f"{event['departure_delay']:.0f} min"})


def _drop_carrier(_: bytes, event: dict[str, Any]) -> bytes:
    return _encode({name: value for name, value in event.items() if name != "carrier"})


def _time_in_seconds(_: bytes, event: dict[str, Any]) -> bytes:
    return _encode(event | {"event_time": _event_us(event) // 1_000_000})


def _time_in_milliseconds(_: bytes, event: dict[str, Any]) -> bytes:
    return _encode(event | {"event_time": _event_us(event) // 1_000})


def _drop_tail_number(_: bytes, event: dict[str, Any]) -> bytes:
    return _encode(event | {"tail_number": None})


def _misplace_century(_: bytes, event: dict[str, Any]) -> bytes:
    return _encode(event | {"event_time": "21" + event["event_time"][2:]})


def _run_clock_ahead(_: bytes, event: dict[str, Any]) -> bytes:
    return _encode(event | {"event_time": format_rfc3339(_event_us(event) + _DAY_US)})


@dataclass(frozen=True)
class Fault:
    """A way to corrupt a payload.

    Attributes:
        name: Name in counts.
        reason: Why the row must end as a dead letter.
        corrupt: Makes the corrupted payload of a payload and its decoded form.
        is_keyless: Whether the record loses its key, too.
    """

    name: str
    reason: Reason
    corrupt: Callable[[bytes, dict[str, Any]], bytes]
    is_keyless: bool = False


FAULTS: Final = (
    Fault("truncated_json", Reason.DECODE_ERROR, _truncate),
    Fault("delay_as_text", Reason.SCHEMA_VIOLATION, _retype_delay),
    Fault("carrier_missing", Reason.SCHEMA_VIOLATION, _drop_carrier),
    Fault("time_in_seconds", Reason.SCHEMA_VIOLATION, _time_in_seconds),
    Fault("time_in_milliseconds", Reason.SCHEMA_VIOLATION, _time_in_milliseconds),
    Fault("wrong_century", Reason.IMPLAUSIBLE_TIME, _misplace_century),
    Fault("clock_ahead", Reason.FUTURE_TIMESTAMP, _run_clock_ahead),
    # The last one is for landings alone: they are keyed by the tail number, which may be null by contract.
    Fault("tail_number_missing", Reason.MISSING_KEY, _drop_tail_number, is_keyless=True),
)
"""Every fault; a corrupted report has each that is possible for it with the same likelihood."""
NO_FAULT: Final = -1


@dataclass(frozen=True)
class Fate:
    """What happens to each report, as columns of shape ``(n_reports,)``.

    Attributes:
        delay_us: How much later than the event the report becomes known, 0 when it is not delayed.
        fault: Position in :data:`FAULTS`, or :data:`NO_FAULT`.
    """

    delay_us: NDArray[np.int64]
    fault: NDArray[np.int8]


def draw_fate(
    report: NDArray[np.uint64], *, is_landed: NDArray[np.bool_], late: float, invalid: float, seed: int
) -> Fate:
    """Draw what happens to reports.

    Args:
        report: Place of each report among those of the whole year.
        is_landed: Whether it tells a landing.
        late: Share of reports that are delayed, 0 to 1.
        invalid: Share of reports that are corrupted, 0 to 1.
        seed: Another seed draws another fate.

    Raises:
        ConfigError: A share lies outside of 0 to 1.
    """
    for name, share in (("late_share", late), ("invalid_share", invalid)):
        if not 0 <= share <= 1:
            msg = f"`{name}` is {share}, expected a share from 0 to 1 such as 0.01"
            raise ConfigError(msg)
    is_late = _draw(report, salt=1, seed=seed) < late
    minutes = 1 + np.floor(_draw(report, salt=2, seed=seed) * MAX_DELAY_MINUTES).astype(np.int64)
    is_invalid = _draw(report, salt=3, seed=seed) < invalid
    n_possible = np.where(is_landed, len(FAULTS), len(FAULTS) - 1)
    fault = np.floor(_draw(report, salt=4, seed=seed) * n_possible).astype(np.int8)
    return Fate(
        delay_us=np.where(is_late, minutes * 60_000_000, 0),
        fault=np.where(is_invalid, fault, np.int8(NO_FAULT)),
    )


def possible_faults(kind: str) -> tuple[Fault, ...]:
    """List the faults that a report of ``kind`` can have."""
    return FAULTS if kind == LANDED else FAULTS[:-1]


def corrupt(payload: bytes, fault: Fault) -> bytes:
    """Make the corrupted payload."""
    return fault.corrupt(payload, json.loads(payload))


def _draw(report: NDArray[np.uint64], *, salt: int, seed: int) -> NDArray[np.float64]:
    """Draw uniform numbers in [0, 1), a pure function of report, salt and seed.

    The mixing is the finalizer of SplitMix64 (Steele, Lea, Flood, 2014).
    """
    start = np.uint64((seed * 0xD1342543DE82EF95 + salt * 0xDA942042E4DD58B5) % 2**64)
    state = _mix(_mix(report * _GOLDEN + start) ^ start)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _event_us(event: dict[str, Any]) -> int:
    return parse_rfc3339_us(event["event_time"])


def _encode(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()
