"""Services that one test owns, to be killed and broken at will, and a tiny model for servers to run."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from infra.local.services import LocalServices
from jobs.settings import Settings

MakeServices = Callable[..., LocalServices]


@pytest.fixture
def make_services(tmp_path: Path) -> Iterator[MakeServices]:
    """Make services with free ports, by default in ``tmp_path/home``; all are ended after the test, however it ends."""
    cache = Settings.from_environment(os.environ).cache

    with ExitStack() as guards:

        def make(home: str = "home", **options: Any) -> LocalServices:
            defaults = {
                "environment": os.environ,
                "model_repository": tmp_path / "models",
                "cache": cache,
                "has_standard_ports": False,
            }
            if "model_repository" not in options:
                (tmp_path / "models").mkdir(exist_ok=True)
            services = LocalServices(tmp_path / home, **{**defaults, **options})
            guards.enter_context(services.guarded())
            return services

        yield make


@pytest.fixture
def processes_of(tmp_path: Path) -> Callable[[], list[psutil.Process]]:
    """List the living processes that were started with something of this test's directory on their command line."""

    def find() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline", "status", "cwd"]):
            where = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(tmp_path) in part for part in where):
                found.append(process)
        return [process for process in found if "infra.local.guard" not in process.info["cmdline"]]

    return find


@pytest.fixture(scope="session")
def write_tiny_model() -> Callable[..., None]:
    """Write a model ``y = sigmoid(x @ w)``, ``u = t`` (text) to a repository; ``scale`` tells its versions apart."""

    def write(repository: Path, name: str = "tiny", *, version: int = 1, scale: float = 1.0, inputs: int = 3) -> None:
        weights = [scale * 0.1 * (i + 1) for i in range(inputs * 2)]
        graph = helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "w"], ["s"]),
                helper.make_node("Sigmoid", ["s"], ["y"]),
                helper.make_node("Identity", ["t"], ["u"]),
            ],
            name,
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", inputs]),
                helper.make_tensor_value_info("t", TensorProto.STRING, ["n", 1]),
            ],
            [
                helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2]),
                helper.make_tensor_value_info("u", TensorProto.STRING, ["n", 1]),
            ],
            [helper.make_tensor("w", TensorProto.FLOAT, [inputs, 2], weights)],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        directory = repository / name / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        onnx.save(model, directory / "model.onnx")
        (repository / name / "config.pbtxt").write_text(TINY_CONFIG, encoding="utf-8")

    return write


TINY_CONFIG = """
backend: "onnxruntime"
max_batch_size: 64
input [
  { name: "x" data_type: TYPE_FP32 dims: [ 3 ] },
  { name: "t" data_type: TYPE_STRING dims: [ 1 ] }
]
output [
  { name: "y" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "u" data_type: TYPE_STRING dims: [ 1 ] }
]
dynamic_batching { max_queue_delay_microseconds: 20000 }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""
