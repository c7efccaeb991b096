"""A logistic regression as the light model of a classifier: fitted, and exported twice, as ONNX and as coefficients."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offline.export import OPSET, PROBABILITIES, TOLERANCE, missing_extra, run_classifier
from schemas.errors import InferenceError
from schemas.model import ModelSpec
from streams.inference.linear import LinearModel


def fit_linear(features: NDArray[np.float32], labels: NDArray[np.bool_]) -> dict[str, Any]:
    """Fit a logistic regression; a missing value counts by a weight of its own.

    Returns:
        Coefficients as :class:`streams.inference.linear.LinearModel` takes them.

    Raises:
        ConfigError: Packages that training needs are missing.
    """
    try:
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  # only training needs the extra `demo`
    except ImportError as exc:
        raise missing_extra(exc) from exc
    is_missing = np.isnan(features)
    known = np.where(is_missing, 0.0, features.astype(np.float64))
    n_known = np.maximum((~is_missing).sum(axis=0), 1)
    mean = known.sum(axis=0) / n_known
    variance = np.where(is_missing, 0.0, (known - mean) ** 2).sum(axis=0) / n_known
    scale = np.where(variance > 0, np.sqrt(variance), 1.0)
    scaled = np.where(is_missing, 0.0, (known - mean) / scale)
    model = LogisticRegression(max_iter=1_000).fit(np.hstack([scaled, is_missing.astype(np.float64)]), labels)
    weights, n_features = model.coef_[0], features.shape[1]
    return {
        "intercept": _plain(model.intercept_)[0],
        "mean": _plain(mean),
        "scale": _plain(scale),
        "coefficient": _plain(weights[:n_features]),
        "missing": _plain(weights[n_features:]),
    }


def export_linear(coefficients: Mapping[str, Any], *, name: str, input_tensor: str) -> bytes:
    """Write coefficients as an ONNX file with the inputs and outputs of a classifier.

    Raises:
        ConfigError: Packages that training needs are missing.
    """
    try:
        import onnx  # noqa: PLC0415  # only training needs the optional extra
        from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415
    except ImportError as exc:
        raise missing_extra(exc) from exc
    n_features = len(coefficients["mean"])
    constants = {
        "mean": coefficients["mean"],
        "scale": coefficients["scale"],
        "weights": [[value] for value in coefficients["coefficient"]],
        "missing_weights": [[value] for value in coefficients["missing"]],
        "intercept": [coefficients["intercept"]],
        "zero": [0.0],
        "one": [1.0],
    }
    nodes = [
        helper.make_node("IsNaN", [input_tensor], ["is_missing"]),
        helper.make_node("Cast", ["is_missing"], ["missing"], to=TensorProto.FLOAT),
        helper.make_node("Sub", [input_tensor, "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "scale"], ["scaled"]),
        helper.make_node("Where", ["is_missing", "zero", "scaled"], ["known"]),
        helper.make_node("MatMul", ["known", "weights"], ["sum_known"]),
        helper.make_node("MatMul", ["missing", "missing_weights"], ["sum_missing"]),
        helper.make_node("Add", ["sum_known", "sum_missing"], ["sum_both"]),
        helper.make_node("Add", ["sum_both", "intercept"], ["sum"]),
        helper.make_node("Sigmoid", ["sum"], ["yes"]),
        helper.make_node("Sub", ["one", "yes"], ["no"]),
        helper.make_node("Concat", ["no", "yes"], [PROBABILITIES], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(input_tensor, TensorProto.FLOAT, [None, n_features])],
        [helper.make_tensor_value_info(PROBABILITIES, TensorProto.FLOAT, [None, 2])],
        [numpy_helper.from_array(np.array(values, dtype=np.float32), name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    exported: bytes = model.SerializeToString(deterministic=True)
    return exported


def check_linear(
    spec: ModelSpec, model: bytes, coefficients: Mapping[str, Any], *, features: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Make sure that the file on the server answers as the coefficients in the worker do.

    Returns:
        ``(n_rows,)`` probabilities of the file.

    Raises:
        InferenceError: A probability differs by more than :data:`offline.export.TOLERANCE`.
    """
    answered: NDArray[np.float32] = run_classifier(model, features)
    computed = LinearModel(spec, coefficients).probabilities(features)[:, 1]
    difference = float(np.abs(answered - computed).max(initial=0.0))
    if not difference <= TOLERANCE:
        msg = (
            f"the exported light model {spec.name} is off by {difference:.2e} on {len(features)} rows, expected at "
            f"most {TOLERANCE:.0e}; it was not written. Are some inputs too large for float32?"
        )
        raise InferenceError(msg)
    return answered


def _plain(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values]
