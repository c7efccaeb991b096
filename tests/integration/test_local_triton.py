"""The local Triton and the server that stands in for it: the same files, the same tensors, the same refusals."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import psutil
import pytest
import tritonclient.grpc as triton_grpc
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from infra.local import services as services_module
from infra.local.process import ProcessIdentity, start_time_s, wait_until
from infra.local.services import LocalServices, ServiceStatus
from infra.local.triton import server as server_module
from schemas.errors import ServiceError

MakeServices = Callable[..., LocalServices]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
T = np.array([["hé".encode()], [b""]], dtype=np.object_)
Y = 1 / (1 + np.exp(-(X @ np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=np.float32))))


@pytest.fixture(scope="module", params=["triton", "kserve"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., None]
) -> Iterator[tuple[triton_grpc.InferenceServerClient, Path]]:
    """A client of each kind of server in turn, and its repository, which holds one tiny model."""
    base = tmp_path_factory.mktemp(request.param)
    write_tiny_model(base / "models")
    services = LocalServices(
        base / "home",
        environment=os.environ,
        model_repository=base / "models",
        cache=base,
        has_standard_ports=False,
        use_triton_fallback=request.param == "kserve",
    )
    with services.guarded():
        client = triton_grpc.InferenceServerClient(services.up(["triton"]).triton)
        yield client, base / "models"
        client.close()


def inputs_of(**arrays: NDArray[Any]) -> list[triton_grpc.InferInput]:
    inputs = []
    for name, array in arrays.items():
        tensor = triton_grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def status_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(InferenceServerException) as caught:
        call()
    name = str(caught.value.status()).removeprefix("StatusCode.")
    return grpc.StatusCode[name]


def test_a_model_of_the_repository_is_served_from_the_start(server: tuple[Any, Path]) -> None:
    client, _ = server

    result = client.infer("tiny", inputs_of(x=X, t=T))

    np.testing.assert_allclose(result.as_numpy("y"), Y, rtol=1e-6)
    assert result.as_numpy("u").tolist() == T.tolist()


def test_only_the_outputs_that_are_asked_for_come_back(server: tuple[Any, Path]) -> None:
    client, _ = server

    result = client.infer("tiny", inputs_of(x=X, t=T), outputs=[triton_grpc.InferRequestedOutput("y")])

    assert [output.name for output in result.get_response().outputs] == ["y"]


def test_concurrent_requests_are_each_answered_with_their_own_rows(server: tuple[Any, Path]) -> None:
    client, _ = server
    rows = np.random.default_rng(7).random((40, 3), dtype=np.float32)
    batches = [rows[i : i + 1 + i % 3] for i in range(30)]

    def infer(batch: NDArray[np.float32]) -> NDArray[np.float32]:
        texts = np.full((len(batch), 1), b"t", dtype=np.object_)
        answer: NDArray[np.float32] = client.infer("tiny", inputs_of(x=batch, t=texts)).as_numpy("y")
        return answer

    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(infer, batches))

    for batch, answer in zip(batches, together, strict=True):
        np.testing.assert_allclose(answer, infer(batch), rtol=1e-6)


def test_the_metadata_of_server_and_model_are_told(server: tuple[Any, Path]) -> None:
    client, _ = server

    metadata = client.get_model_metadata("tiny", as_json=True)
    config = client.get_model_config("tiny", as_json=True)["config"]

    assert client.is_server_live()
    assert client.is_model_ready("tiny")
    assert not client.is_model_ready("nowhere")
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": ["-1", "3"]},
        {"name": "t", "datatype": "BYTES", "shape": ["-1", "1"]},
    ]
    assert config["max_batch_size"] == 64
    assert [model.name for model in client.get_model_repository_index().models] == ["tiny"]


@pytest.mark.parametrize(
    ("arrays", "code"),
    [
        ({"x": X[:, :2].copy(), "t": T}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"x": X.astype(np.float64), "t": T}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"x": X}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"x": X, "t": T, "z": X}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"x": np.zeros((65, 3), dtype=np.float32), "t": np.full((65, 1), b"")}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["shape", "type", "missing input", "unknown input", "batch too large"],
)
def test_tensors_that_do_not_fit_are_refused(
    server: tuple[Any, Path], arrays: dict[str, NDArray[Any]], code: grpc.StatusCode
) -> None:
    client, _ = server

    assert status_of(lambda: client.infer("tiny", inputs_of(**arrays))) is code


def test_unknown_models_versions_and_outputs_are_refused(server: tuple[Any, Path]) -> None:
    client, _ = server
    inputs = inputs_of(x=X, t=T)

    assert status_of(lambda: client.infer("nowhere", inputs)) is grpc.StatusCode.NOT_FOUND
    assert status_of(lambda: client.infer("tiny", inputs, model_version="9")) is grpc.StatusCode.NOT_FOUND
    outputs = [triton_grpc.InferRequestedOutput("nothing")]
    assert status_of(lambda: client.infer("tiny", inputs, outputs=outputs)) is grpc.StatusCode.INVALID_ARGUMENT


def test_models_are_loaded_renewed_and_unloaded_on_request(
    server: tuple[Any, Path], write_tiny_model: Callable[..., None]
) -> None:
    client, repository = server
    inputs = inputs_of(x=X, t=T)
    write_tiny_model(repository, "renewed")
    client.load_model("renewed")
    first = client.infer("renewed", inputs)

    write_tiny_model(repository, "renewed", version=2, scale=2.0)
    client.load_model("renewed")
    second = client.infer("renewed", inputs)
    client.unload_model("renewed")

    assert (first.get_response().model_version, second.get_response().model_version) == ("1", "2")
    assert not np.array_equal(first.as_numpy("y"), second.as_numpy("y"))
    assert wait_until(lambda: not client.is_model_ready("renewed"), timeout_s=10)


def test_a_model_that_cannot_be_loaded_is_refused_and_leaves_the_server_ready(
    server: tuple[Any, Path], write_tiny_model: Callable[..., None]
) -> None:
    client, repository = server
    write_tiny_model(repository, "broken", inputs=4)

    with pytest.raises(
        InferenceServerException, match=r"'x' has shape \[-1, 3\] by config.pbtxt and \[-1, 4\] in the model"
    ):
        client.load_model("broken")
    assert status_of(lambda: client.load_model("nowhere")) is grpc.StatusCode.INTERNAL
    assert client.is_server_ready()
    assert not client.is_model_ready("broken")


@pytest.mark.parametrize(
    ("onnx_type", "dtype"),
    [
        ("BOOL", np.bool_),
        ("UINT8", np.uint8),
        ("INT8", np.int8),
        ("INT16", np.int16),
        ("INT32", np.int32),
        ("INT64", np.int64),
        ("FLOAT16", np.float16),
        ("FLOAT", np.float32),
        ("DOUBLE", np.float64),
    ],
)
def test_each_type_of_tensor_comes_back_as_it_went_in(
    server: tuple[Any, Path], onnx_type: str, dtype: type[np.generic]
) -> None:
    client, repository = server
    name = f"echo_{onnx_type.lower()}"
    array = np.array([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    kind = getattr(TensorProto, onnx_type)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["b"])],
        name,
        [helper.make_tensor_value_info("a", kind, [2, 3])],
        [helper.make_tensor_value_info("b", kind, [2, 3])],
    )
    (repository / name / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, repository / name / "1" / "model.onnx")
    triton_type = np_to_triton_dtype(array.dtype)
    (repository / name / "config.pbtxt").write_text(
        f'backend: "onnxruntime"\n'
        f'input {{ name: "a" data_type: TYPE_{triton_type} dims: [ 2, 3 ] }}\n'
        f'output {{ name: "b" data_type: TYPE_{triton_type} dims: [ 2, 3 ] }}\n',
        encoding="utf-8",
    )
    client.load_model(name)

    answer = client.infer(name, inputs_of(a=array)).as_numpy("b")

    client.unload_model(name)
    assert answer.dtype == array.dtype
    np.testing.assert_array_equal(answer, array)


def test_a_killed_triton_comes_back_with_its_models_and_leaks_nothing(
    make_services: MakeServices, write_tiny_model: Callable[..., None], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "models")
    services = make_services()
    address = services.up(["triton"]).triton
    processes = [ProcessIdentity(pid, start_time_s(pid)) for pid in services.process_ids("triton")]
    assert len(processes) > 1, "Triton runs each model in a process of its own"
    regions = list(server_module._SHARED_MEMORY.glob(f"{services._services['triton']._region_prefix}*"))
    assert regions != []

    services.kill("triton", signal.SIGKILL)
    restarted = services.start("triton")

    assert restarted.address == address
    assert not any(process.is_alive() for process in processes)
    assert not any(region.exists() for region in regions)
    client = triton_grpc.InferenceServerClient(address)
    np.testing.assert_allclose(client.infer("tiny", inputs_of(x=X, t=T)).as_numpy("y"), Y, rtol=1e-6)
    client.close()


def test_another_repository_needs_another_server(make_services: MakeServices, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = make_services(model_repository=tmp_path / "first")
    first.up(["triton"])
    pid = first.process_ids("triton")[0]

    second = make_services(model_repository=tmp_path / "second")
    second.up(["triton"])

    assert second.process_ids("triton")[0] != pid
    assert not psutil.pid_exists(pid)


def test_the_stand_in_says_plainly_that_it_is_not_triton(make_services: MakeServices, tmp_path: Path) -> None:
    notes: list[str] = []
    ready: list[ServiceStatus] = []
    services = make_services(use_triton_fallback=True, notify=notes.append)

    services.up(["triton"], on_ready=ready.append)

    assert "Not NVIDIA Triton but a small KServe v2 server" in notes[0]
    assert ready[0].version.startswith("Headrace KServe server (not Triton)")
    assert "This is NOT NVIDIA Triton" in (tmp_path / "home" / "logs" / "triton.log").read_text(encoding="utf-8")


def test_the_stand_in_is_taken_where_the_wheel_does_not_exist(
    make_services: MakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    notes: list[str] = []

    make_services(notify=notes.append).up(["triton"])

    assert notes[0].endswith("nvidia-pytriton has no server for this machine")


def test_a_missing_libpython_is_told_before_triton_would_hang(make_services: MakeServices, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    ldd = tmp_path / "bin" / "ldd"
    ldd.write_text("#!/bin/sh\necho '\tlibpython3.11.so.1.0 => not found'\n", encoding="utf-8")
    ldd.chmod(0o755)

    services = make_services(environment={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    server_module_path = server_module.TritonService._python_environment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            server_module.TritonService,
            "_python_environment",
            lambda self: {**server_module_path(self), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        )
        with pytest.raises(ServiceError) as caught:
            services.up(["triton"])

    message = str(caught.value)
    assert "Triton's Python backend needs libpython3.11.so.1.0" in message
    assert "apt-get install libpython" in message
    assert "HEADRACE_TRITON_FALLBACK=1" in message


def test_a_python_without_a_backend_stub_is_told(make_services: MakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    version = type("Version", (), {"major": 3, "minor": 99})
    monkeypatch.setattr(server_module.sys, "version_info", version)

    with pytest.raises(ServiceError, match=r"no Python backend for Python 3.99, expected one of 3.10, .*3.13"):
        make_services().up(["triton"])


def test_a_stand_in_without_its_port_ends_and_is_quoted(
    make_services: MakeServices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(services_module, "_ATTEMPTS_OVER_PORTS", 1)
    other = make_services("other", use_triton_fallback=True)
    other.up(["triton"])
    port = int((other.addresses().triton or "").rpartition(":")[2])
    monkeypatch.setattr(services_module, "choose_ports", lambda wanted: {"grpc": port})

    with pytest.raises(ServiceError, match=r"Triton ended while starting with exit code 1(.|\n)*already in use"):
        make_services(use_triton_fallback=True).up(["triton"])
