"""Aggregations over the N newest rows: a matrix of queries by rows, oldest first."""

import itertools
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from streams.windowing.columns import Pools, dtype_of, lists_to_arrow, number_to_arrow
from streams.windowing.decay import decay
from streams.windowing.level import from_levels, to_levels
from streams.windowing.newest import NewestValues
from streams.windowing.plan import PlannedFeature
from streams.windowing.segment import Array, Bools, Ints, find_segments
from streams.windowing.tally import ENTROPY_DECIMALS, entropy_bits, nth_entries, quantile_ppm, top_entries

_FEW: Final = 6
TIMED: Final = frozenset({"time_since_last", "decayed_sum"})
"""Aggregations that need to know when the rows were."""


def aggregate_newest(feature: PlannedFeature, newest: NewestValues, *, at_us: Ints, pools: Pools) -> pa.Array:
    """Value of a last-N feature for each query, evaluated at ``at_us``. Floats are folded from the oldest row on."""
    if feature.function == "time_since_last":
        newest_us = newest.time_us[:, -1]
        return number_to_arrow(np.maximum(at_us - newest_us, 0), newest.n_kept > 0, feature.result_type)
    if feature.function == "decayed_sum":
        return _decayed(feature, newest, at_us)
    if feature.column is None:
        return number_to_arrow(newest.n_kept, None, feature.result_type)
    return _AGGREGATES[feature.function](feature, newest.columns[feature.column], newest.valid[feature.column], pools)


def _total(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    del pools
    return number_to_arrow(_fold_sum(values, valid), valid.any(axis=1), feature.result_type)


def _mean(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    del pools
    n_values = valid.sum(axis=1)
    mean = _fold_sum(values.astype(np.float64), valid) / np.maximum(n_values, 1)
    return number_to_arrow(mean, n_values > 0, feature.result_type)


def _spread(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    del pools
    n_values, squares = _moments(values.astype(np.float64), valid)
    variance = squares / np.maximum(n_values, 1)
    result = np.sqrt(variance) if feature.function == "stddev" else variance
    return number_to_arrow(result, n_values > 0, feature.result_type)


def _decayed(feature: PlannedFeature, newest: NewestValues, at_us: Ints) -> pa.Array:
    values, valid = newest.columns[feature.source].astype(np.float64), newest.valid[feature.source]
    half_life_us = feature.parameters["half_life_us"]
    total, newest_us, has_value = np.zeros(len(at_us)), np.zeros(len(at_us), dtype=np.int64), valid.any(axis=1)
    is_first = np.ones(len(at_us), dtype=np.bool_)
    for column in range(values.shape[1]):
        rows = np.flatnonzero(valid[:, column])
        time_us = newest.time_us[rows, column]
        age_us = np.where(is_first[rows], 0, time_us - newest_us[rows])
        total[rows] = total[rows] * decay(age_us, half_life_us) + values[rows, column]
        newest_us[rows], is_first[rows] = time_us, False
    age_us = np.where(has_value, np.maximum(at_us - newest_us, 0), 0)
    return number_to_arrow(total * decay(age_us, half_life_us), has_value, feature.result_type)


def _edge(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    at = valid.argmax(axis=1) if feature.function == "first" else valid.shape[1] - 1 - valid[:, ::-1].argmax(axis=1)
    return pools.to_arrow(feature.source, feature.result_type, values[np.arange(len(values)), at], valid.any(axis=1))


def _fold_sum(values: Array, valid: Bools) -> Array:
    total = np.zeros(len(values), dtype=values.dtype)
    for column in range(values.shape[1]):
        total = total + np.where(valid[:, column], values[:, column], values.dtype.type(0))
    return total


def _moments(values: Array, valid: Bools) -> tuple[Ints, Array]:
    """Welford's update, column by column."""
    n_values = np.zeros(len(values), dtype=np.int64)
    mean, squares = np.zeros(len(values)), np.zeros(len(values))
    for column in range(values.shape[1]):
        is_value = valid[:, column]
        n_values += is_value
        delta = np.where(is_value, values[:, column] - mean, 0.0)
        mean = mean + delta / np.maximum(n_values, 1)
        squares = squares + delta * np.where(is_value, values[:, column] - mean, 0.0)
    return n_values, squares


def _extreme(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    is_max = feature.function == "max"
    has_value = valid.any(axis=1)
    by_rank: Ints | None = None
    if dtype_of(feature.result_type) is None:
        ranks = pools.pools[feature.source].ranks()
        by_rank = np.argsort(ranks)
        values = ranks[values] if len(ranks) else values
    if values.dtype == np.float64:
        neutral: float = -np.inf if is_max else np.inf
    else:
        neutral = np.iinfo(np.int64).min if is_max else np.iinfo(np.int64).max
    # Adding 0 makes -0.0 0.0: which of two equal zeros came first must not show.
    filled = np.where(valid, values, neutral).astype(values.dtype, copy=False) + values.dtype.type(0)
    best = filled.max(axis=1) if is_max else filled.min(axis=1)
    if by_rank is not None:
        best = by_rank[np.where(has_value, best, 0)] if len(by_rank) else np.zeros(len(best), dtype=np.int64)
    return pools.to_arrow(feature.source, feature.result_type, best, has_value)


def _repeats(values: Array, valid: Bools) -> Ints:
    """How the values of each query repeat: the sum, over its distinct values, of their counts to the third power.

    Up to :data:`_FEW` values no two ways to repeat have the same sum. Comparing each with each beats sorting then.
    """
    alike = list(valid.T.astype(np.int64))
    for one, other in itertools.combinations(range(values.shape[1]), 2):
        same = valid[:, one] & valid[:, other] & (values[:, one] == values[:, other])
        alike[one] += same
        alike[other] += same
    return sum((n * n for n in alike), start=np.zeros(len(values), dtype=np.int64))


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of smaller ones, rising."""
    if total == 0:
        yield ()
    for last in range(min(total, largest), 0, -1):
        for rest in _partitions(total - last, last):
            yield (*rest, last)


def _by_repeats() -> tuple[Ints, Array]:
    """Number of distinct values and entropy, by how values repeat (see :func:`_repeats`)."""
    ways = [counts for total in range(1, _FEW + 1) for counts in _partitions(total, total)]
    at = [sum(count**3 for count in counts) for counts in ways]
    query = np.repeat(np.arange(len(ways)), [len(counts) for counts in ways])
    bits, _ = entropy_bits(query, np.concatenate(ways), len(ways), decimals=ENTROPY_DECIMALS)
    distinct, entropy = np.zeros(_FEW**3 + 1, dtype=np.int64), np.zeros(_FEW**3 + 1)
    distinct[at], entropy[at] = [len(counts) for counts in ways], bits
    return distinct, entropy


_DISTINCT_BY_REPEATS, _ENTROPY_BY_REPEATS = _by_repeats()


def _by_value(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    del pools
    if values.shape[1] <= _FEW:
        repeats = _repeats(values, valid)
        if feature.function == "distinct":
            return number_to_arrow(_DISTINCT_BY_REPEATS.take(repeats), None, feature.result_type)
        return number_to_arrow(_ENTROPY_BY_REPEATS.take(repeats), repeats > 0, feature.result_type)
    query, at = np.nonzero(valid)
    flat = values[query, at]
    order = np.lexsort((flat, query))
    query, flat = query[order], flat[order]
    starts, lengths = find_segments(query, flat)
    if feature.function == "distinct":
        return number_to_arrow(np.bincount(query[starts], minlength=len(values)), None, feature.result_type)
    bits = entropy_bits(query[starts], lengths, len(values), decimals=ENTROPY_DECIMALS)
    return number_to_arrow(*bits, feature.result_type)


def _lists(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    lengths = valid.sum(axis=1)
    flat = values[valid]
    items = pools.to_arrow(feature.source, feature.result_type.value_type, flat, np.ones(len(flat), dtype=np.bool_))
    return lists_to_arrow(items, lengths, feature.result_type)


def _top(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    query, at = np.nonzero(valid)
    flat = values[query, at]
    item_type = feature.result_type.value_type
    rank = pools.pools[feature.source].ranks()[flat] if dtype_of(item_type) is None and len(flat) else flat
    order = np.lexsort((rank, query))
    starts, counts = find_segments(query[order], rank[order])
    first = order[starts]
    best, lengths = top_entries(query[first], counts, rank[first], n_queries=len(values), k=feature.parameters["k"])
    chosen = flat[first[best]]
    items = pools.to_arrow(feature.source, item_type, chosen, np.ones(len(chosen), dtype=np.bool_))
    return lists_to_arrow(items, lengths, feature.result_type)


def _quantile(feature: PlannedFeature, values: Array, valid: Bools, pools: Pools) -> pa.Array:
    del pools
    query, at = np.nonzero(valid)
    levels = to_levels(values[query, at])
    levels = levels[np.lexsort((levels, query))]
    ppm = quantile_ppm(feature.parameters["q"])
    entry, has_value = nth_entries(query, np.ones(len(query), dtype=np.int64), n_queries=len(values), ppm=ppm)
    numbers = from_levels(levels[entry] if len(levels) else entry)
    return number_to_arrow(numbers, has_value, feature.result_type)


_AGGREGATES: Final[dict[str, Callable[[PlannedFeature, Array, Bools, Pools], pa.Array]]] = {
    "sum": _total,
    "mean": _mean,
    "min": _extreme,
    "max": _extreme,
    "variance": _spread,
    "stddev": _spread,
    "first": _edge,
    "last": _edge,
    "last_n": _lists,
    "distinct": _by_value,
    "entropy": _by_value,
    "top_k": _top,
    "quantile": _quantile,
}
