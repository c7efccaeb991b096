"""What many put in front of a model: a FastAPI endpoint around onnxruntime, one row a request. To be compared with."""

import sys
from typing import Any

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI


def create_app(path: str) -> FastAPI:
    """Make the endpoint of an ONNX classifier."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, sess_options=options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    app = FastAPI()

    @app.post("/score")
    async def score(body: dict[str, list[float]]) -> dict[str, Any]:
        (answer,) = session.run(["probabilities"], {name: np.array([body["features"]], dtype=np.float32)})
        return {"probability": float(answer[0, 1])}

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
