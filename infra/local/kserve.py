"""A small KServe v2 inference server on onnxruntime, for machines that NVIDIA Triton has no wheel for.

It is not Triton: no batching between requests, no ensembles, no statistics, no shared memory. It serves the same model
repository (``config.pbtxt`` with ``backend: "onnxruntime"``) over the same gRPC protocol and answers the same tensors.
Run by ``infra.local.triton.server`` as ``python -m infra.local.kserve``.
"""

import argparse
import importlib.metadata
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import numpy as np
from google.protobuf import json_format, text_format
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from infra.local.onnx_model import OnnxModel, OnnxModelError, Tensors, TensorSpec

SERVER_NAME: Final = "Headrace KServe server (not Triton)"
_PLATFORMS: Final = ("onnxruntime", "onnxruntime_onnx")
_MAX_MESSAGE_BYTES: Final = 2**31 - 1
_WORKERS: Final = 8
_log: Final = logging.getLogger("headrace.kserve")


@dataclass(frozen=True)
class _LoadedModel:
    config: Any
    versions: dict[str, OnnxModel]

    def version(self, wanted: str) -> tuple[str, OnnxModel] | None:
        version = wanted or max(self.versions, key=int)
        return (version, self.versions[version]) if version in self.versions else None


class KServeServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc] # the generated base is untyped
    """The protocol's calls that Headrace uses; the others answer UNIMPLEMENTED.

    Args:
        repository: Directory with a directory per model.
    """

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._guard = threading.Lock()
        self._models: dict[str, _LoadedModel] = {}
        self._failures: dict[str, str] = {}

    def load_all(self) -> None:
        """Load every model of the repository; one that cannot be loaded is logged and stays unavailable."""
        for name in self._names():
            try:
                self.load(name)
            except OnnxModelError as exc:
                _log.error("Model %s is not available: %s", name, exc)

    def load(self, name: str) -> None:
        """Load a model, or load it anew; one that is loaded stays as it is when that fails.

        Raises:
            OnnxModelError: It is not there, or cannot be loaded.
        """
        try:
            model = self._read(name)
        except OnnxModelError as exc:
            with self._guard:
                self._failures[name] = str(exc)
            raise
        with self._guard:
            self._models[name] = model
            self._failures.pop(name, None)
        _log.info("Loaded model %s, versions %s", name, ", ".join(model.versions))

    def _read(self, name: str) -> _LoadedModel:
        directory = self._repository / name
        path = directory / "config.pbtxt"
        if name not in self._names() or not path.is_file():
            msg = f"{path} does not exist, expected the configuration of the model {name!r}"
            raise OnnxModelError(msg)
        try:
            config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
        except text_format.ParseError as exc:
            msg = f"{path} is no model configuration: {exc}"
            raise OnnxModelError(msg) from exc
        config.name = config.name or name
        if config.name != name:
            msg = f"{path} names the model {config.name!r}, expected {name!r}, the name of its directory"
            raise OnnxModelError(msg)
        if config.backend not in _PLATFORMS and config.platform not in _PLATFORMS:
            msg = f"{path} has backend {config.backend or config.platform!r}, expected 'onnxruntime', the only one here"
            raise OnnxModelError(msg)
        found = sorted((int(p.name) for p in directory.iterdir() if p.is_dir() and p.name.isdecimal()), reverse=True)
        versions = _policy(config, [number for number in found if number > 0])
        if not versions:
            msg = f"{directory} has no version directory, expected one such as {directory / '1'}"
            raise OnnxModelError(msg)
        as_json = json_format.MessageToDict(config, preserving_proto_field_name=True)
        return _LoadedModel(config, {v: OnnxModel(directory, version=v, config=as_json) for v in versions})

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._repository.iterdir() if path.is_dir())

    def _model(self, request: Any, context: grpc.ServicerContext) -> tuple[str, OnnxModel, _LoadedModel]:
        name = getattr(request, "model_name", "") or getattr(request, "name", "")
        version = getattr(request, "model_version", "") or getattr(request, "version", "")
        with self._guard:
            loaded = self._models.get(name)
        found = loaded.version(version) if loaded else None
        if loaded is None or found is None:
            what = f"version {version} of " if loaded else ""
            _refuse(context, grpc.StatusCode.NOT_FOUND, f"{what}the model {name!r} is not loaded")
        return *found, loaded

    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Tell that the server runs."""
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Tell that the server takes requests."""
        return service_pb2.ServerReadyResponse(ready=True)

    def ServerMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Tell what the server is; its name says that it is not Triton."""
        version = importlib.metadata.version("onnxruntime")
        return service_pb2.ServerMetadataResponse(name=SERVER_NAME, version=version, extensions=["model_repository"])

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Tell whether a model, or a version of it, is loaded."""
        with self._guard:
            loaded = self._models.get(request.name)
        return service_pb2.ModelReadyResponse(ready=loaded is not None and loaded.version(request.version) is not None)

    def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Tell a model's versions, inputs and outputs."""
        _, model, loaded = self._model(request, context)
        return service_pb2.ModelMetadataResponse(
            name=request.name,
            versions=sorted(loaded.versions, key=int),
            platform="onnxruntime_onnx",
            inputs=_metadata(model, model.inputs),
            outputs=_metadata(model, model.outputs),
        )

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Give a model's configuration as it was read."""
        _, _, loaded = self._model(request, context)
        return service_pb2.ModelConfigResponse(config=loaded.config)

    def RepositoryIndex(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """List the models of the repository, loaded or not."""
        response = service_pb2.RepositoryIndexResponse()
        with self._guard:
            models, failures = dict(self._models), dict(self._failures)
        for name in sorted({*self._names(), *models}):
            if name in models:
                for version in sorted(models[name].versions, key=int):
                    response.models.add(name=name, version=version, state="READY")
            elif not request.ready:
                state = "UNAVAILABLE" if name in failures else ""
                response.models.add(name=name, state=state, reason=failures.get(name, ""))
        return response

    def RepositoryModelLoad(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Load a model from the repository; files or a configuration in the request are refused."""
        if request.parameters:
            given = ", ".join(sorted(request.parameters))
            _refuse(context, grpc.StatusCode.UNIMPLEMENTED, f"load parameters ({given}) are not taken by this server")
        try:
            self.load(request.model_name)
        except OnnxModelError as exc:
            _refuse(context, grpc.StatusCode.INTERNAL, f"failed to load {request.model_name!r}: {exc}")
        return service_pb2.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Unload a model; one that is not loaded is no error."""
        with self._guard:
            self._models.pop(request.model_name, None)
            self._failures[request.model_name] = "unloaded"
        return service_pb2.RepositoryModelUnloadResponse()

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Run one request."""
        version, model, _ = self._model(request, context)
        try:
            inputs = _read_inputs(request, model)
            wanted = [output.name for output in request.outputs] or list(model.outputs)
            unknown = [name for name in wanted if name not in model.outputs]
            if unknown:
                msg = f"unexpected output {unknown[0]!r}, expected of {', '.join(model.outputs)}"
                raise OnnxModelError(msg)
        except (OnnxModelError, ValueError) as exc:
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"[request {request.id or '<no id>'}] {exc}")
        (result,) = model.run([inputs])
        if isinstance(result, OnnxModelError):
            _refuse(context, grpc.StatusCode.INTERNAL, f"the model {request.model_name!r} failed: {result}")
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version=version, id=request.id)
        for name in wanted:
            response.outputs.add(name=name, datatype=_datatype(model.outputs[name]), shape=result[name].shape)
            response.raw_output_contents.append(_raw(result[name]))
        return response


def serve(repository: Path, address: str) -> tuple[grpc.Server, KServeServicer]:
    """Start a server on ``host:port`` with all models of ``repository`` loaded.

    Raises:
        RuntimeError: It cannot listen there.
    """
    servicer = KServeServicer(repository)
    servicer.load_all()
    server = grpc.server(
        ThreadPoolExecutor(_WORKERS, thread_name_prefix="kserve"),
        options=[
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ],
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    return server, servicer


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m infra.local.kserve", description=__doc__)
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--address", required=True, help="host:port to listen on")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _log.warning("This is NOT NVIDIA Triton: a small KServe v2 server on onnxruntime stands in for it on this machine")
    is_ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_ended.set())
    server, _ = serve(options.model_repository, options.address)
    _log.info("Listening on %s", options.address)
    is_ended.wait()
    server.stop(grace=5.0).wait()
    _log.info("Ended")


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(code, message)
    raise AssertionError(message)  # abort has raised already; this tells the type checker so


def _policy(config: Any, versions: list[int]) -> list[str]:
    """Choose versions, newest first, as the configuration's version policy says; without one, the newest alone."""
    if config.version_policy.HasField("all"):
        chosen = versions
    elif config.version_policy.HasField("specific"):
        chosen = [number for number in versions if number in config.version_policy.specific.versions]
    else:
        chosen = versions[: max(1, config.version_policy.latest.num_versions)]
    return [str(number) for number in chosen]


def _datatype(spec: TensorSpec) -> str:
    return "BYTES" if spec.data_type == "TYPE_STRING" else spec.data_type.removeprefix("TYPE_")


def _shape(model: OnnxModel, spec: TensorSpec) -> list[int]:
    return [-1, *spec.dims] if model.max_batch_size > 0 else list(spec.dims)


def _metadata(model: OnnxModel, specs: dict[str, TensorSpec]) -> list[Any]:
    tensor = service_pb2.ModelMetadataResponse.TensorMetadata
    return [tensor(name=name, datatype=_datatype(s), shape=_shape(model, s)) for name, s in specs.items()]


def _read_inputs(request: Any, model: OnnxModel) -> Tensors:
    """Turn the raw contents of a request into arrays, checked against the model's declared inputs.

    Raises:
        OnnxModelError: Names, types, shapes or sizes disagree.
    """
    names = [tensor.name for tensor in request.inputs]
    if sorted(names) != sorted(model.inputs):
        msg = f"got inputs {', '.join(names) or 'none'}, expected {', '.join(model.inputs)}"
        raise OnnxModelError(msg)
    if len(request.raw_input_contents) != len(names):
        msg = f"got {len(request.raw_input_contents)} raw contents for {len(names)} inputs, expected one each"
        raise OnnxModelError(msg)
    inputs: Tensors = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        spec = model.inputs[tensor.name]
        if tensor.datatype != _datatype(spec):
            msg = f"input {tensor.name!r} has type {tensor.datatype}, expected {_datatype(spec)}"
            raise OnnxModelError(msg)
        expected, got = _shape(model, spec), list(tensor.shape)
        if len(got) != len(expected) or any(e not in (-1, g) for e, g in zip(expected, got, strict=True)):
            msg = f"input {tensor.name!r} has shape {got}, expected {expected}"
            raise OnnxModelError(msg)
        if model.max_batch_size > 0 and not 0 < got[0] <= model.max_batch_size:
            msg = f"the batch has {got[0]} rows, expected 1 to {model.max_batch_size}"
            raise OnnxModelError(msg)
        inputs[tensor.name] = _array(tensor.name, tensor.datatype, raw).reshape(got)
    return inputs


def _array(name: str, datatype: str, raw: bytes) -> NDArray[Any]:
    if datatype == "BYTES":
        return np.asarray(deserialize_bytes_tensor(raw), dtype=np.object_)
    dtype = np.dtype(triton_to_np_dtype(datatype))
    if len(raw) % dtype.itemsize:
        msg = f"input {name!r} has {len(raw)} bytes, expected a multiple of {dtype.itemsize}"
        raise OnnxModelError(msg)
    return np.frombuffer(raw, dtype=dtype)


def _raw(tensor: NDArray[Any]) -> bytes:
    if tensor.dtype != np.object_:
        return tensor.tobytes()
    serialized = serialize_byte_tensor(tensor)
    return bytes(serialized.item()) if serialized.size else b""


if __name__ == "__main__":
    main(sys.argv[1:])
