"""Triton's ``onnxruntime`` backend in Python, for the Triton of the ``nvidia-pytriton`` wheel, which has no native one.

Triton loads this file once per model instance, in a process of its own (the Python backend's stub). A repository that
names ``backend: "onnxruntime"`` loads here and natively in NVIDIA's container from the same files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from infra.local.onnx_model import OnnxModel, OnnxModelError

_HAS_NUMPY_2 = int(np.__version__.split(".")[0]) >= 2


class TritonPythonModel:
    """What Triton calls; the names are its."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the ONNX file of the version that Triton asks for."""
        try:
            self._model = OnnxModel(
                Path(args["model_repository"]),
                version=args["model_version"],
                config=json.loads(args["model_config"]),
            )
        except OnnxModelError as exc:
            raise pb_utils.TritonModelException(str(exc)) from exc

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests that Triton has gathered, in their order."""
        results = self._model.run(
            [
                {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._model.inputs}
                for request in requests
            ]
        )
        return [_response(request, result) for request, result in zip(requests, results, strict=True)]


def _response(request: Any, result: dict[str, Any] | OnnxModelError) -> Any:
    if isinstance(result, OnnxModelError):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(result)))
    wanted = request.requested_output_names()
    return pb_utils.InferenceResponse([_tensor(name, result[name]) for name in result if name in wanted])


def _tensor(name: str, value: Any) -> Any:
    """Wrap an array. The stub misreads arrays of numpy 2 (it sends 0 bytes), and crashes on DLPack from numpy 1."""
    if _HAS_NUMPY_2 and value.dtype != np.object_:
        return pb_utils.Tensor.from_dlpack(name, value)
    return pb_utils.Tensor(name, value)
