"""What a table's log says of the columns of a Parquet file, which lets readers pass over it."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow.parquet as pq

_LONGEST_BOUND: Final = 64
"""Characters of a text that bounds may say; a longer one would have to be cut, and its upper bound be raised."""


def file_stats(described: pq.FileMetaData) -> dict[str, Any]:
    """Say of a file's columns what Delta's protocol has of them: counts of rows and nulls, and bounds where there are.

    Args:
        described: The file's own metadata.
    """
    groups = [described.row_group(number) for number in range(described.num_row_groups)]
    low, high, nulls = dict[str, Any](), dict[str, Any](), dict[str, int]()
    for position in range(described.num_columns if groups else 0):
        name = groups[0].column(position).path_in_schema
        found = [group.column(position).statistics for group in groups]
        if "." in name or any(part is None for part in found):
            continue  # a list's items have bounds that no reader looks for
        nulls[name] = sum(part.null_count for part in found)
        valued = [part for part in found if part.num_values]
        if valued and all(part.has_min_max for part in valued):
            bounds = (
                _bound(min(part.min for part in valued), is_low=True),
                _bound(max(part.max for part in valued), is_low=False),
            )
            if None not in bounds:
                low[name], high[name] = bounds
    return {"numRecords": described.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _bound(value: Any, *, is_low: bool) -> Any:
    """A bound as JSON; None where it would not be one."""
    if isinstance(value, datetime):
        # The protocol has milliseconds: down for a lower bound, up for an upper one.
        beyond_us = value.microsecond % 1_000
        step_us = -beyond_us if is_low or not beyond_us else 1_000 - beyond_us
        try:
            moment = value.astimezone(UTC) + timedelta(microseconds=step_us)
        except OverflowError:
            return None
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and len(value) > _LONGEST_BOUND:
        return None
    return value if isinstance(value, str | int | float) else None
