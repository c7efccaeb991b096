"""Training a model from the pipeline's own offline features.

The rows that would have been scored are joined with what the online store would have answered at their moment
(:mod:`offline.point_in_time`) and with what came true later. The model is trained on the earlier part, measured on
the later one, and exported; the measured model is the one that is written.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from offline.calibration import by_column, fit_calibration
from offline.card import ModelCard, described_inputs, described_outputs, read_card, versions, write_version
from offline.evaluation import brier, roc_auc
from offline.export import PROBABILITIES, check_export, export_classifier, missing_extra
from offline.label import Label
from offline.linear import check_linear, export_linear, fit_linear
from offline.model_input import as_of_rows, join_inputs, matrix_without_defaults
from offline.model_store import ModelStore
from offline.profile import FeatureProfile, TrainingProfile, profile_feature, profile_inputs
from offline.release import FIRST, next_release
from schemas.errors import ConfigError, SinkError
from schemas.model import ModelSpec
from schemas.row import TIMESTAMP
from schemas.time import END_OF_TIME_US, format_rfc3339
from schemas.view import FeatureView
from streams.sinks.offline import open_table, read_features

PARAMETERS: Final[Mapping[str, Any]] = {
    "objective": "binary",
    "num_leaves": 15,
    "learning_rate": 0.06,
    "min_data_in_leaf": 200,
    "lambda_l2": 10.0,
    "feature_fraction": 0.9,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
}
"""LightGBM parameters, which the card records: small trees, for delays of a day are far from independent rows."""
TREES: Final = 120
HOLDOUT_SHARE: Final = 0.25
"""Share of the labelled rows, the latest, that the model is measured on."""
MIN_ROWS: Final = 1_000
"""Labelled rows below which a model is not worth its name."""
MASKED_LOOKUPS: Final = 0.05
MASKED_VALUES: Final = 0.01
"""Shares of training rows in which a whole looked-up view, or a single value, is made missing.

Online, a value can be missing for other reasons than in the past that is trained on: a store that has lost it, an
entity seen for the first time, a row from ahead. The trees must have met that in every feature.
"""
_GOLDEN_ROWS: Final = 8


@dataclass(frozen=True, kw_only=True)
class TrainingSet:
    """Rows that were, or would have been, scored, with what came true; sorted by event time.

    Attributes:
        features: ``(n_rows, n_features)`` float32, NaN where missing.
        labels: ``(n_rows,)`` bool.
        time_us: ``(n_rows,)`` event time of the row scored.
        labelled_us: ``(n_rows,)`` event time at which its label was known.
        views: What was read of each view (:func:`offline.training_set.describe_join`), the trigger first.
        profiles: How the values of each input are distributed, without defaults, over all the rows that were joined.
    """

    features: NDArray[np.float32]
    labels: NDArray[np.bool_]
    time_us: NDArray[np.int64]
    labelled_us: NDArray[np.int64]
    views: tuple[Mapping[str, Any], ...] = ()
    profiles: Mapping[str, FeatureProfile] = field(default_factory=dict)

    @property
    def profile(self) -> TrainingProfile:
        """What drift is measured against; of at least one row."""
        since, until = (format_rfc3339(int(time_us)) for time_us in (self.time_us[0], self.time_us[-1]))
        return TrainingProfile(since=since, until=until, features=self.profiles)

    @property
    def manifest(self) -> dict[str, Any]:
        """What the rows were made of, and a hash of all of them, as the model's card keeps it."""
        digest = hashlib.sha256()
        for array in (self.features, self.labels, self.time_us, self.labelled_us):
            digest.update(np.ascontiguousarray(array).tobytes())
        return {"sha256": digest.hexdigest(), "rows": len(self), "views": [dict(view) for view in self.views]}

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, mask: NDArray[np.bool_]) -> "TrainingSet":
        """Keep the rows of ``mask``."""
        return TrainingSet(
            features=self.features[mask],
            labels=self.labels[mask],
            time_us=self.time_us[mask],
            labelled_us=self.labelled_us[mask],
            views=self.views,
            profiles=self.profiles,
        )


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model before it has a version.

    Attributes:
        spec: What it was trained for.
        onnx: The model file.
        training: See :class:`~offline.card.ModelCard`.
        training_set: See :class:`~offline.card.ModelCard`.
        evaluation: See :class:`~offline.card.ModelCard`.
        golden: See :class:`~offline.card.ModelCard`.
        linear: See :class:`~offline.card.ModelCard`.
        profile: How its inputs were distributed in the training set.
        calibration: See :class:`~offline.card.ModelCard`.
    """

    spec: ModelSpec
    onnx: bytes
    training: dict[str, Any]
    training_set: dict[str, Any]
    evaluation: dict[str, Any]
    golden: list[dict[str, Any]]
    linear: dict[str, Any] | None = None
    profile: TrainingProfile | None = None
    calibration: dict[str, Any] | None = None


def read_tables(
    root: str | Path,
    spec: ModelSpec,
    label: Label,
    *,
    views: Mapping[str, FeatureView],
    until_us: int = END_OF_TIME_US,
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, pa.Table]:
    """Read the offline rows that training needs, with event times before ``until_us``.

    Raises:
        ConfigError: ``views`` are not those that the model pins.
        SchemaMismatchError: A table belongs to another definition.
        SinkUnavailableError: A table does not exist, or the storage does not answer.
    """
    spec.check_views(views)
    wanted = {reference.name: views[reference.name] for reference in spec.views} | {label.view.name: label.view}
    before = None if until_us == END_OF_TIME_US else pc.field("event_time") < pa.scalar(until_us, TIMESTAMP)
    return {
        name: read_features(root, view, where=before, storage_options=storage_options) for name, view in wanted.items()
    }


def read_table_versions(
    root: str | Path,
    spec: ModelSpec,
    label: Label,
    *,
    views: Mapping[str, FeatureView],
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Tell which versions the tables that training reads have now; those that are not there are left out."""
    names = [*(reference.name for reference in spec.views), label.view.name]
    tables = {name: open_table(root, views[name], storage_options=storage_options) for name in names}
    return {name: table.version() for name, table in tables.items() if table is not None}


def build_training_set(
    spec: ModelSpec,
    label: Label,
    *,
    views: Mapping[str, FeatureView],
    tables: Mapping[str, pa.Table],
    table_versions: Mapping[str, int] | None = None,
) -> TrainingSet:
    """Join the rows that are scored with their features as of then, and with their labels.

    Args:
        spec: The model.
        label: What it predicts.
        views: The views by name.
        tables: Offline rows by view name, in any order.
        table_versions: Versions of their tables, for the manifest.
    """
    triggers = as_of_rows(tables[spec.trigger.name])
    outcomes = as_of_rows(tables[label.view.name])
    labelled = _join_labels(triggers.select([spec.entity, "event_time"]), outcomes, entity=spec.entity, label=label)
    triggers = triggers.take(labelled["_row"].to_arrow())
    joined = join_inputs(spec, triggers, views=views, tables=tables, table_versions=table_versions)
    features, _ = spec.matrix(joined.columns, n_rows=triggers.num_rows)
    bare = matrix_without_defaults(spec, joined.columns, n_rows=triggers.num_rows)
    return TrainingSet(
        features=features,
        labels=labelled["_label"].to_numpy(),
        time_us=labelled["event_time"].to_numpy(),
        labelled_us=labelled["_labelled"].to_numpy(),
        views=joined.views,
        profiles=profile_inputs([item.name for item in spec.inputs], bare),
    )


def train_model(
    spec: ModelSpec, training_set: TrainingSet, *, label: Label, seed: int = 0, is_calibrated: bool = False
) -> TrainedModel:
    """Train on the earlier rows, measure on the later ones, export and prove the export.

    Deterministic for the same rows, seed and number of cores.

    Args:
        spec: The model.
        training_set: The rows.
        label: What it predicts.
        seed: Of the trees, and of the holes that are made.
        is_calibrated: Keep the latest of the earlier rows out of the training, and calibrate on them.

    Raises:
        ConfigError: There are too few rows, only one class, outputs that a classifier has not, or packages missing.
        InferenceError: The exported model does not answer as the trained one.
    """
    _see_classifier(spec)
    earlier, later = _split(training_set, spec=spec, label=label)
    parameters: dict[str, Any] = {**PARAMETERS, "trees": TREES, "seed": seed}
    between = None
    if is_calibrated:
        earlier, between = _split(earlier, spec=spec, label=label)
        parameters["calibration"] = "Platt"
    booster = _fit(_with_holes(earlier.features, spec=spec, seed=seed), earlier.labels, spec=spec, seed=seed)
    onnx = export_classifier(booster, name=spec.reference, input_tensor=spec.input_tensor, n_features=len(spec.inputs))
    answered = check_export(onnx, booster, features=later.features)
    training = {
        **_range(earlier),
        "label": str(label),
        "framework": f"lightgbm {_version('lightgbm')}, onnxmltools {_version('onnxmltools')}",
        "parameters": parameters,
    }
    evaluation = _measured(earlier, later, answered)
    calibration, scored = None, answered.astype(np.float64)
    if between is not None:
        fitted = fit_calibration(check_export(onnx, booster, features=between.features), between.labels)
        calibration = by_column(fitted, spec)
        training["calibrated_on"] = _range(between)
        scored = fitted.apply(answered.astype(np.float64))
        evaluation = {**_measured(earlier, later, scored), "brier_uncalibrated": evaluation["brier"]}
    alone = {item.name: _rounded(_auc_alone(later, index)) for index, item in enumerate(spec.inputs)}
    return TrainedModel(
        spec=spec,
        onnx=onnx,
        training=training,
        training_set=training_set.manifest,
        evaluation={**evaluation, "auc_of_inputs": alone},
        golden=_golden(spec, later.features, answered),
        calibration=calibration,
        profile=replace(training_set.profile, outputs=_answered(spec, scored)),
    )


def train_light_model(spec: ModelSpec, training_set: TrainingSet, *, label: Label, seed: int = 0) -> TrainedModel:
    """Train the light model of a classifier on the same rows: a logistic regression, for the server and for workers.

    Args:
        spec: Contract of the light model, :attr:`schemas.model.ModelSpec.light`.
        training_set: The rows.
        label: What it predicts.
        seed: Of the holes that are made.

    Raises:
        ConfigError: As :func:`train_model`.
        InferenceError: Server and workers would answer differently.
    """
    _see_classifier(spec)
    earlier, later = _split(training_set, spec=spec, label=label)
    linear = fit_linear(_with_holes(earlier.features, spec=spec, seed=seed), earlier.labels)
    onnx = export_linear(linear, name=spec.reference, input_tensor=spec.input_tensor)
    probabilities = check_linear(spec, onnx, linear, features=later.features)
    return TrainedModel(
        spec=spec,
        onnx=onnx,
        training={
            **_range(earlier),
            "label": str(label),
            "framework": f"scikit-learn {_version('scikit-learn')}",
            "parameters": {"model": "logistic regression", "seed": seed},
        },
        training_set=training_set.manifest,
        evaluation=_measured(earlier, later, probabilities),
        golden=_golden(spec, later.features, probabilities),
        linear=linear,
        profile=replace(training_set.profile, outputs=_answered(spec, probabilities)),
    )


def write_model(
    repository: Path,
    trained: TrainedModel,
    *,
    created_us: int,
    version: int | None = None,
    store: ModelStore | None = None,
    license: str = "Apache-2.0",  # noqa: A002  # the card's own word
    description: str = "",
) -> ModelCard:
    """Write a trained model into a repository as a version of its own, the next one unless told which.

    Its semantic version is decided by what changed (:mod:`offline.release`). Where nothing did, the version before is
    this very model: nothing is written, unless told which version.

    Args:
        repository: The model repository.
        trained: The model.
        created_us: The time now.
        version: Version on the server; None for the next one.
        store: Where the file goes as well; None for nowhere.
        license: SPDX license identifier of the model.
        description: What it predicts and how.

    Raises:
        SinkError: It cannot be written.
    """
    spec = trained.spec
    held = versions(repository, spec.name)
    number = version or max(held, default=0) + 1
    earlier = [other for other in held if other < number]
    before = read_card(repository, spec.name, earlier[-1]) if earlier else None
    card = ModelCard(
        name=spec.name,
        version=number,
        semver=FIRST,
        contract=spec.reference,
        sha256=hashlib.sha256(trained.onnx).hexdigest(),
        license=license,
        description=description,
        created=format_rfc3339(created_us),
        inputs=described_inputs(spec),
        outputs=described_outputs(spec),
        training=trained.training,
        training_set=trained.training_set,
        evaluation=trained.evaluation,
        golden=trained.golden,
        linear=trained.linear,
        profile_sha256=None if trained.profile is None else trained.profile.sha256,
        calibration=trained.calibration,
    )
    release = next_release(card, before)
    if before is not None and release.semver == before.semver and version is None:
        return before
    card = replace(card, semver=release.semver)
    if store is not None:
        store.publish(card, trained.onnx)
    try:
        write_version(repository, spec=spec, card=card, model=trained.onnx, profile=trained.profile)
    except OSError as exc:
        msg = (
            f"version {number} of model {spec.name} cannot be written to {repository} ({exc.strerror or exc}), "
            "expected room in a directory of your own; make room, or write to another one"
        )
        raise SinkError(msg) from exc
    return card


def _join_labels(triggers: pa.Table, outcomes: pa.Table, *, entity: str, label: Label) -> pl.DataFrame:
    """Find the triggers that have a label, by event time: ``_row``, ``event_time``, ``_label``, ``_labelled``."""
    scored = cast(
        pl.DataFrame,
        pl.from_arrow(pa.table({"_entity": triggers[entity], "event_time": triggers["event_time"].cast(pa.int64())})),
    ).with_row_index("_row")
    told = cast(
        pl.DataFrame,
        pl.from_arrow(
            pa.table(
                {
                    "_entity": outcomes[label.entity],
                    "_value": outcomes[label.value],
                    "_labelled": outcomes["event_time"].cast(pa.int64()),
                    "_offset": outcomes["source_offset"],
                }
            )
        ),
    )
    told = told.drop_nulls(["_entity", "_value"]).sort("_labelled", "_offset").unique("_entity", keep="last")
    return (
        scored.join(told, on="_entity", how="inner")
        .with_columns(_label=pl.col("_value") > label.above)
        .sort("event_time", "_row")
        .select("_row", "event_time", "_label", "_labelled")
    )


def _split(rows: TrainingSet, *, spec: ModelSpec, label: Label) -> tuple[TrainingSet, TrainingSet]:
    """Split by time; rows whose label was not known when the later part began are in neither."""
    if len(rows) < MIN_ROWS:
        msg = (
            f"model {spec.name}: got {len(rows)} rows with a label ({label}), expected at least {MIN_ROWS}; produce "
            "more events, or train until a later date"
        )
        raise ConfigError(msg)
    split_us = int(rows.time_us[int(len(rows) * (1 - HOLDOUT_SHARE))])
    earlier, later = rows.where(rows.labelled_us < split_us), rows.where(rows.time_us >= split_us)
    for part, name in ((earlier, "training"), (later, "evaluation")):
        if part.labels.all() or not part.labels.any():
            classes = "no rows" if not len(part) else f"only {label} = {str(bool(part.labels[0])).lower()}"
            msg = (
                f"model {spec.name}: the {name} part (split at {format_rfc3339(split_us)}) has {classes} in "
                f"{len(part)} rows, expected both classes; train on a longer range"
            )
            raise ConfigError(msg)
    return earlier, later


def _with_holes(features: NDArray[np.float32], *, spec: ModelSpec, seed: int) -> NDArray[np.float32]:
    """Make values missing at random; see :data:`MASKED_LOOKUPS`."""
    random = np.random.default_rng(seed)
    holed = features.copy()
    n_rows = len(features)
    for reference in spec.lookups:
        rows = random.permutation(n_rows)[: int(np.ceil(n_rows * MASKED_LOOKUPS))]
        columns = [index for index, item in enumerate(spec.inputs) if item.view == reference]
        holed[rows[:, np.newaxis], columns] = np.nan
    for index in range(features.shape[1]):
        holed[random.permutation(n_rows)[: int(np.ceil(n_rows * MASKED_VALUES))], index] = np.nan
    for index, item in enumerate(spec.inputs):
        if item.default is not None:
            holed[np.isnan(holed[:, index]), index] = item.default
    return holed


def _fit(features: NDArray[np.float32], labels: NDArray[np.bool_], *, spec: ModelSpec, seed: int) -> Any:
    try:
        import lightgbm  # noqa: PLC0415  # only training needs the optional extra `demo`
    except ImportError as exc:
        raise missing_extra(exc) from exc
    rows = lightgbm.Dataset(
        features, labels.astype(np.int8), feature_name=[i.name.replace(".", "__") for i in spec.inputs]
    )
    parameters = {**PARAMETERS, "seed": seed, "deterministic": True, "force_row_wise": True, "verbosity": -1}
    return lightgbm.train(parameters, rows, num_boost_round=TREES)


def _range(rows: TrainingSet) -> dict[str, Any]:
    return {
        "from": format_rfc3339(int(rows.time_us[0])),
        "until": format_rfc3339(int(rows.time_us[-1])),
        "rows": len(rows),
        "base_rate": _rounded(float(rows.labels.mean())),
    }


def _measured(earlier: TrainingSet, later: TrainingSet, probabilities: NDArray[np.floating[Any]]) -> dict[str, Any]:
    return {
        **_range(later),
        "auc": _rounded(roc_auc(later.labels, probabilities)),
        "brier": _rounded(brier(later.labels, probabilities)),
        "brier_of_base_rate": _rounded(brier(later.labels, np.full(len(later), earlier.labels.mean()))),
    }


def _see_classifier(spec: ModelSpec) -> None:
    if spec.output_tensors != {PROBABILITIES: ("FP32", 2)}:
        msg = (
            f"model {spec.name} declares outputs {spec.output_tensors}, expected {PROBABILITIES!r} as FP32 of width 2: "
            "that is what a trained classifier answers"
        )
        raise ConfigError(msg)


def _auc_alone(rows: TrainingSet, index: int) -> float | None:
    values = rows.features[:, index]
    known = ~np.isnan(values)
    return roc_auc(rows.labels[known], values[known])


def _golden(spec: ModelSpec, features: NDArray[np.float32], probabilities: NDArray[np.float32]) -> list[dict[str, Any]]:
    rows: Sequence[int] = np.unique(np.linspace(0, len(features) - 1, _GOLDEN_ROWS).astype(int)).tolist()
    golden = []
    for row in rows:
        both = (1 - float(probabilities[row]), float(probabilities[row]))
        inputs = [None if np.isnan(value) else value for value in features[row].astype(np.float64).tolist()]
        golden.append({"inputs": inputs, "outputs": {output.column: both[output.index] for output in spec.outputs}})
    return golden


def _answered(spec: ModelSpec, probabilities: NDArray[np.floating[Any]]) -> dict[str, FeatureProfile]:
    """Profile of the answers as scores have them: float32, rounded, and of published outputs alone."""
    both = np.column_stack([1 - probabilities, probabilities]).astype(np.float32)
    return {
        output.column: profile_feature(output.published(both[:, output.index]).astype(np.float64))
        for output in spec.outputs
        if output.is_published
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _version(package: str) -> str:
    return metadata.version(package)
