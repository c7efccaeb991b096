"""Feature definitions: an aggregation, an optional row filter, and what it runs over.

``count(where="event_type == 'click'").over("5m")`` is a definition alone; ``streams.windowing`` computes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from schemas.errors import ConfigError
from schemas.time import parse_duration_us

MAX_LAST: Final = 10_000
"""Most rows that a last-N feature runs over: room for them is taken for each key."""
MAX_K: Final = 1_000
"""Most values that ``top_k`` lists."""
LG_K_RANGE: Final = (7, 21)
"""Sizes of a HyperLogLog sketch, as powers of two."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature of a view.

    Attributes:
        function: Name of the aggregation, a key of :data:`FUNCTIONS`.
        column: Event column it reads; None for ``count``, ``rate`` and ``time_since_last``.
        where: Row filter in the expression language of :mod:`schemas.expression`, None for all rows.
        parameters: Further parameters of the aggregation, e.g. ``(("q", 0.99),)``.
        size_us: Size of the window; None where it has none.
        last: N of a last-N feature (the N newest rows that pass ``where``); None otherwise.
        lifetime: Whether it runs over all rows of the key.
    """

    function: str
    column: str | None = None
    where: str | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    size_us: int | None = None
    last: int | None = None
    lifetime: bool = False

    @property
    def is_windowed(self) -> bool:
        """Whether the feature has a window of its own (or, in a session view, the session)."""
        return self.last is None and not self.lifetime and self.function not in {"from_event", "derived"}

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        """Arrow type of the feature, given the contract's columns."""
        input_type = None if self.column is None else schema.field(self.column).type
        return FUNCTIONS[self.function].result_type(input_type)


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """An aggregation that still needs to be told what to run over."""

    function: str
    column: str | None = None
    where: str | None = None
    parameters: tuple[tuple[str, Any], ...] = ()

    def over(self, size: str | None = None, *, last: int | None = None, lifetime: bool = False) -> Feature:
        """Say what the aggregation runs over: a window size, the last N rows, or all rows of the key.

        In a session view windowed features are written without ``over``: the session is their window.

        Raises:
            ConfigError: None or several were given, or a value is out of range.
        """
        if not isinstance(lifetime, bool):
            msg = f"`lifetime` is {lifetime!r}, expected True or False"
            raise ConfigError(msg)
        if (size is not None) + (last is not None) + lifetime != 1:
            msg = "`over` takes exactly one of a size such as '5m', `last=N`, or `lifetime=True`"
            raise ConfigError(msg)
        if last is not None and (not isinstance(last, int) or isinstance(last, bool) or last < 1):
            msg = f"`last` is {last!r}, expected a whole number of rows of 1 or more"
            raise ConfigError(msg)
        if last is not None and last > MAX_LAST:
            msg = f"`last` is {last}, expected at most {MAX_LAST} rows; take a window such as `.over('1d')` for more"
            raise ConfigError(msg)
        size_us = None if size is None else parse_duration_us(size, field="over")
        if size_us == 0:
            msg = "`over` is '0s', expected a window size of more than 0"
            raise ConfigError(msg)
        return self.as_feature(size_us=size_us, last=last, lifetime=lifetime)

    def as_feature(self, *, size_us: int | None = None, last: int | None = None, lifetime: bool = False) -> Feature:
        """Make the feature, without checks."""
        return Feature(
            function=self.function,
            column=self.column,
            where=self.where,
            parameters=self.parameters,
            size_us=size_us,
            last=last,
            lifetime=lifetime,
        )


def _fixed(arrow: pa.DataType) -> Callable[[pa.DataType | None], pa.DataType]:
    return lambda _: arrow


def _same(arrow: pa.DataType | None) -> pa.DataType:
    if arrow is None:
        msg = "this aggregation needs a column"
        raise ConfigError(msg)
    return arrow


def _summed(arrow: pa.DataType | None) -> pa.DataType:
    return pa.int64() if pa.types.is_integer(_same(arrow)) else pa.float64()


@dataclass(frozen=True, kw_only=True)
class Function:
    """What is known of an aggregation before any row is seen.

    Attributes:
        result_type: Arrow type of the result, from that of the input column.
        needs: ``"number"``, ``"orderable"`` (numbers, text), ``"category"`` (text, integers, booleans), ``"any"``, or
            None when it reads no column.
        is_column_optional: Whether it may also read no column.
        runs_over: What it may run over: windows (or sessions), the ``last`` rows, a ``lifetime``.
        parameters: Names of its parameters.
    """

    result_type: Callable[[pa.DataType | None], pa.DataType]
    needs: str | None
    is_column_optional: bool = False
    runs_over: frozenset[str] = frozenset({"window", "last", "lifetime"})
    parameters: tuple[str, ...] = ()


FUNCTIONS: Final[dict[str, Function]] = {
    "count": Function(result_type=_fixed(pa.int64()), needs=None),
    "sum": Function(result_type=_summed, needs="number"),
    "mean": Function(result_type=_fixed(pa.float64()), needs="number"),
    "min": Function(result_type=_same, needs="orderable"),
    "max": Function(result_type=_same, needs="orderable"),
    "variance": Function(result_type=_fixed(pa.float64()), needs="number"),
    "stddev": Function(result_type=_fixed(pa.float64()), needs="number"),
    "first": Function(result_type=_same, needs="any"),
    "last": Function(result_type=_same, needs="any"),
    "last_n": Function(result_type=lambda arrow: pa.list_(_same(arrow)), needs="any", runs_over=frozenset({"last"})),
    "distinct": Function(result_type=_fixed(pa.int64()), needs="category"),
    "entropy": Function(result_type=_fixed(pa.float64()), needs="category"),
    "rate": Function(
        result_type=_fixed(pa.float64()), needs="number", is_column_optional=True, runs_over=frozenset({"window"})
    ),
    "time_since_last": Function(result_type=_fixed(pa.int64()), needs=None),
    "decayed_sum": Function(result_type=_fixed(pa.float64()), needs="number", parameters=("half_life_us",)),
    "top_k": Function(result_type=lambda arrow: pa.list_(_same(arrow)), needs="category", parameters=("k",)),
    "approx_distinct": Function(
        result_type=_fixed(pa.int64()),
        needs="category",
        runs_over=frozenset({"window", "lifetime"}),
        parameters=("lg_k",),
    ),
    "quantile": Function(result_type=_fixed(pa.float64()), needs="number", parameters=("q",)),
    "derived": Function(result_type=_same, needs=None, parameters=("expression",)),
    "from_event": Function(result_type=_same, needs="any"),
}
"""Every aggregation there is. ``variance`` and ``stddev`` are of the population; ``entropy`` is in bits."""
COPYING: Final = frozenset({"min", "max", "first", "last", "last_n", "top_k", "from_event"})
"""Aggregations whose results are values that stood in events."""


def count(*, where: str | None = None) -> Aggregation:
    """Count rows."""
    return Aggregation(function="count", where=where)


def sum_(column: str, *, where: str | None = None) -> Aggregation:
    """Sum a numeric column: integers to int64 (overflow is a dead letter), else float64."""
    return Aggregation(function="sum", column=column, where=where)


def mean(column: str, *, where: str | None = None) -> Aggregation:
    """Average a numeric column."""
    return Aggregation(function="mean", column=column, where=where)


def min_(column: str, *, where: str | None = None) -> Aggregation:
    """Take the smallest value."""
    return Aggregation(function="min", column=column, where=where)


def max_(column: str, *, where: str | None = None) -> Aggregation:
    """Take the largest value."""
    return Aggregation(function="max", column=column, where=where)


def variance(column: str, *, where: str | None = None) -> Aggregation:
    """Population variance of a numeric column."""
    return Aggregation(function="variance", column=column, where=where)


def stddev(column: str, *, where: str | None = None) -> Aggregation:
    """Population standard deviation of a numeric column."""
    return Aggregation(function="stddev", column=column, where=where)


def first(column: str, *, where: str | None = None) -> Aggregation:
    """Value of the oldest row by (event time, offset) that is not null."""
    return Aggregation(function="first", column=column, where=where)


def last(column: str, *, where: str | None = None) -> Aggregation:
    """Value of the newest row by (event time, offset) that is not null."""
    return Aggregation(function="last", column=column, where=where)


def last_n(column: str, *, where: str | None = None) -> Aggregation:
    """Values of the newest rows, oldest first; say how many with ``.over(last=N)``."""
    return Aggregation(function="last_n", column=column, where=where)


def distinct(column: str, *, where: str | None = None) -> Aggregation:
    """Exact number of distinct values."""
    return Aggregation(function="distinct", column=column, where=where)


def approx_distinct(column: str, *, lg_k: int = 12, where: str | None = None) -> Aggregation:
    """Approximate number of distinct values, by a HyperLogLog sketch of ``2 ** lg_k`` buckets.

    Exact to a few hundred values, then 1.6 % off at one standard deviation for the default, half of that for each 2
    more. It takes at most 2 kB a tile, twice that for each 1 more, where :func:`distinct` keeps each value.

    Raises:
        ConfigError: ``lg_k`` is no whole number of 7 to 21.
    """
    low, high = LG_K_RANGE
    if not isinstance(lg_k, int) or isinstance(lg_k, bool) or not low <= lg_k <= high:
        msg = f"`lg_k` is {lg_k!r}, expected a whole number of {low} to {high}; 12 is 1.6 % off"
        raise ConfigError(msg)
    return Aggregation(function="approx_distinct", column=column, where=where, parameters=(("lg_k", lg_k),))


def entropy(column: str, *, where: str | None = None) -> Aggregation:
    """Shannon entropy of a category's values, in bits."""
    return Aggregation(function="entropy", column=column, where=where)


def top_k(column: str, *, k: int = 3, where: str | None = None) -> Aggregation:
    """The ``k`` most frequent values of a category, exactly: a list, the most frequent first and ties by value.

    Raises:
        ConfigError: ``k`` is no whole number of 1 to 1,000.
    """
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        msg = f"`k` is {k!r}, expected a whole number of 1 to {MAX_K}"
        raise ConfigError(msg)
    return Aggregation(function="top_k", column=column, where=where, parameters=(("k", k),))


def quantile(column: str, *, q: float, where: str | None = None) -> Aggregation:
    """Quantile of a numeric column, e.g. the median for ``q=0.5``: 0.2 % off at most.

    It is the smallest value that has at least the share ``q`` of all values at or below it, rounded to nine significant
    bits (1 in 512); whole numbers up to 512 are exact.

    Raises:
        ConfigError: ``q`` is no number from 0 to 1, or has more than six decimals.
    """
    is_number = isinstance(q, int | float) and not isinstance(q, bool)
    if not is_number or not 0 <= q <= 1 or round(q, 6) != q:
        msg = f"`q` is {q!r}, expected a number from 0 to 1 with at most 6 decimals, such as 0.99"
        raise ConfigError(msg)
    return Aggregation(function="quantile", column=column, where=where, parameters=(("q", float(q)),))


def rate(column: str | None = None, *, where: str | None = None) -> Aggregation:
    """Rows per second of the window, or the sum of a numeric column (in float64) per second of it.

    In a session view the window is the session, from its first event to ``gap`` after its last one. The rate of no rows
    is 0; that of a column without a value is null.
    """
    return Aggregation(function="rate", column=column, where=where)


def time_since_last(*, where: str | None = None) -> Aggregation:
    """Microseconds from the newest row to the time that the feature is evaluated at.

    That is the event time of the row of output: the event's own in an as-of row, the window's end in a closing pane. It
    is 0 where the newest row is later than that. An as-of row counts its own event: ask for other ones with ``where``.
    """
    return Aggregation(function="time_since_last", where=where)


def decayed_sum(column: str, *, half_life: str, where: str | None = None) -> Aggregation:
    """Sum of a numeric column in which a value weighs half as much with every ``half_life`` of its age.

    Ages count to the event time of the row of output, as in :func:`time_since_last`, or to the newest row where that
    is later. No weight is below ``2 ** -1022``.

    Raises:
        ConfigError: ``half_life`` is no duration of more than 0.
    """
    half_life_us = parse_duration_us(half_life, field="half_life")
    if half_life_us == 0:
        msg = f"`half_life` is {half_life!r}, expected more than 0"
        raise ConfigError(msg)
    parameters = (("half_life_us", half_life_us),)
    return Aggregation(function="decayed_sum", column=column, where=where, parameters=parameters)


def derived(expression: str) -> Feature:
    """Make a feature of other features of the view, such as a ratio, a difference, ``log1p`` or ``bucketize`` of them.

    ``derived("clicks_5m / clicks_1h")`` is calculated on each row of output, in the language of
    :mod:`schemas.expression`: numbers in float64, null where an input is null, and null on division by zero. It may
    read other derived features, but not itself by way of them.
    """
    return Feature(function="derived", parameters=(("expression", expression),))


def from_event(column: str) -> Feature:
    """Value of the event that made an as-of row; null in closing panes.

    It carries what a model needs of the triggering event itself beside the aggregates.
    """
    return Feature(function="from_event", column=column)
