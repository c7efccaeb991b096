"""Aggregations one value at a time: what sessions and the last N rows of a key are made of.

Each accumulator has ``update`` (rows in offset order), ``merge`` (with the state of rows later in time), ``result`` and
a JSON form. Nulls and NaN never reach ``update``; the result of an empty one is null, of a count 0.
"""

import base64
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa

from streams.windowing.decay import decay_one
from streams.windowing.hll import add_value, dump_sketch, estimate, load_sketch, merge_sketches, new_sketch
from streams.windowing.level import from_levels, to_levels
from streams.windowing.plan import PlannedFeature

ENTROPY_DECIMALS: Final = 12
"""Entropy is rounded to this many decimals, so that the last bit of a machine's logarithm does not show."""

SECOND_US: Final = 1_000_000

Order = tuple[int, int]
"""Event time and offset of a row: what ties are decided by."""


class Accumulator(ABC):
    """State of one aggregation over some rows; its fields are named in ``state``."""

    state: ClassVar[tuple[str, ...]]

    @abstractmethod
    def update(self, value: Any, order: Order) -> None:
        """Take in the value of the next row in offset order (None for an aggregation without a column)."""

    @abstractmethod
    def merge(self, later: Self) -> None:
        """Take in the state of rows that are later in time; ``later`` stays as it is."""

    @abstractmethod
    def result(self, at_us: int, span_us: int) -> Any:
        """Value of the feature, evaluated at an event time; ``span_us`` is the length of its window, 0 if none."""

    def integer_total(self) -> int:
        """Integer sum so far, of a sum; what overflow is guarded by."""
        return 0

    def dump(self) -> list[Any]:
        """State as JSON values."""
        return [getattr(self, name) for name in self.state]

    def load(self, dumped: list[Any]) -> None:
        """Take over a dumped state."""
        for name, value in zip(self.state, dumped, strict=True):
            setattr(self, name, value)


class _Count(Accumulator):
    """Number of rows."""

    state = ("n_rows",)

    def __init__(self) -> None:
        self.n_rows = 0

    def update(self, value: Any, order: Order) -> None:
        del value, order
        self.n_rows += 1

    def merge(self, later: Self) -> None:
        self.n_rows += later.n_rows

    def result(self, at_us: int, span_us: int) -> int:
        del at_us, span_us
        return self.n_rows


class _Total(Accumulator):
    """Sum, in Python integers (the engine refuses rows that would leave int64) or floats from 0.0 on."""

    state = ("n_values", "total")

    def __init__(self, start: float) -> None:
        self.n_values = 0
        self.total = start

    def update(self, value: Any, order: Order) -> None:
        del order
        self.n_values += 1
        self.total += value

    def merge(self, later: Self) -> None:
        self.n_values += later.n_values
        self.total += later.total

    def result(self, at_us: int, span_us: int) -> float | None:
        del at_us, span_us
        return self.total if self.n_values else None

    def integer_total(self) -> int:
        return int(self.total)


class _Mean(_Total):
    """Float sum by the number of values."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def result(self, at_us: int, span_us: int) -> float | None:
        del at_us, span_us
        return self.total / self.n_values if self.n_values else None


class _Rate(Accumulator):
    """Rows, or the float sum of a column, by the seconds of the window; of no rows 0, of no values null."""

    state = ("n_values", "total")

    def __init__(self) -> None:
        self.n_values = 0
        self.total: float | None = None

    def update(self, value: Any, order: Order) -> None:
        del order
        self.n_values += 1
        if value is not None:
            self.total = (0.0 if self.total is None else self.total) + value

    def merge(self, later: Self) -> None:
        self.n_values += later.n_values
        if later.total is not None:
            self.total = later.total if self.total is None else self.total + later.total

    def result(self, at_us: int, span_us: int) -> float | None:
        del at_us
        return (self.n_values if self.total is None else self.total) / (span_us / SECOND_US)


class _RateOfColumn(_Rate):
    """Sum of a column by the seconds of the window."""

    def result(self, at_us: int, span_us: int) -> float | None:
        return super().result(at_us, span_us) if self.n_values else None


class _Age(Accumulator):
    """Time since the newest row."""

    state = ("newest_us",)

    def __init__(self) -> None:
        self.newest_us: int | None = None

    def update(self, value: Any, order: Order) -> None:
        del value
        self.newest_us = order[0] if self.newest_us is None else max(self.newest_us, order[0])

    def merge(self, later: Self) -> None:
        if later.newest_us is not None:
            self.update(None, (later.newest_us, 0))

    def result(self, at_us: int, span_us: int) -> int | None:
        del span_us
        return None if self.newest_us is None else max(at_us - self.newest_us, 0)


class _DecayedSum(Accumulator):
    """Sum of values that each halve in weight with every half-life of age, as of the newest row."""

    state = ("newest_us", "total")

    def __init__(self, half_life_us: int) -> None:
        self.newest_us: int | None = None
        self.total = 0.0
        self._half_life_us = half_life_us

    def update(self, value: Any, order: Order) -> None:
        self._add(float(value), order[0])

    def merge(self, later: Self) -> None:
        if later.newest_us is not None:
            self._add(later.total, later.newest_us)

    def _add(self, value: float, time_us: int) -> None:
        newest_us = time_us if self.newest_us is None else max(self.newest_us, time_us)
        before = self.total * self._weight(newest_us - (newest_us if self.newest_us is None else self.newest_us))
        self.total = before + value * self._weight(newest_us - time_us)
        self.newest_us = newest_us

    def _weight(self, elapsed_us: int) -> float:
        return decay_one(elapsed_us, self._half_life_us)

    def result(self, at_us: int, span_us: int) -> float | None:
        del span_us
        return None if self.newest_us is None else self.total * self._weight(max(at_us - self.newest_us, 0))


class _Spread(Accumulator):
    """Population variance: Welford's update, Chan's merge (Chan, Golub, LeVeque 1979)."""

    state = ("n_values", "mean", "squares")

    def __init__(self) -> None:
        self.n_values = 0
        self.mean = 0.0
        self.squares = 0.0

    def update(self, value: Any, order: Order) -> None:
        del order
        self.n_values += 1
        delta = value - self.mean
        self.mean += delta / self.n_values
        self.squares += delta * (value - self.mean)

    def merge(self, later: Self) -> None:
        if not later.n_values:
            return
        n_values = self.n_values + later.n_values
        delta = later.mean - self.mean
        self.mean += delta * later.n_values / n_values
        self.squares += later.squares + delta * delta * self.n_values * later.n_values / n_values
        self.n_values = n_values

    def result(self, at_us: int, span_us: int) -> float | None:
        del at_us, span_us
        return self.squares / self.n_values if self.n_values else None


class _Deviation(_Spread):
    """Population standard deviation."""

    def result(self, at_us: int, span_us: int) -> float | None:
        variance = super().result(at_us, span_us)
        return None if variance is None else math.sqrt(variance)


class _Extreme(Accumulator):
    """Smallest or largest value."""

    state = ("value",)

    def __init__(self, choose: Callable[[Any, Any], Any]) -> None:
        self.value: Any = None
        self._choose = choose

    def update(self, value: Any, order: Order) -> None:
        del order
        # Adding 0 turns -0.0 into 0.0: which of the two equal zeros came first must not show.
        value = value + 0.0 if isinstance(value, float) else value
        self.value = value if self.value is None else self._choose(self.value, value)

    def merge(self, later: Self) -> None:
        if later.value is not None:
            self.update(later.value, (0, 0))

    def result(self, at_us: int, span_us: int) -> Any:
        del at_us, span_us
        return self.value


class _Edge(Accumulator):
    """Value of the oldest or the newest row by (event time, offset)."""

    state = ("order", "value")

    def __init__(self, *, is_last: bool) -> None:
        self.order: Order | None = None
        self.value: Any = None
        self._is_last = is_last

    def update(self, value: Any, order: Order) -> None:
        if self.order is None or (order > self.order) == self._is_last:
            self.order, self.value = order, value

    def merge(self, later: Self) -> None:
        if later.order is not None:
            self.update(later.value, later.order)

    def result(self, at_us: int, span_us: int) -> Any:
        del at_us, span_us
        return self.value

    def load(self, dumped: list[Any]) -> None:
        order, self.value = dumped
        self.order = None if order is None else (order[0], order[1])


class _Tally(Accumulator):
    """Number of rows by value."""

    state = ("counts",)

    def __init__(self, summarise: Callable[[Iterable[int]], Any]) -> None:
        self.counts: Counter[Any] = Counter()
        self._summarise = summarise

    def update(self, value: Any, order: Order) -> None:
        del order
        self.counts[value] += 1

    def merge(self, later: Self) -> None:
        self.counts.update(later.counts)

    def result(self, at_us: int, span_us: int) -> Any:
        del at_us, span_us
        return self._summarise(self.counts.values())

    def dump(self) -> list[Any]:
        return [list(self.counts.items())]

    def load(self, dumped: list[Any]) -> None:
        self.counts = Counter(dict(dumped[0]))


class _Top(_Tally):
    """The most frequent values, the most frequent first and ties by value."""

    def __init__(self, k: int) -> None:
        super().__init__(count_distinct)
        self._k = k

    def result(self, at_us: int, span_us: int) -> list[Any] | None:
        del at_us, span_us
        return sorted(self.counts, key=lambda value: (-self.counts[value], value))[: self._k] or None


class _Quantile(_Tally):
    """Quantile of values rounded to levels."""

    def __init__(self, q: float) -> None:
        super().__init__(count_distinct)
        self._ppm = quantile_ppm(q)

    def update(self, value: Any, order: Order) -> None:
        super().update(int(to_levels(np.array([value], dtype=np.float64))[0]), order)

    def result(self, at_us: int, span_us: int) -> float | None:
        del at_us, span_us
        left = max(-(-self._ppm * self.counts.total() // 1_000_000), 1)
        for level in sorted(self.counts):
            left -= self.counts[level]
            if left <= 0:
                return float(from_levels(np.array([level]))[0])
        return None


class _Estimate(Accumulator):
    """Approximate number of distinct values, by a HyperLogLog sketch."""

    state = ("sketch",)

    def __init__(self, lg_k: int) -> None:
        self._lg_k = lg_k
        self._sketch = new_sketch(lg_k)

    def update(self, value: Any, order: Order) -> None:
        del order
        add_value(self._sketch, value)

    def merge(self, later: Self) -> None:
        self._sketch = merge_sketches(self._sketch, later._sketch, lg_k=self._lg_k)

    def result(self, at_us: int, span_us: int) -> int:
        del at_us, span_us
        return estimate(self._sketch, lg_k=self._lg_k)

    def dump(self) -> list[Any]:
        return [base64.b64encode(dump_sketch(self._sketch)).decode()]

    def load(self, dumped: list[Any]) -> None:
        self._sketch = load_sketch(base64.b64decode(dumped[0]))


class _Values(Accumulator):
    """Every value, oldest first; only ever over the last N rows."""

    state = ("values",)

    def __init__(self) -> None:
        self.values: list[Any] = []

    def update(self, value: Any, order: Order) -> None:
        del order
        self.values.append(value)

    def merge(self, later: Self) -> None:
        self.values = self.values + later.values

    def result(self, at_us: int, span_us: int) -> list[Any] | None:
        del at_us, span_us
        return self.values or None


def fits_int64(value: int) -> bool:
    """Tell whether a whole number lies in the range of int64."""
    return -(2**63) <= value < 2**63


def quantile_ppm(q: float) -> int:
    """A quantile in millionths, which ranks are counted out by without rounding."""
    return round(q * 1_000_000)


def count_distinct(counts: Iterable[int]) -> int:
    """Number of distinct values; like every count it is 0 when there is none."""
    return sum(1 for _ in counts)


def entropy_bits(counts: Iterable[int]) -> float | None:
    """Shannon entropy in bits of values that occur so many times, None when there is no value.

    Counts are taken in ascending order, so that the sum does not depend on the order in which values came.
    """
    ordered = sorted(counts)
    if not ordered:
        return None
    total = sum(ordered)
    weighted = 0.0
    for count in ordered:
        weighted += count * math.log2(count)
    return round(math.log2(total) - weighted / total, ENTROPY_DECIMALS) + 0.0


def make_accumulator(feature: PlannedFeature) -> Accumulator:
    """Make the empty accumulator of a feature."""
    result_type, parameters = feature.result_type, feature.parameters
    is_integer = pa.types.is_integer(result_type)
    makers: dict[str, Callable[[], Accumulator]] = {
        "count": _Count,
        "sum": lambda: _Total(0 if is_integer else 0.0),
        "mean": _Mean,
        "rate": _Rate if feature.column is None else _RateOfColumn,
        "time_since_last": _Age,
        "decayed_sum": lambda: _DecayedSum(parameters["half_life_us"]),
        "min": lambda: _Extreme(min),
        "max": lambda: _Extreme(max),
        "variance": _Spread,
        "stddev": _Deviation,
        "first": lambda: _Edge(is_last=False),
        "last": lambda: _Edge(is_last=True),
        "last_n": _Values,
        "distinct": lambda: _Tally(count_distinct),
        "entropy": lambda: _Tally(entropy_bits),
        "top_k": lambda: _Top(parameters["k"]),
        "approx_distinct": lambda: _Estimate(parameters["lg_k"]),
        "quantile": lambda: _Quantile(parameters["q"]),
    }
    return makers[feature.function]()
