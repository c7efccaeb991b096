"""What answers in place of a model that does not: recent answers, a light model, rules, in this order.

A score always comes, and ``served_by`` says from which rung. Each rung answers the rows that those above it left; the
last rule holds for every row, so that no row is left in the end. A rung that a model is to do without is waived by its
name: nothing is left out by oversight.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.errors import ConfigError
from schemas.expression import Expression, parse_expression
from schemas.time import parse_duration_us

RUNGS: Final = ("cache", "light_model", "rules")
"""Rungs below the model, from the top, as ``served_by`` names them."""
ALWAYS: Final = "true"
"""Condition of a rule that holds for every row."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class RecentAnswers:
    """The rung ``cache``: what the model answered to the very same inputs a short while ago.

    Attributes:
        rows: Answers that a worker keeps, the newest.
        max_age: How old one may be, in processing time.
    """

    rows: int = 100_000
    max_age: str = "10m"

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 10_000_000:
            msg = f"`RecentAnswers` rows is {self.rows}, expected 1 to 10,000,000"
            raise ConfigError(msg)
        if self.max_age_us == 0:
            msg = f"`RecentAnswers` max_age is {self.max_age}, expected more than 0; waive the rung 'cache' for none"
            raise ConfigError(msg)

    @property
    def max_age_us(self) -> int:
        """How old an answer may be."""
        return parse_duration_us(self.max_age, field="max_age")


@dataclass(frozen=True, kw_only=True)
class LightModel:
    """The rung ``light_model``: a small model of the same inputs and outputs, on the server under its own name.

    Where its card tells the coefficients of a linear model, workers compute it themselves when the server is gone.

    Attributes:
        name: Its name in the model repository.
        timeout: How long the server may take for it.
    """

    name: str
    timeout: str = "250ms"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            msg = f"`LightModel` name is {self.name!r}, expected lower-case letters, digits and _ such as 'risk_light'"
            raise ConfigError(msg)
        if self.timeout_us == 0:
            msg = f"light model {self.name}: `timeout` is {self.timeout}, expected more than 0"
            raise ConfigError(msg)

    @property
    def timeout_us(self) -> int:
        """How long the server may take."""
        return parse_duration_us(self.timeout, field="timeout")


@dataclass(frozen=True)
class Rule:
    """One rule: rows that fulfil a condition, and no rule before it, are answered with fixed values.

    Attributes:
        when: Condition in the language of row filters (:mod:`schemas.expression`) over the model's inputs, which are
            called ``<view>__<feature>``, those of the trigger view also ``<feature>``; ``"true"`` for every row.
        then: Value of each output column of the model.
    """

    when: str
    then: Mapping[str, float | int | bool]


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Everything below a model.

    Attributes:
        cache: Recent answers; None only where the rung is waived.
        light_model: The light model; None only where the rung is waived.
        rules: The rules, first hit wins, the last one for every row; empty only where the rung is waived.
        waived: Rungs that this model does without, by name.
        timeout: How long the model may take, a second attempt included, before the next rung answers.
        shed_after: Age of an event, since it came to the broker, from which on its row no longer waits for the model
            but goes down the ladder: the stalest rows are shed first. None sheds nothing: rows wait in Kafka, as a
            replay that is to be scored by the model has to.
    """

    cache: RecentAnswers | None = None
    light_model: LightModel | None = None
    rules: tuple[Rule, ...] = ()
    waived: tuple[str, ...] = ()
    timeout: str = "1s"
    shed_after: str | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.waived) - set(RUNGS)):
            msg = f"`Ladder` waives {unknown}, expected some of {list(RUNGS)}"
            raise ConfigError(msg)
        for rung in RUNGS:
            has_rung = bool(getattr(self, rung))
            if has_rung == (rung in self.waived):
                got = "is there and waived" if has_rung else "is neither there nor waived"
                msg = (
                    f"`Ladder` rung {rung!r} {got}, expected one of both; define it, or name it in `waived` to do "
                    "without"
                )
                raise ConfigError(msg)
        if self.timeout_us == 0:
            msg = f"`Ladder` timeout is {self.timeout}, expected more than 0"
            raise ConfigError(msg)
        if self.shed_after is not None and self.is_empty:
            msg = "`Ladder` has `shed_after` and no rung, expected a rung that answers what is shed"
            raise ConfigError(msg)
        if self.shed_after_us == 0:
            msg = f"`Ladder` shed_after is {self.shed_after}, expected more than 0; leave it out to shed nothing"
            raise ConfigError(msg)

    @property
    def timeout_us(self) -> int:
        """How long the model may take."""
        return parse_duration_us(self.timeout, field="timeout")

    @property
    def shed_after_us(self) -> int | None:
        """Age from which on rows are shed; None: never."""
        return None if self.shed_after is None else parse_duration_us(self.shed_after, field="shed_after")

    @property
    def is_empty(self) -> bool:
        """Whether every rung is waived: then rows wait for the model."""
        return len(self.waived) == len(RUNGS)

    def compile_rules(self, *, inputs: Sequence[str], trigger: str, where: str) -> "CompiledRules":
        """Parse the rules.

        Args:
            inputs: Names of the model's inputs, ``view.feature``.
            trigger: Name of the trigger view.
            where: The model, for messages.

        Raises:
            ConfigError: A condition is not of the language, or the last one does not hold for every row.
        """
        columns = {name.replace(".", "__"): name for name in inputs}
        columns |= {name.removeprefix(f"{trigger}."): name for name in inputs if name.startswith(f"{trigger}.")}
        schema = pa.schema([pa.field(name, pa.float64()) for name in columns])
        if self.rules and self.rules[-1].when.strip() != ALWAYS:
            msg = (
                f"{where}: the last of `rules` has `when` {self.rules[-1].when!r}, expected {ALWAYS!r}: no row may be "
                "left without an answer"
            )
            raise ConfigError(msg)
        conditions = tuple(
            parse_expression(rule.when, columns=schema, where=f"{where}, rule {number}")
            for number, rule in enumerate(self.rules, start=1)
        )
        return CompiledRules(columns=columns, conditions=conditions)

    def check_answers(self, outputs: Sequence[Any], *, where: str) -> None:
        """Make sure that each rule answers with valid values of all ``outputs`` (``ModelOutput``) and nothing else.

        Raises:
            ConfigError: One does not.
        """
        expected = [output.column for output in outputs]
        for number, rule in enumerate(self.rules, start=1):
            if sorted(rule.then) != sorted(expected):
                msg = f"{where}, rule {number}: `then` has {sorted(rule.then)}, expected {sorted(expected)}"
                raise ConfigError(msg)
            for output in outputs:
                value = rule.then[output.column]
                is_number = isinstance(value, int | float) and math.isfinite(value)
                if not is_number or (fault := output.fault(float(value))) is not None:
                    fault = fault if is_number else f"`{output.column}` is {value!r}, expected a number or boolean"
                    msg = f"{where}, rule {number}: {fault}"
                    raise ConfigError(msg)


NO_LADDER: Final = Ladder(waived=RUNGS, timeout="5s")
"""Every rung waived: while the model does not answer, its rows wait in Kafka."""


@dataclass(frozen=True, kw_only=True)
class CompiledRules:
    """Conditions of rules, ready to run.

    Attributes:
        columns: Name of the model's input, by the name that conditions have for it.
        conditions: The conditions, in order.
    """

    columns: Mapping[str, str]
    conditions: tuple[Expression, ...]

    @cached_property
    def _names(self) -> list[str]:
        return sorted({name for condition in self.conditions for name in condition.columns})

    def first_hits(self, inputs: Mapping[str, pa.Array], *, n_rows: int) -> NDArray[np.int64]:
        """Find the first rule that holds for each row, ``(n_rows,)``; the number of rules where none does.

        Args:
            inputs: Values by the input's name, null where missing; an input that is absent is null in every row.
            n_rows: Number of rows.
        """
        found = {
            name: _as_number(inputs[self.columns[name]])
            if self.columns[name] in inputs
            else pa.nulls(n_rows, pa.float64())
            for name in self._names
        }
        # A table without columns has no rows.
        table = pa.table({**found, "_row": pa.nulls(n_rows)})
        hits = np.full(n_rows, len(self.conditions), dtype=np.int64)
        for number in reversed(range(len(self.conditions))):
            hits[self.conditions[number].mask(table)] = number
        return hits


def _as_number(values: Any) -> Any:
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    number = values.cast(pa.float64(), safe=False)
    return pc.if_else(pc.is_nan(number), pa.scalar(None, pa.float64()), number)
