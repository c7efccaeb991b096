"""Aggregations over the N newest rows: a matrix of queries by rows, oldest first."""

from typing import Final

import numpy as np
import pyarrow as pa

from streams.windowing.accumulator import ENTROPY_DECIMALS
from streams.windowing.columns import Pools, dtype_of, number_to_arrow
from streams.windowing.newest import NewestValues
from streams.windowing.plan import PlannedFeature
from streams.windowing.segment import Array, Bools, Ints, find_segments
from streams.windowing.tally import entropy_bits

_FEW: Final = 6


def aggregate_newest(feature: PlannedFeature, newest: NewestValues, *, pools: Pools) -> pa.Array:
    """Value of a last-N feature for each query. Floats are folded from the oldest row to the newest."""
    if feature.column is None:
        return number_to_arrow(newest.n_kept, None, feature.result_type)
    values, valid = newest.columns[feature.column], newest.valid[feature.column]
    column, result_type = feature.column, feature.result_type
    match feature.function:
        case "last_n":
            return _lists(values, valid, feature, pools=pools)
        case "first" | "last":
            has_value = valid.any(axis=1)
            at = valid.argmax(axis=1) if feature.function == "first" else _last_true(valid)
            return pools.to_arrow(column, result_type, values[np.arange(len(values)), at], has_value)
        case "min" | "max":
            return _extreme(values, valid, feature, pools=pools)
        case "distinct" | "entropy":
            return _by_value(values, valid, feature)
        case "variance" | "stddev":
            n_values, _, squares = _moments(values.astype(np.float64), valid)
            variance = squares / np.maximum(n_values, 1)
            result = np.sqrt(variance) if feature.function == "stddev" else variance
            return number_to_arrow(result, n_values > 0, result_type)
    n_values = valid.sum(axis=1)
    if feature.function == "mean":
        total = _fold_sum(values.astype(np.float64), valid)
        return number_to_arrow(total / np.maximum(n_values, 1), n_values > 0, result_type)
    return number_to_arrow(_fold_sum(values, valid), n_values > 0, result_type)


def _fold_sum(values: Array, valid: Bools) -> Array:
    total = np.zeros(len(values), dtype=values.dtype)
    for column in range(values.shape[1]):
        total = total + np.where(valid[:, column], values[:, column], values.dtype.type(0))
    return total


def _moments(values: Array, valid: Bools) -> tuple[Ints, Array, Array]:
    """Welford's update, column by column."""
    n_values = np.zeros(len(values), dtype=np.int64)
    mean, squares = np.zeros(len(values)), np.zeros(len(values))
    for column in range(values.shape[1]):
        is_value = valid[:, column]
        n_values += is_value
        delta = np.where(is_value, values[:, column] - mean, 0.0)
        mean = mean + delta / np.maximum(n_values, 1)
        squares = squares + delta * np.where(is_value, values[:, column] - mean, 0.0)
    return n_values, mean, squares


def _last_true(valid: Bools) -> Ints:
    last: Ints = valid.shape[1] - 1 - valid[:, ::-1].argmax(axis=1)
    return last


def _extreme(values: Array, valid: Bools, feature: PlannedFeature, *, pools: Pools) -> pa.Array:
    assert feature.column is not None
    is_max = feature.function == "max"
    has_value = valid.any(axis=1)
    by_rank: Ints | None = None
    if dtype_of(feature.result_type) is None:
        ranks = pools.pools[feature.column].ranks()
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
    return pools.to_arrow(feature.column, feature.result_type, best, has_value)


def _by_value(values: Array, valid: Bools, feature: PlannedFeature) -> pa.Array:
    if values.shape[1] <= _FEW:
        # Comparing each with each beats sorting while they are few.
        alike = np.zeros(values.shape, dtype=np.int64)
        is_first = valid.copy()
        for one in range(values.shape[1]):
            for other in range(values.shape[1]):
                same = valid[:, one] & valid[:, other] & (values[:, one] == values[:, other])
                alike[:, one] += same
                if other < one:
                    is_first[:, one] &= ~same
        if feature.function == "distinct":
            return number_to_arrow(is_first.sum(axis=1), None, feature.result_type)
        query, at = np.nonzero(is_first)
        bits = entropy_bits(query, alike[query, at], len(values), decimals=ENTROPY_DECIMALS)
        return number_to_arrow(*bits, feature.result_type)
    query, at = np.nonzero(valid)
    flat = values[query, at]
    order = np.lexsort((flat, query))
    query, flat = query[order], flat[order]
    starts, lengths = find_segments(query, flat)
    if feature.function == "distinct":
        return number_to_arrow(np.bincount(query[starts], minlength=len(values)), None, feature.result_type)
    bits = entropy_bits(query[starts], lengths, len(values), decimals=ENTROPY_DECIMALS)
    return number_to_arrow(*bits, feature.result_type)


def _lists(values: Array, valid: Bools, feature: PlannedFeature, *, pools: Pools) -> pa.Array:
    assert feature.column is not None and feature.input_type is not None
    lengths = valid.sum(axis=1)
    flat = values[valid]
    items = pools.to_arrow(feature.column, feature.input_type, flat, np.ones(len(flat), dtype=np.bool_))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    edges = pa.array(offsets, pa.int32(), mask=np.append(lengths == 0, False))
    return pa.ListArray.from_arrays(edges, items).cast(feature.result_type)
