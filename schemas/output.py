"""What a model answers, column by column, when an answer is valid, and what is decided by it."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.errors import ConfigError

OUTPUT_TYPES: Final[dict[str, pa.DataType]] = {"number": pa.float32(), "integer": pa.int64(), "boolean": pa.bool_()}
"""Arrow type of an output column, by its declared type."""
DATATYPES: Final[dict[str, Any]] = {"FP32": np.float32, "INT64": np.int64}
"""Tensor datatypes, spelled as the model server spells them, that models may use."""

_END_OF_INTEGERS: Final = 2**53
"""From it on neither float64 nor JSON tells one integer from the next."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """One output column of a score: one column of an output tensor. It has a valid value in every score.

    Attributes:
        column: Its name in the score.
        tensor: The tensor's name on the model server.
        datatype: The tensor's datatype, a key of :data:`DATATYPES`.
        width: Width of the tensor, which is ``(n_rows, width)``.
        index: Which of the tensor's columns it is.
        type: A key of :data:`OUTPUT_TYPES`.
        minimum: Smallest valid value, None for no bound.
        maximum: Largest valid value, None for no bound.
        values: The only valid values, for an integer such as a class; empty for no such limit.
        is_published: Whether scores have it. If not, only decisions tell anything of it.
        rounded_to: Step to whose multiples a number is rounded where it is published, 1e-6 to 1e9; None for as it is.
            Decisions, rollouts and recent answers go by the exact one.
        description: What it means, for the published schema.
    """

    column: str
    tensor: str
    datatype: str = "FP32"
    width: int = 1
    index: int = 0
    type: str = "number"
    minimum: float | None = None
    maximum: float | None = None
    values: tuple[int, ...] = ()
    is_published: bool = True
    rounded_to: float | None = None
    description: str = ""

    def fault(self, value: float, *, is_masked: bool = False) -> str | None:
        """Say what is wrong with a value; None where it is valid.

        Args:
            value: The value.
            is_masked: Whether to leave the value out where scores do not have it as it is: for dead letters and logs.
        """
        if not bool(self.wrong(np.array([value]))[0]):
            return None
        bounds = [b for b in (self.minimum, self.maximum) if b is not None]
        within = f" within {bounds}" if bounds else ""
        if self.values:
            within = f" of {list(self.values)}"
        elif self.type == "integer" and abs(value) >= _END_OF_INTEGERS:
            within = " of at most 53 bits"
        is_exact = self.is_published and self.rounded_to is None
        got = "masked" if is_masked and not is_exact and math.isfinite(value) else f"{value:g}"
        return f"`{self.column}` is {got}, expected a finite {self.type}{within}"

    def published(self, values: NDArray[Any]) -> NDArray[Any]:
        """Round values, ``(n_rows,)``, as scores have them; rounding leads out of no bound."""
        if self.rounded_to is None:
            return values
        # Adding zero takes the sign off a negative one.
        rounded = np.rint(values.astype(np.float64) / self.rounded_to) * self.rounded_to + 0.0
        low = -np.inf if self.minimum is None else self.minimum
        high = np.inf if self.maximum is None else self.maximum
        within: NDArray[Any] = np.clip(rounded, low, high).astype(values.dtype)
        return within

    def wrong(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell which values, ``(n_rows,)``, are no valid ones of this column."""
        is_wrong = ~np.isfinite(values)
        # Bounds as the values are: the float32 nearest to 0.1 lies above it.
        compared = np.float32 if self.type == "number" else np.float64
        if self.minimum is not None:
            is_wrong |= values < np.float64(compared(self.minimum))
        if self.maximum is not None:
            is_wrong |= values > np.float64(compared(self.maximum))
        if self.type != "number":
            is_wrong |= (values != np.rint(values)) | (np.abs(values) >= _END_OF_INTEGERS)
        if self.type == "boolean":
            is_wrong |= (values != 0) & (values != 1)
        if self.values:
            is_wrong |= ~np.isin(values, self.values)
        return is_wrong


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A column of a score that says in a word what an output amounts to, by thresholds.

    A value equal to a threshold has reached it. It is compared as the score has it: a number as float32.

    Attributes:
        column: Its name in the score.
        output: The number or integer that it is decided by.
        below: The word below the first threshold.
        at_least: Thresholds, rising, each with the word from there on up to the next.
        description: What it means, for the published schema.
    """

    column: str
    output: str
    below: str
    at_least: tuple[tuple[float, str], ...]
    description: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Everything that it may say, from below to above."""
        return (self.below, *(label for _, label in self.at_least))

    @cached_property
    def _thresholds(self) -> NDArray[np.float64]:
        return np.array([threshold for threshold, _ in self.at_least], dtype=np.float64)

    def decide(self, values: NDArray[Any]) -> pa.Array:
        """Put values of the output, ``(n_rows,)`` and finite, into words."""
        thresholds = self._thresholds.astype(values.dtype) if values.dtype == np.float32 else self._thresholds
        return pa.array(self.labels).take(pa.array(np.searchsorted(thresholds, values, side="right")))

    def check(self, output: ModelOutput | None, *, where: str) -> None:
        """Make sure that each label can come of some value of the output, which is None where there is no such one.

        Raises:
            ConfigError: One cannot.
        """
        where = f"{where}, decision {self.column}"
        if output is None or output.type == "boolean":
            got = "no output" if output is None else "a boolean, which says yes or no itself"
            msg = f"{where}: `output` is {self.output!r}, {got}; expected an output that is a number or integer"
            raise ConfigError(msg)
        labels = self.labels
        if len(labels) < 2 or not all(isinstance(it, str) and it for it in labels) or len({*labels}) < len(labels):
            msg = (
                f"{where}: got the words {list(labels)}, expected at least one in `at_least` beside `below`, none "
                "empty, each once"
            )
            raise ConfigError(msg)
        compared = np.float32 if output.type == "number" else np.float64
        are_numbers = all(isinstance(threshold, int | float) for threshold, _ in self.at_least)
        with np.errstate(over="ignore"):
            thresholds = self._thresholds.astype(compared) if are_numbers else np.array([np.nan])
        is_rising = bool(np.isfinite(thresholds).all() and (np.diff(thresholds) > 0).all())
        is_below = output.minimum is not None and thresholds[0] <= compared(output.minimum)
        is_above = output.maximum is not None and thresholds[-1] > compared(output.maximum)
        if not is_rising or is_below or is_above:
            msg = (
                f"{where}: thresholds are {[threshold for threshold, _ in self.at_least]}, expected finite numbers, "
                f"each (as {np.dtype(compared)}) above the one before, above the minimum {output.minimum} and no "
                f"higher than the maximum {output.maximum} of `{output.column}`: else no value comes to some word"
            )
            raise ConfigError(msg)


@dataclass(frozen=True)
class Calibration:
    """What values of an output should have been: straight lines between points, level beyond the first and the last.

    Attributes:
        answered: ``(n_points,)`` values as the model answers them, rising.
        calibrated: ``(n_points,)`` what they are put right to, never falling.
    """

    answered: NDArray[np.float64]
    calibrated: NDArray[np.float64]

    def apply(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Put values right, ``(n_rows,)``; NaN stays NaN."""
        return np.interp(values, self.answered, self.calibrated)


def read_calibrations(
    document: Mapping[str, Any] | None, outputs: Sequence[ModelOutput], *, where: str
) -> dict[str, Calibration]:
    """Read calibrations as a model's card has them: points ``[answered, calibrated]`` by output column.

    Raises:
        ConfigError: They are no such thing, or would make values that are not valid.
    """
    by_column = {output.column: output for output in outputs if (output.type, output.datatype) == ("number", "FP32")}
    remedy = "correct the card, or train the model anew"
    if not isinstance(document or {}, Mapping) or (document and not document.keys() <= by_column.keys()):
        msg = (
            f"{where}: `calibration` is {document!r}, expected points by column, of {sorted(by_column)}, which are "
            f"numbers from FP32; {remedy}"
        )
        raise ConfigError(msg)
    return {
        column: _read_points(points, by_column[column], where=f"{where}, calibration of {column}", remedy=remedy)
        for column, points in (document or {}).items()
    }


def _read_points(document: Any, output: ModelOutput, *, where: str, remedy: str) -> Calibration:
    try:
        points = np.array(document, dtype=np.float64)
    except (TypeError, ValueError):
        points = np.empty(0)
    if points.ndim != 2 or points.shape[0] < 2 or points.shape[1] != 2 or not np.isfinite(points).all():
        msg = f"{where}: got {document!r}, expected two or more points [answered, calibrated], finite; {remedy}"
        raise ConfigError(msg)
    answered, calibrated = points.T
    if not ((np.diff(answered) > 0).all() and (np.diff(calibrated) >= 0).all()):
        msg = (
            f"{where}: got answered {answered.tolist()} and calibrated {calibrated.tolist()}, expected the first to "
            f"rise and the second never to fall: rows must not change places; {remedy}"
        )
        raise ConfigError(msg)
    for value in (calibrated[0], calibrated[-1]):
        if (fault := output.fault(float(value))) is not None:
            msg = f"{where}: {fault}; {remedy}"
            raise ConfigError(msg)
    return Calibration(answered, calibrated)


def check_outputs(
    outputs: Sequence[ModelOutput], decisions: Sequence[Decision], *, reserved: Collection[str], where: str
) -> None:
    """Make sure that a model's outputs can be read from its tensors, and make up a score.

    Args:
        outputs: The outputs.
        decisions: What is decided by them.
        reserved: Column names that scores have anyway.
        where: The model, for messages.

    Raises:
        ConfigError: They cannot.
    """
    if not outputs:
        msg = f"{where}: `outputs` is empty, expected at least one output column"
        raise ConfigError(msg)
    columns = [*(output.column for output in outputs), *(decision.column for decision in decisions)]
    for column in columns:
        if not _NAME.fullmatch(column) or column in reserved or columns.count(column) > 1:
            msg = (
                f"{where}: output column {column!r}, expected a lower-case name, used once and none of "
                f"{sorted(reserved)}"
            )
            raise ConfigError(msg)
    for output in outputs:
        if output.type not in OUTPUT_TYPES or output.datatype not in DATATYPES:
            msg = (
                f"{where}, output {output.column}: got type {output.type!r} from datatype {output.datatype!r}, "
                f"expected one of {sorted(OUTPUT_TYPES)} from one of {sorted(DATATYPES)}"
            )
            raise ConfigError(msg)
        if not 0 <= output.index < output.width:
            msg = f"{where}, output {output.column}: `index` is {output.index}, expected 0 to {output.width - 1}"
            raise ConfigError(msg)
        _check_values(output, where=f"{where}, output {output.column}")
    for tensor, group in groupby(sorted(outputs, key=lambda o: o.tensor), key=lambda o: o.tensor):
        shapes = {(output.datatype, output.width) for output in group}
        if len(shapes) > 1:
            msg = f"{where}: output tensor {tensor!r} is {sorted(shapes)}, expected one datatype and width"
            raise ConfigError(msg)
    if not decisions and not any(output.is_published for output in outputs):
        msg = (
            f"{where}: no output has `is_published` and there are no `decisions`, expected one of them: scores would "
            "say nothing"
        )
        raise ConfigError(msg)
    by_column = {output.column: output for output in outputs}
    for decision in decisions:
        decision.check(by_column.get(decision.output), where=where)


def _check_values(output: ModelOutput, *, where: str) -> None:
    low, high = output.minimum, output.maximum
    for name in ("minimum", "maximum", "rounded_to"):
        value = getattr(output, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            msg = f"{where}: `{name}` is {value!r}, expected a number; leave it out for none"
            raise ConfigError(msg)
    if not all(bound is None or math.isfinite(bound) for bound in (low, high)) or (
        low is not None and high is not None and low > high
    ):
        msg = (
            f"{where}: `minimum` is {low} and `maximum` {high}, expected finite numbers, the first no larger than the "
            "second; leave one out for no bound"
        )
        raise ConfigError(msg)
    step = output.rounded_to
    if step is not None and (output.type != "number" or not output.is_published or not 1e-6 <= step <= 1e9):
        kind = output.type if output.is_published else f"{output.type} that is not published"
        msg = (
            f"{where}: `rounded_to` is {step} of a {kind}, expected 1e-6 to 1e9, of a number that is published; leave "
            "it out for no rounding"
        )
        raise ConfigError(msg)
    if not output.values:
        return
    if output.type != "integer":
        msg = (
            f"{where}: `values` is {output.values} of a {output.type}, expected them of an integer only; give a number "
            "`minimum` and `maximum`"
        )
        raise ConfigError(msg)
    are_integers = all(type(value) is int for value in output.values)
    if (
        not are_integers
        or len({*output.values}) < len(output.values)
        or any(output.fault(float(v)) for v in output.values)
    ):
        msg = f"{where}: `values` is {output.values}, expected integers within its bounds, each once"
        raise ConfigError(msg)
