"""What a step of the engine gives back."""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

LAST_DATETIME_US: Final = 253_402_300_799_999_999
"""9999-12-31T23:59:59.999999Z: how the end of time is written in a row, the last moment that every reader can show."""


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Rows of one step by outcome.

    ``admitted + rejected`` is the number of rows given. With ``every_event``, ``early + without_as_of`` is
    ``admitted``.

    Attributes:
        admitted: Rows that are in a feature.
        rejected: Rows that are dead letters.
        partially_late: Admitted rows for which some of their windows had expired.
        without_as_of: Admitted rows that get no as-of row because their as-of window end had expired; 0 with
            ``on_close``.
        without_reference: Rows that passed the checks of their own, and for which some lookup found nothing.
        early: As-of rows made.
        on_time: Panes fired ``ON_TIME``.
        late: Panes fired ``LATE``.
        empty: Panes fired ``EMPTY``.
    """

    admitted: int = 0
    rejected: int = 0
    partially_late: int = 0
    without_as_of: int = 0
    without_reference: int = 0
    early: int = 0
    on_time: int = 0
    late: int = 0
    empty: int = 0


@dataclass(frozen=True, kw_only=True)
class WatermarkMarker:
    """A step of the watermark that no row made: recorded in the changelog, so that a replay takes it at the same place.

    Attributes:
        after_offset: Offset of the last row before it; None when there was none.
        watermark_us: The watermark from there on.
    """

    after_offset: int | None
    watermark_us: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Output of one step.

    Attributes:
        rows: Feature rows with the view's ``engine_schema``: by the row that made them, closing panes ordered by
            (window end, key) before that row's as-of row.
        dead_letters: Rejected rows with ``schemas.row.REJECTED_COLUMNS``, in offset order.
        watermark_us: Watermark after the step.
        counts: Rows by outcome.
        marker: Set when the watermark was moved by the clock and not by a row: write it to the changelog.
    """

    rows: pa.Table
    dead_letters: pa.Table
    watermark_us: int
    counts: StepCounts
    marker: WatermarkMarker | None = None
