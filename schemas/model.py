"""What a model reads and what it answers: the contract between features, training and the model server.

A :class:`ModelSpec` names the features a model takes, in order and pinned to the definitions they were computed by;
training and serving build their matrices with the same :meth:`ModelSpec.matrix`, so that the two cannot drift apart.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.errors import ConfigError, SchemaMismatchError
from schemas.ladder import NO_LADDER, CompiledRules, Ladder
from schemas.output import Decision, ModelOutput, check_outputs
from schemas.time import parse_duration_us
from schemas.view import FeatureView

ON_INCOMPLETE: Final = ("score", "reject")
"""What may become of a row with an input that has neither a value nor a default."""
SCORE_COLUMNS: Final = (
    "request_id",
    "entity",
    "model",
    "model_version",
    "model_sha256",
    "arm",
    "served_by",
    "event_time",
    "features",
    "complete",
    "watermark",
    "supersedes",
    "latency_ms",
)
"""Columns of every score; a model's outputs and decisions stand beside them."""

_MAX_HOLD_US: Final = 60_000_000
_MAX_FRESHNESS_US: Final = 30_000_000
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_VERSION = re.compile(r"[1-9][0-9]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ROW_COLUMNS: Final = (
    "request_id",
    "event_time",
    "pane",
    "watermark",
    "broker_time",
    "computed_time",
    "view_version",
    "definition_hash",
)


@dataclass(frozen=True)
class ViewReference:
    """A feature view under exactly one version and definition.

    Attributes:
        name: The view's name.
        version: The view's version.
        definition_hash: The view's definition hash.
    """

    name: str
    version: int
    definition_hash: str

    @classmethod
    def of(cls, view: FeatureView) -> "ViewReference":
        """Pin ``view`` as it is defined now."""
        return cls(view.name, view.version, view.definition_hash)

    def __str__(self) -> str:
        return f"{self.name}@{self.version} ({self.definition_hash})"


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """One feature that a model reads: one column of its matrix.

    Attributes:
        view: The view that computes it.
        feature: The feature's name in that view.
        key: Column of the trigger row that holds the view's entity key; None for a feature of the trigger row itself.
        default: Value that stands in for a missing one; None leaves it missing (NaN).
    """

    view: ViewReference
    feature: str
    key: str | None = None
    default: float | None = None

    @classmethod
    def of(
        cls, view: FeatureView, feature: str, *, key: str | None = None, default: float | None = None
    ) -> "ModelInput":
        """Pin a feature of ``view`` as it is defined now.

        Raises:
            ConfigError: The view has no such feature, or it is neither a number nor a boolean.
        """
        if feature not in view.definitions:
            msg = f"model input {view.name}.{feature}: no such feature, expected one of {sorted(view.definitions)}"
            raise ConfigError(msg)
        arrow = view.feature_schema.field(feature).type
        if not (pa.types.is_integer(arrow) or pa.types.is_floating(arrow) or pa.types.is_boolean(arrow)):
            msg = f"model input {view.name}.{feature} is {arrow}, expected a number or boolean; make it one in the view"
            raise ConfigError(msg)
        return cls(view=ViewReference.of(view), feature=feature, key=key, default=default)

    @property
    def name(self) -> str:
        """``view.feature``."""
        return f"{self.view.name}.{self.feature}"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Contract of one model: what triggers it, what it reads and what it answers.

    Attributes:
        name: Name on the model server; the score topic carries it.
        version: Version of this contract, digits; goes up when inputs or outputs change. (A trained model has a version
            of its own, see :mod:`offline.card`.)
        trigger: View whose EARLY rows are scored, one score each.
        entity: Column of the trigger row that identifies what is scored.
        inputs: What the matrix holds, in the order of its columns.
        outputs: Output columns of a score.
        decisions: Columns of a score that say in a word what an output amounts to, whoever has answered.
        input_tensor: Name of the input tensor, ``(n_rows, n_features)`` float32.
        max_age: Age, against the trigger's event time, above which a looked-up value counts as missing; None: never.
        hold_for: How long after its event came to the broker a row waits for looked-up values that are missing or
            stale, and may yet come; None: not at all. Rows behind it wait as well.
        freshness: Within what time after its event came to the broker a score is to be readable: rows gather into a
            batch until the first of them has to go. None: rows wait for others for 10 ms at most.
        on_incomplete: What becomes of a row that still has an input without a value or default: ``score`` it with what
            there is, and say so in ``complete``, or ``reject`` it to the dead-letter topic.
        ladder: What answers while the model does not. It has to be there: ``NO_LADDER`` says that rows are to wait.
        owner: Who answers for it.
    """

    name: str
    version: str
    trigger: ViewReference
    entity: str
    inputs: tuple[ModelInput, ...]
    outputs: tuple[ModelOutput, ...]
    decisions: tuple[Decision, ...] = ()
    ladder: Ladder | None = None
    input_tensor: str = "features"
    max_age: str | None = None
    hold_for: str | None = None
    freshness: str | None = None
    on_incomplete: str = "score"
    owner: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            msg = f"`ModelSpec` name is {self.name!r}, expected lower-case letters, digits and _ such as 'late_arrival'"
            raise ConfigError(msg)
        if not isinstance(self.version, str) or not _VERSION.fullmatch(self.version):
            msg = f"model {self.name}: `version` is {self.version!r}, expected digits such as '1'"
            raise ConfigError(msg)
        if self.max_age_us == 0:
            msg = f"model {self.name}: `max_age` is {self.max_age}, expected more than 0; leave it out for no limit"
            raise ConfigError(msg)
        if not (0 < self.hold_for_us <= _MAX_HOLD_US or self.hold_for is None):
            msg = (
                f"model {self.name}: `hold_for` is {self.hold_for}, expected more than 0 and at most 1m, for all rows "
                "wait behind one that is held; leave it out for none to be"
            )
            raise ConfigError(msg)
        if self.freshness_us is not None and not 0 < self.freshness_us <= _MAX_FRESHNESS_US:
            msg = (
                f"model {self.name}: `freshness` is {self.freshness}, expected more than 0 and at most 30s, for rows "
                "wait nearly as long for others; leave it out for 10 ms"
            )
            raise ConfigError(msg)
        if self.on_incomplete not in ON_INCOMPLETE:
            msg = f"model {self.name}: `on_incomplete` is {self.on_incomplete!r}, expected one of {ON_INCOMPLETE}"
            raise ConfigError(msg)
        self._check_inputs()
        check_outputs(self.outputs, self.decisions, reserved=SCORE_COLUMNS, where=f"model {self.name}")
        self._check_ladder()

    def _check_inputs(self) -> None:
        where = f"model {self.name}"
        if not self.inputs:
            msg = f"{where}: `inputs` is empty, expected at least one feature"
            raise ConfigError(msg)
        names = [item.name for item in self.inputs]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            msg = f"{where}: inputs {repeated} stand there more than once, expected each once"
            raise ConfigError(msg)
        for item in self.inputs:
            if (item.key is None) != (item.view.name == self.trigger.name):
                expected = "none: it is in the trigger row" if item.key else "the trigger column to look it up by"
                msg = f"{where}, input {item.name}: `key` is {item.key!r}, expected {expected}"
                raise ConfigError(msg)
        pinned: dict[str, tuple[ViewReference, str | None]] = {self.trigger.name: (self.trigger, None)}
        for item in self.inputs:
            first = pinned.setdefault(item.view.name, (item.view, item.key))
            if first != (item.view, item.key):
                msg = (
                    f"{where}, input {item.name}: got {item.view} by {item.key!r}, expected {first[0]} by {first[1]!r} "
                    "as in the other inputs of that view; a model reads a view under one version and one key"
                )
                raise ConfigError(msg)

    def _check_ladder(self) -> None:
        where = f"model {self.name}"
        if not isinstance(self.ladder, Ladder):
            msg = (
                f"{where}: `ladder` is {self.ladder!r}, expected a Ladder: what answers while the model does not; with "
                "NO_LADDER rows wait for it"
            )
            raise ConfigError(msg)
        if self.ladder.light_model is not None and self.ladder.light_model.name == self.name:
            msg = f"{where}: its light model is itself, expected another one"
            raise ConfigError(msg)
        self.ladder.check_answers(self.outputs, where=where)
        _ = self.rules

    @cached_property
    def rungs(self) -> Ladder:
        """The ladder, which :meth:`__post_init__` has seen to be there."""
        if self.ladder is None:
            raise AssertionError
        return self.ladder

    @cached_property
    def rules(self) -> CompiledRules:
        """The ladder's rules, ready to run."""
        names = [item.name for item in self.inputs]
        return self.rungs.compile_rules(inputs=names, trigger=self.trigger.name, where=f"model {self.name}")

    @cached_property
    def light(self) -> "ModelSpec | None":
        """Contract of the light model, which has the inputs and outputs of this one; None where there is none."""
        light = self.rungs.light_model
        return None if light is None else replace(self, name=light.name, ladder=NO_LADDER)

    @cached_property
    def published_outputs(self) -> tuple[ModelOutput, ...]:
        """The outputs that scores have."""
        return tuple(output for output in self.outputs if output.is_published)

    @property
    def topic(self) -> str:
        """Topic that the scores go to."""
        return f"scores.{self.name}"

    @property
    def dead_letter_topic(self) -> str:
        """Topic that takes the trigger rows which get no score."""
        return f"dlq.{self.topic}"

    @property
    def rollout_topic(self) -> str:
        """Topic that says which of its versions scores whom."""
        return f"rollout.{self.name}"

    @property
    def reference(self) -> str:
        """``name@version``: names the published schema of the scores."""
        return f"{self.name}@{self.version}"

    @property
    def max_age_us(self) -> int | None:
        """Age above which a looked-up value counts as missing, in microseconds; None means never."""
        return None if self.max_age is None else parse_duration_us(self.max_age, field="max_age")

    @property
    def hold_for_us(self) -> int:
        """How long a row waits for looked-up values, from when its event came to the broker, in microseconds."""
        return 0 if self.hold_for is None else parse_duration_us(self.hold_for, field="hold_for")

    @property
    def freshness_us(self) -> int | None:
        """How old an event may be when its score is readable, in microseconds; None where nothing is promised."""
        return None if self.freshness is None else parse_duration_us(self.freshness, field="freshness")

    @cached_property
    def lookups(self) -> dict[ViewReference, str]:
        """Views to look up and the trigger column that holds their key, in order of first use."""
        return {item.view: item.key for item in self.inputs if item.key is not None}

    @cached_property
    def views(self) -> tuple[ViewReference, ...]:
        """All views the model reads: the trigger, then the lookups."""
        return (self.trigger, *self.lookups)

    @cached_property
    def output_tensors(self) -> dict[str, tuple[str, int]]:
        """Datatype and width of each output tensor by its name."""
        return {output.tensor: (output.datatype, output.width) for output in self.outputs}

    def inputs_of(self, view: ViewReference) -> tuple[ModelInput, ...]:
        """The inputs that come from ``view``, in matrix order."""
        return tuple(item for item in self.inputs if item.view == view)

    def check_views(self, views: Mapping[str, FeatureView]) -> None:
        """Make sure that ``views`` define exactly what this model pins, and carry the columns it needs.

        Raises:
            ConfigError: A view is missing, is another version or definition, or lacks a feature or key column.
        """
        for reference in self.views:
            if (view := views.get(reference.name)) is None:
                msg = f"model {self.name} reads view {reference.name}, which is not among {sorted(views)}; add it"
                raise ConfigError(msg)
            if (found := ViewReference.of(view)) != reference:
                msg = (
                    f"model {self.name}: got view {found}, expected {reference} as the model pins it; train the "
                    "model on the new definition (`headrace train`) or restore the old one"
                )
                raise ConfigError(msg)
            missing = [item.name for item in self.inputs_of(reference) if item.feature not in view.definitions]
            if missing:
                msg = f"model {self.name}: inputs {missing}, expected among {sorted(view.definitions)} of {found}"
                raise ConfigError(msg)
        trigger = views[self.trigger.name]
        columns = [*trigger.row_schema.names]
        if absent := sorted({self.entity, *self.lookups.values()} - set(columns)):
            msg = (
                f"model {self.name}: columns {absent} are not in the rows of trigger view {self.trigger.name} "
                f"({columns}); add them there with from_event(...)"
            )
            raise ConfigError(msg)
        if trigger.emit != "every_event":
            msg = (
                f"model {self.name}: trigger view {self.trigger.name} has `emit` {trigger.emit!r}, expected "
                "'every_event': the others leave events without a row, and so without a score"
            )
            raise ConfigError(msg)

    def check_row_columns(self, columns: Sequence[str]) -> None:
        """Make sure that trigger rows carry the columns that scoring needs.

        Raises:
            SchemaMismatchError: Some are missing.
        """
        needed = {
            *_ROW_COLUMNS,
            self.entity,
            *self.lookups.values(),
            *(i.feature for i in self.inputs_of(self.trigger)),
        }
        if missing := sorted(needed - set(columns)):
            msg = (
                f"model {self.name}: trigger rows lack {missing}, got {list(columns)}, expected rows of {self.trigger}"
            )
            raise SchemaMismatchError(msg)

    def matrix(self, columns: Mapping[str, Any], *, n_rows: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Build the model's input matrix; training and serving both call this.

        Args:
            columns: Arrow array of ``n_rows`` values by input name (``view.feature``), null where missing. An input
                that is absent is missing in every row.
            n_rows: Number of rows.

        Returns:
            ``(n_rows, n_features)`` float32, a missing value being NaN or its default; and ``(n_rows,)`` bool: whether
            the row has all its inputs. A value that is NaN is missing.

        Raises:
            SchemaMismatchError: A column has another length.
        """
        matrix = np.full((n_rows, len(self.inputs)), np.nan, dtype=np.float32)
        is_complete = np.ones(n_rows, dtype=np.bool_)
        for index, item in enumerate(self.inputs):
            values = columns.get(item.name)
            if values is not None:
                if len(values) != n_rows:
                    msg = f"model {self.name}, input {item.name} has {len(values)} values, expected {n_rows}"
                    raise SchemaMismatchError(msg)
                # Integers and float64 round to the nearest float32; what lies beyond its range becomes infinite.
                with np.errstate(over="ignore"):
                    matrix[:, index] = _as_float(values)
            is_missing = np.isnan(matrix[:, index])
            is_complete &= ~is_missing
            if item.default is not None:
                matrix[is_missing, index] = item.default
        return matrix, is_complete


def _as_float(values: Any) -> NDArray[np.float64]:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_boolean(values.type):
        values = pc.cast(values, pa.int8())
    floats: NDArray[np.float64] = pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return floats


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    """Which trained model makes the scores.

    Attributes:
        version: Version on the model server, digits.
        sha256: SHA-256 of the model file, 64 hexadecimal digits.
    """

    version: str
    sha256: str

    def __post_init__(self) -> None:
        if not _VERSION.fullmatch(self.version) or not _SHA256.fullmatch(self.sha256):
            msg = (
                f"served model has version {self.version!r} and SHA-256 {self.sha256!r}, expected digits and 64 "
                "hexadecimal digits; take both from the model's card"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class GoldenRows:
    """Rows with the answers that a model gave to them in training.

    Attributes:
        features: ``(n_rows, n_features)`` float32, NaN where missing.
        outputs: ``(n_rows,)`` answers by output column.
    """

    features: NDArray[np.float32]
    outputs: Mapping[str, NDArray[np.float64]]
