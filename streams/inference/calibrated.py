"""A model whose answers are put right by the calibration in its card, as they come from wherever it runs."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from schemas.model import ModelSpec
from schemas.output import Calibration
from streams.ports import Inference, ModelServer, Recovery


class CalibratedModel:
    """Calibrates what a model answers; implements :class:`streams.ports.ModelServer`.

    What is no valid answer stays as it is, for whoever checks the rows: it must not become one.

    Args:
        server: Where the model runs.
        spec: Its contract.
        calibrations: By output column; :func:`schemas.output.read_calibrations`.
    """

    def __init__(self, server: ModelServer, *, spec: ModelSpec, calibrations: Mapping[str, Calibration]) -> None:
        self._server = server
        self._calibrated = [
            (output, calibrations[output.column]) for output in spec.outputs if output.column in calibrations
        ]

    async def infer(self, features: NDArray[np.float32], *, timeout_s: float) -> Inference:
        """Answer a matrix; see the port."""
        answer = await self._server.infer(features, timeout_s=timeout_s)
        outputs = dict(answer.outputs)
        for output, calibration in self._calibrated:
            tensor = outputs.get(output.tensor)
            if tensor is None:  # every row was rejected
                continue
            values = tensor[:, output.index].astype(np.float64)
            put_right = tensor.copy()
            put_right[:, output.index] = np.where(output.wrong(values), values, calibration.apply(values))
            outputs[output.tensor] = put_right
        return Inference(outputs=outputs, rejected=answer.rejected)

    async def recover(self) -> Recovery:
        """Bring the model back; see the port."""
        return await self._server.recover()
