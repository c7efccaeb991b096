"""Versions of the model of :mod:`tests.support.scoring` in a repository: a good one, and each kind of bad one."""

import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from offline.card import ModelCard, described_inputs, described_outputs, write_version
from schemas.model import ModelSpec
from streams.ports import Inference

GOOD: Final = {"factor": 1.0, "fails_above": 1e9}
SIMILAR: Final = {"factor": 0.99, "fails_above": 1e9}
"""Another good one."""
SHIFTED: Final = {"factor": 0.3, "fails_above": 1e9}
"""Answers otherwise."""
FAILING: Final = {"factor": 1.0, "fails_above": 300.0}
"""Answers NaN to flights farther than its golden rows."""
SLOW: Final = {"factor": 1.0, "fails_above": 1e9, "products": 8.0}
"""Answers right, after products of large matrices that come to nothing."""
_SIDE: Final = 1_024
_GOLDEN: Final = (100.0, 200.0, 250.0)


def probability(distance: NDArray[np.float64] | float, *, factor: float = 1.0) -> Any:
    """What a version answers, ``factor / (1 + distance / 100)``."""
    return factor / (1 + np.asarray(distance) / 100)


def by(kind: dict[str, float]) -> Any:
    """Compute a version in place, for fakes of a server."""

    def answer(features: NDArray[np.float32]) -> Inference:
        distance = features[:, 0].astype(np.float64)
        positive = probability(distance, factor=kind["factor"])
        positive = np.where(distance > kind["fails_above"], np.nan, positive)
        return Inference(outputs={"probabilities": np.stack([1 - positive, positive], axis=1).astype(np.float32)})

    return answer


def write_model_version(repository: Path, spec: ModelSpec, version: int, kind: dict[str, float]) -> ModelCard:
    """Write a version with its card; the newest stays loaded beside those that were."""
    model = _onnx(kind)
    inputs: list[list[float | None]] = [[distance, None, 4.0, -1.0, None] for distance in _GOLDEN]
    answers = [float(probability(distance, factor=kind["factor"])) for distance in _GOLDEN]
    card = ModelCard(
        name=spec.name,
        version=version,
        semver=f"{version}.0.0",
        contract=spec.reference,
        sha256=hashlib.sha256(model).hexdigest(),
        license="Apache-2.0",
        description="Farther is less likely.",
        created="2013-01-01T00:00:00.000000Z",
        inputs=described_inputs(spec),
        outputs=described_outputs(spec),
        training={"rows": 5},
        training_set={"sha256": "00", "rows": 5, "views": []},
        evaluation={"auc": 0.9},
        golden=[
            {"inputs": row, "outputs": {"probability": answer}} for row, answer in zip(inputs, answers, strict=True)
        ],
    )
    write_version(repository, spec=spec, card=card, model=model)
    return card


def _onnx(kind: dict[str, float]) -> bytes:
    def constant(name: str, *values: float, dtype: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor(name, dtype, [len(values)], list(values))

    products = int(kind.get("products", 0))
    nodes = [
        helper.make_node("Slice", ["features", "zero", "one", "columns"], ["distance"]),
        helper.make_node("Div", ["distance", "hundred"], ["scaled"]),
        helper.make_node("Add", ["scaled", "unit"], ["longer"]),
        helper.make_node("Div", ["factor", "longer"], ["within"]),
        # The logarithm of what is below 0 is NaN, and so is nought times it.
        helper.make_node("Sub", ["bound", "distance"], ["left"]),
        helper.make_node("Log", ["left"], ["log"]),
        helper.make_node("Mul", ["log", "nought"], ["fault"]),
        helper.make_node("Add", ["within", "fault"], ["quick"]),
        # Nobody but the model itself knows that the matrix is nought: no product is left out as a constant.
        helper.make_node("ReduceSum", ["distance"], ["sum"], keepdims=1),
        helper.make_node("Mul", ["sum", "nought"], ["product_0_of_1"]),
        helper.make_node("Expand", ["product_0_of_1", "square"], ["product_0"]),
        *(
            helper.make_node("MatMul", [f"product_{number}", f"product_{number}"], [f"product_{number + 1}"])
            for number in range(products)
        ),
        helper.make_node("ReduceMax", [f"product_{products}"], ["nothing"], keepdims=1),
        helper.make_node("Add", ["quick", "nothing"], ["yes"]),
        helper.make_node("Sub", ["unit", "yes"], ["no"]),
        helper.make_node("Concat", ["no", "yes"], ["probabilities"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "versions",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 5])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", 2])],
        [
            constant("zero", 0, dtype=TensorProto.INT64),
            constant("one", 1, dtype=TensorProto.INT64),
            constant("columns", 1, dtype=TensorProto.INT64),
            constant("square", *([_SIDE, _SIDE] if products else [1, 1]), dtype=TensorProto.INT64),
            constant("hundred", 100.0),
            constant("unit", 1.0),
            constant("factor", kind["factor"]),
            constant("bound", kind["fails_above"]),
            constant("nought", 0.0),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()
