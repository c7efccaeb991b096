"""From a LightGBM model to an ONNX file that answers the same, proved before it is used."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, InferenceError

OPSET: Final = 15
TOLERANCE: Final = 1e-5
"""How far a probability of the ONNX model, summed in float32, may lie from the native one."""
PROBABILITIES: Final = "probabilities"
"""Output tensor of an exported classifier: ``(n_rows, 2)`` float32, the second column being the positive class."""


def export_classifier(booster: Any, *, name: str, input_tensor: str, n_features: int) -> bytes:
    """Convert a binary LightGBM classifier to ONNX.

    The file is a pure function of the booster. Its input is ``(n_rows, n_features)`` float32, NaN being missing; its
    output is :data:`PROBABILITIES` alone.

    Args:
        booster: The ``lightgbm.Booster``.
        name: Name of the graph.
        input_tensor: Name of the input.
        n_features: Number of features.
    """
    try:
        import onnx  # noqa: PLC0415  # only training needs the optional extra `demo`
        from onnxmltools import convert_lightgbm  # noqa: PLC0415
        from onnxmltools.convert.common.data_types import FloatTensorType  # noqa: PLC0415
    except ImportError as exc:
        raise missing_extra(exc) from exc
    model = convert_lightgbm(
        _on_float32(booster),
        initial_types=[(input_tensor, FloatTensorType([None, n_features]))],
        zipmap=False,
        target_opset=OPSET,
    )
    graph = model.graph
    graph.name = name
    # The label tells no more than the probability, and its shape (n_rows,) is none that a batched model may declare.
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info(PROBABILITIES, onnx.TensorProto.FLOAT, [None, 2]))
    _drop_unused(graph)
    onnx.checker.check_model(model)
    exported: bytes = model.SerializeToString(deterministic=True)
    return exported


def check_export(model: bytes, booster: Any, *, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Make sure that the ONNX model answers as the booster does, on the rows given and on the same with holes.

    Returns:
        ``(n_rows,)`` probabilities of the ONNX model for ``features``.

    Raises:
        InferenceError: A probability differs by more than :data:`TOLERANCE`.
    """
    holes = np.random.default_rng(0).random(features.shape) < 0.5
    probabilities: NDArray[np.float32] = run_classifier(model, features)
    for rows, answered in (
        (features, probabilities),
        (with_holes := np.where(holes, np.float32("nan"), features), run_classifier(model, with_holes)),
    ):
        difference = float(np.abs(answered - booster.predict(rows)).max(initial=0.0))
        if not difference <= TOLERANCE:
            msg = (
                f"the exported model is off by {difference:.2e} on {len(rows)} rows, expected at most {TOLERANCE:.0e}; "
                "it was not written. Do the installed versions of onnxmltools and lightgbm go together?"
            )
            raise InferenceError(msg)
    return probabilities


def run_classifier(model: bytes, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities of the positive class, ``(n_rows,)``, computed in this process."""
    try:
        import onnxruntime  # noqa: PLC0415  # only training needs the optional extra
    except ImportError as exc:
        raise missing_extra(exc) from exc
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (answer,) = session.run([PROBABILITIES], {session.get_inputs()[0].name: features})
    probabilities: NDArray[np.float32] = answer[:, 1]
    return probabilities


def missing_extra(exc: ImportError) -> ConfigError:
    """Say what to install for training."""
    msg = f"training needs the package {exc.name}, which is not there; get it with: pip install 'headrace[demo,local]'"
    return ConfigError(msg)


def _on_float32(booster: Any) -> Any:
    """Make the booster's equal whose thresholds are float32, as ONNX keeps them.

    Rounded to the nearest float32, a threshold could move past a feature value and send its row the other way. Rounded
    down it cannot: for a float32 x, ``x <= t`` holds exactly if ``x <= floor32(t)`` does.
    """
    lines = []
    for line in booster.model_to_string().splitlines():
        if line.startswith("threshold="):
            exact = np.array(line.removeprefix("threshold=").split(), dtype=np.float64)
            lines.append("threshold=" + " ".join(map(repr, _floor32(exact).astype(np.float64).tolist())))
        elif not line.startswith("tree_sizes="):  # byte counts of the trees, which are others now; they are optional
            lines.append(line)
    return type(booster)(model_str="\n".join(lines) + "\n")


def _floor32(exact: NDArray[np.float64]) -> NDArray[np.float32]:
    nearest: NDArray[np.float32] = exact.astype(np.float32)
    return np.where(nearest.astype(np.float64) > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _drop_unused(graph: Any) -> None:
    """Drop the nodes that no output needs."""
    needed = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):
        if needed.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            needed.update(node.input)
