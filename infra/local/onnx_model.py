"""An ONNX model as Triton's model configuration describes it: checked at load, run over batches of requests.

Both servers of this package run their models through it, Triton's ``onnxruntime`` backend and the KServe server that
stands in for Triton, so that the same files give the same tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

_ONNX_TYPES: Final = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_UINT8": "tensor(uint8)",
    "TYPE_UINT16": "tensor(uint16)",
    "TYPE_UINT32": "tensor(uint32)",
    "TYPE_UINT64": "tensor(uint64)",
    "TYPE_INT8": "tensor(int8)",
    "TYPE_INT16": "tensor(int16)",
    "TYPE_INT32": "tensor(int32)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
    "TYPE_FP64": "tensor(double)",
    "TYPE_STRING": "tensor(string)",
}


class OnnxModelError(Exception):
    """The model file, its configuration and the tensors of a request do not agree."""


@dataclass(frozen=True)
class TensorSpec:
    """A declared input or output.

    Attributes:
        data_type: Triton's name of the type, such as ``TYPE_FP32``.
        dims: Sizes without the batch dimension; -1 for any.
    """

    data_type: str
    dims: tuple[int, ...]


class OnnxModel:
    """One loaded version of a model.

    Args:
        directory: The model's directory in the repository, with a directory per version.
        version: The version to load.
        config: The model configuration as JSON: ``input``, ``output``, ``max_batch_size``, ``default_model_filename``,
            and in ``parameters`` optionally ``intra_op_thread_count`` and ``inter_op_thread_count``.

    Raises:
        OnnxModelError: The file is missing or no ONNX model, or configuration and model disagree.
    """

    def __init__(self, directory: Path, *, version: str, config: Mapping[str, Any]) -> None:
        self.inputs = _specs(config, "input")
        self.outputs = _specs(config, "output")
        self.max_batch_size = int(config.get("max_batch_size", 0))
        path = directory / version / (config.get("default_model_filename") or "model.onnx")
        if not path.is_file():
            msg = f"{path} does not exist, expected the ONNX file of version {version}"
            raise OnnxModelError(msg)
        try:
            self._session = ort.InferenceSession(
                str(path), sess_options=_session_options(config), providers=["CPUExecutionProvider"]
            )
        except Exception as exc:
            msg = f"{path} cannot be loaded: {exc}"
            raise OnnxModelError(msg) from exc
        self._check("input", self.inputs, {tensor.name: tensor for tensor in self._session.get_inputs()})
        self._check("output", self.outputs, {tensor.name: tensor for tensor in self._session.get_outputs()})

    def run(self, requests: Sequence[Tensors]) -> list[Tensors | OnnxModelError]:
        """Run each request's inputs, all requests of a batched model as one.

        Args:
            requests: Inputs by name; with ``max_batch_size`` above 0 their leading dimension is the batch.

        Returns:
            For each request, in order, its outputs, or what is wrong with it alone.
        """
        if len(requests) > 1 and self.max_batch_size > 0:
            together = self._run_together(requests)
            if together is not None:
                return together
        return [self._run_alone(request) for request in requests]

    def _run_together(self, requests: Sequence[Tensors]) -> list[Tensors | OnnxModelError] | None:
        """Run all requests as one batch; None when that fails, so that the caller finds which of them is to blame."""
        try:
            inputs = {name: np.concatenate([request[name] for request in requests]) for name in self.inputs}
            outputs = self._run_session(inputs)
        except Exception:  # onnxruntime raises many kinds; each request is then run alone and tells its own
            return None
        sizes = [next(iter(request.values())).shape[0] for request in requests]
        if any(output.shape[:1] != (sum(sizes),) for output in outputs.values()):
            return None
        bounds = np.cumsum(sizes)[:-1]
        parts = {name: np.split(output, bounds) for name, output in outputs.items()}
        return [{name: parts[name][i] for name in parts} for i in range(len(requests))]

    def _run_alone(self, request: Tensors) -> Tensors | OnnxModelError:
        try:
            return self._run_session(request)
        except Exception as exc:  # onnxruntime raises many kinds; all are the answer to this one request
            return OnnxModelError(f"{type(exc).__name__}: {exc}")

    def _run_session(self, inputs: Tensors) -> Tensors:
        feed = {name: _to_onnx(inputs[name]) for name in self.inputs}
        names = list(self.outputs)
        return dict(zip(names, (_to_triton(output) for output in self._session.run(names, feed)), strict=True))

    def _check(self, kind: str, declared: Mapping[str, TensorSpec], actual: Mapping[str, Any]) -> None:
        missing = sorted(declared.keys() - actual.keys())
        if missing:
            msg = f"The {kind} {missing[0]!r} of config.pbtxt is not one of the model's: {', '.join(sorted(actual))}"
            raise OnnxModelError(msg)
        undeclared = sorted(actual.keys() - declared.keys())
        if kind == "input" and undeclared:
            msg = f"The model's input {undeclared[0]!r} is not declared in config.pbtxt"
            raise OnnxModelError(msg)
        for name, spec in declared.items():
            if _ONNX_TYPES.get(spec.data_type) != actual[name].type:
                msg = f"The {kind} {name!r} is {spec.data_type} in config.pbtxt and {actual[name].type} in the model"
                raise OnnxModelError(msg)
            dims = [-1, *spec.dims] if self.max_batch_size > 0 else list(spec.dims)
            shape = [size if isinstance(size, int) else -1 for size in actual[name].shape]
            if shape and not _agree(dims, shape):
                msg = f"The {kind} {name!r} has shape {dims} by config.pbtxt and {shape} in the model (-1 is any)"
                raise OnnxModelError(msg)


def _specs(config: Mapping[str, Any], field: str) -> dict[str, TensorSpec]:
    specs = {
        tensor["name"]: TensorSpec(tensor["data_type"], tuple(int(size) for size in tensor["dims"]))
        for tensor in config.get(field, [])
    }
    if not specs:
        msg = f"config.pbtxt declares no {field}, expected every {field} with name, data_type and dims"
        raise OnnxModelError(msg)
    return specs


def _session_options(config: Mapping[str, Any]) -> ort.SessionOptions:
    options = ort.SessionOptions()
    for field, name in (
        ("intra_op_num_threads", "intra_op_thread_count"),
        ("inter_op_num_threads", "inter_op_thread_count"),
    ):
        parameter = config.get("parameters", {}).get(name)
        if parameter is not None:
            setattr(options, field, int(parameter["string_value"]))
    return options


def _agree(declared: Sequence[int], actual: Sequence[int]) -> bool:
    return len(declared) == len(actual) and all(a == b or -1 in (a, b) for a, b in zip(declared, actual, strict=True))


def _to_onnx(tensor: NDArray[Any]) -> NDArray[Any]:
    """Give text to onnxruntime as ``str``; on the wire it is bytes in UTF-8."""
    if tensor.dtype != np.object_:
        return tensor
    texts = [item.decode("utf-8") if isinstance(item, bytes) else item for item in tensor.ravel()]
    return np.array(texts, dtype=np.object_).reshape(tensor.shape)


def _to_triton(tensor: NDArray[Any]) -> NDArray[Any]:
    if not isinstance(tensor, np.ndarray):
        msg = f"An output is a {type(tensor).__name__}, expected a tensor; convert the model without ZipMap"
        raise OnnxModelError(msg)
    if tensor.dtype.kind not in "OU":
        return np.ascontiguousarray(tensor)
    texts = [item.encode("utf-8") if isinstance(item, str) else item for item in tensor.ravel()]
    return np.array(texts, dtype=np.object_).reshape(tensor.shape)
