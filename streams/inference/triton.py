"""A model on an NVIDIA Triton Inference Server, over its gRPC protocol."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from schemas.errors import (
    ConfigError,
    InferenceError,
    InferenceTimeoutError,
    InferenceUnavailableError,
    TensorMismatchError,
)
from schemas.model import GoldenRows, ModelSpec, ServedVersion
from schemas.output import DATATYPES
from schemas.request_shape import RequestShape
from streams.ports import Inference, Recovery

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_CHANNEL: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # By default a broken connection is tried again after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A server that vanished without closing its connections is noticed within seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_POLL_S: Final = 0.1
_CALL_S: Final = 30.0
"""Deadline of control calls; loading a model can take seconds."""
_CONNECT_S: Final = 1.0
"""How long a server that was not there at the start is waited for, each time."""
_MAX_ROWS: Final = 4_096
"""Rows in one request where the server names no bound."""
_MAX_IN_FLIGHT: Final = 4
"""Requests on the way at once where nothing was measured."""
_PROBE_S: Final = 5.0
"""Deadline of the row by which it is seen whether a model answers."""
_HEAL_JITTER_S: Final = 1.0
"""Within which a model is loaded anew: all workers find it dead at once, and one of them is enough."""


class TritonModel:
    """One version of a model on a Triton server; implements :class:`streams.ports.ModelServer`.

    Belongs to the event loop that connects it. Several calls may be made at once; all of them together have at most
    ``max_in_flight`` requests on the way.

    Args:
        spec: The model's contract.
        served: The version to score with, from its card.
        url: gRPC endpoint, ``host:port``.
        golden: Rows that the server must answer as its card says before it is used; None to trust it.
        max_in_flight: Requests on the way at once, each as large as the server takes it; None takes both from the
            server's configuration, where `headrace models bench --write` puts them, else 4.
    """

    def __init__(
        self,
        spec: ModelSpec,
        served: ServedVersion,
        *,
        url: str,
        golden: GoldenRows | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            msg = f"`max_in_flight` is {max_in_flight}, expected 1 or more"
            raise ConfigError(msg)
        self._spec = spec
        self._served = served
        self._url = url
        self._golden = golden
        self._max_in_flight = max_in_flight
        self._n_slots = max_in_flight or _MAX_IN_FLIGHT
        self._slots = asyncio.Semaphore(self._n_slots)
        self._recovery = asyncio.Lock()
        self._probe = np.zeros((1, len(spec.inputs)), dtype=np.float32)
        if golden is not None and len(golden.features):
            self._probe = golden.features[:1]
        self._loading_anew: asyncio.Task[None] | None = None
        self._max_batch_size = 1
        self._is_proved = False
        self._client: InferenceServerClient | None = None
        self._outputs = [InferRequestedOutput(tensor) for tensor in spec.output_tensors]

    @property
    def max_batch_size(self) -> int:
        """Rows in one request at most, as the server's configuration says; 1 before :meth:`connect`."""
        return self._max_batch_size

    async def connect(self, *, timeout_s: float = 30.0) -> None:
        """Wait for the server, load the model, and check that it is the one expected.

        Raises:
            InferenceUnavailableError: The server is not live in time, does not have the version, or cannot load it.
            TensorMismatchError: The model's inputs or outputs are not those of its contract.
            ConfigError: The server has another file under that version than the card describes.
            InferenceError: It answers the golden rows otherwise than the card says.
        """
        if self._client is None:
            self._client = InferenceServerClient(self._url, channel_args=_CHANNEL)
        await self._wait_until_live(timeout_s)
        await self._load()
        await self._check()
        if self._golden is not None:
            await self.prove(self._golden)
        self._is_proved = True

    async def attach(self, *, timeout_s: float = 5.0) -> None:
        """Use the version as it stands on the server, and load nothing.

        Raises:
            InferenceUnavailableError: The server is not live in time.
            ConfigError: The version is not loaded there, or another file is under that number.
            TensorMismatchError: The model's inputs or outputs are not those of its contract.
        """
        if self._client is None:
            self._client = InferenceServerClient(self._url, channel_args=_CHANNEL)
        await self._wait_until_live(timeout_s)
        if not await self._is_ready():
            msg = (
                f"{self._name} is not loaded, expected it loaded and warm; run `headrace models load "
                f"{self._spec.name} {self._served.version}`"
            )
            raise ConfigError(msg)
        await self._check()
        self._is_proved = True

    async def infer(self, features: NDArray[np.float32], *, timeout_s: float) -> Inference:
        """Score a matrix, in as many requests as the server's batch size asks for; see the port."""
        if not self._is_proved:
            msg = f"{self._name} is not connected: what runs there has not been proved to be that model"
            raise InferenceUnavailableError(msg)
        return await self._infer(features, timeout_s=timeout_s)

    async def _infer(self, features: NDArray[np.float32], *, timeout_s: float) -> Inference:
        if features.ndim != 2 or features.shape[1] != len(self._spec.inputs) or features.dtype != np.float32:
            msg = (
                f"{self._name}: features are {features.shape} {features.dtype}, expected "
                f"(n_rows, {len(self._spec.inputs)}) float32; build them with ModelSpec.matrix"
            )
            raise TensorMismatchError(msg)
        starts = range(0, len(features), self._max_batch_size)
        parts = [range(start, min(start + self._max_batch_size, len(features))) for start in starts]
        try:
            async with asyncio.timeout(timeout_s):
                answers = await _all(
                    [self._infer_part(features[part.start : part.stop], timeout_s=timeout_s) for part in parts]
                )
        except TimeoutError as exc:
            msg = (
                f"{self._name} did not answer {len(features)} rows within {timeout_s:g} s; see whether the server is "
                "overloaded, or allow more time"
            )
            raise InferenceTimeoutError(msg) from exc
        outputs = {
            tensor: np.zeros((len(features), width), dtype=DATATYPES[datatype])
            for tensor, (datatype, width) in self._spec.output_tensors.items()
        }
        rejected = []
        for part, (arrays, fault) in zip(parts, answers, strict=True):
            if fault is not None:
                rejected.append((part, fault))
                continue
            for tensor, array in arrays.items():
                outputs[tensor][part.start : part.stop] = array
        return Inference(outputs=outputs, rejected=rejected)

    async def prove(self, golden: GoldenRows, *, tolerance: float = 1e-5) -> None:
        """Make sure that the server computes what the model did in training.

        Raises:
            InferenceError: An answer is off by more than ``tolerance``.
        """
        for column, off in (await self.differences(golden)).items():
            if not off <= tolerance:
                msg = (
                    f"{self._name} answers `{column}` of its card's golden rows off by {off:.2e}, expected at most "
                    f"{tolerance:.0e}; see whether it runs the file that the card was made with"
                )
                raise InferenceError(msg)

    async def differences(self, golden: GoldenRows) -> dict[str, float]:
        """Tell the largest difference from the answers expected, by output column; NaN where an answer is none."""
        answer = await self._infer(golden.features, timeout_s=_CALL_S)
        off = {}
        for output in self._spec.outputs:
            answered = answer.outputs[output.tensor][:, output.index]
            difference = np.abs(answered - golden.outputs[output.column]).max(initial=0.0)
            off[output.column] = np.nan if answer.rejected else float(difference)
        return off

    async def recover(self) -> Recovery:
        """Load a model that is not ready; unload and load one that is, but fails; see the port.

        A backend process that died leaves a model that Triton calls ready and that fails every request: only loading it
        anew helps. A model that does not answer in time is left alone: it may be busy. Where the server itself is gone
        nothing is done. A model that was never connected is connected. Other versions of the model on the server are
        loaded anew with it.
        """
        async with self._recovery:
            if not self._is_proved:
                try:
                    await self.connect(timeout_s=_CONNECT_S)
                except (InferenceUnavailableError, InferenceTimeoutError) as exc:
                    logger.warning("%s is still not connected: %s", self._name, exc)
                    return Recovery.AWAY
                return Recovery.LOADED
            try:
                if not await self._call(lambda client: client.is_server_live(client_timeout=1.0)):
                    return Recovery.AWAY
            except InferenceError as exc:
                logger.warning("%s could not be recovered: %s", self._name, exc)
                return Recovery.AWAY
            try:
                return await self._load_or_heal()
            except InferenceError as exc:
                logger.warning("%s could not be recovered: %s", self._name, exc)
                return Recovery.FAILED

    async def _load_or_heal(self) -> Recovery:
        if not await self._is_ready():
            await self._load()
            await self._check()
            return Recovery.LOADED
        if not await self._fails():
            return Recovery.UNNEEDED
        await asyncio.sleep(random.uniform(0, _HEAL_JITTER_S))  # noqa: S311 - no secret
        if not (await self._is_ready() and await self._fails()):
            return Recovery.UNNEEDED
        logger.warning("%s is ready but does not answer; unloading and loading it", self._name)
        # Whoever is cancelled meanwhile must not leave it unloaded: it may be another version's champion.
        self._loading_anew = asyncio.create_task(self._load_anew())
        await asyncio.shield(self._loading_anew)
        logger.info("%s was unloaded and loaded, and answers", self._name)
        return Recovery.HEALED

    async def _load_anew(self) -> None:
        await self._call(lambda client: client.unload_model(self._spec.name, client_timeout=_CALL_S))
        await self._load()
        await self._check()
        await self._infer(self._probe, timeout_s=_PROBE_S)

    async def close(self) -> None:
        """Close the connection, once a model that is being loaded anew is."""
        if self._loading_anew is not None:
            await asyncio.gather(self._loading_anew, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _name(self) -> str:
        return f"model {self._spec.name} version {self._served.version} on Triton at {self._url}"

    async def _wait_until_live(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                if await self._call(lambda client: client.is_server_live(client_timeout=1.0)):
                    return
                fault = "it is not live yet"
            except (InferenceUnavailableError, InferenceTimeoutError) as exc:
                fault = str(exc)
            if loop.time() + _POLL_S > deadline:
                msg = f"Triton at {self._url} was not live within {timeout_s:g} s: {fault}; see `headrace services up`"
                raise InferenceUnavailableError(msg)
            await asyncio.sleep(_POLL_S)

    async def _load(self) -> None:
        name = self._spec.name
        try:
            await self._call(lambda client: client.load_model(name, client_timeout=_CALL_S))
        except InferenceError:
            # Servers that load models on their own (polling, or all at start) refuse to be told.
            if not await self._is_ready():
                raise

    async def _is_ready(self) -> bool:
        return await self._call(
            lambda client: client.is_model_ready(self._spec.name, self._served.version, client_timeout=1.0)
        )

    async def _fails(self) -> bool:
        try:
            await self._infer(self._probe, timeout_s=_PROBE_S)
        except InferenceUnavailableError:
            return True
        except (InferenceTimeoutError, TensorMismatchError):
            pass  # it is busy, or another model: to load it anew would help neither
        return False

    async def _check(self) -> None:
        name, version = self._spec.name, self._served.version
        try:
            metadata = await self._call(lambda client: client.get_model_metadata(name, version, client_timeout=_CALL_S))
            answer = await self._call(lambda client: client.get_model_config(name, version, client_timeout=_CALL_S))
        except InferenceUnavailableError as exc:
            msg = f"{self._name} is not loaded: {exc}; see that the server's repository has that version"
            raise InferenceUnavailableError(msg) from exc
        config = answer.config
        self._check_tensors("input", metadata.inputs, {self._spec.input_tensor: ("FP32", len(self._spec.inputs))})
        self._check_tensors("output", metadata.outputs, self._spec.output_tensors)
        parameter = f"sha256_{version}"
        got = config.parameters[parameter].string_value if parameter in config.parameters else self._served.sha256
        if got != self._served.sha256:
            msg = (
                f"{self._name} has SHA-256 {got} by the server's configuration, expected {self._served.sha256} as "
                "its card says; give server and worker the same model repository"
            )
            raise ConfigError(msg)
        # 0 says that batching is none of Triton's business: the model takes a matrix of any length, as its shape says.
        self._max_batch_size = int(config.max_batch_size) or _MAX_ROWS
        if self._max_in_flight is None:
            requests = RequestShape.of({name: value.string_value for name, value in config.parameters.items()})
            self._take(requests or RequestShape(rows=self._max_batch_size, in_flight=_MAX_IN_FLIGHT))

    def _take(self, requests: RequestShape) -> None:
        self._max_batch_size = min(requests.rows, self._max_batch_size)
        if requests.in_flight != self._n_slots:
            # What is on the way gives its place back where it took it.
            self._n_slots = requests.in_flight
            self._slots = asyncio.Semaphore(self._n_slots)

    def _check_tensors(self, kind: str, found: Any, expected: Mapping[str, tuple[str, int]]) -> None:
        declared = {tensor.name: (str(tensor.datatype), [int(size) for size in tensor.shape]) for tensor in found}
        for name, (datatype, width) in expected.items():
            got = declared.get(name)
            if got not in ((datatype, [-1, width]), (datatype, [-1, -1])):
                msg = (
                    f"{self._name}: {kind} {name!r} is {got} among {sorted(declared)}, expected "
                    f"{(datatype, [-1, width])} (a batch of rows) as the model's contract says; train "
                    "the model anew or correct its config.pbtxt"
                )
                raise TensorMismatchError(msg)
        if kind == "input" and (further := sorted(set(declared) - set(expected))):
            msg = f"{self._name} also wants inputs {further}, expected {sorted(expected)} alone; train the model anew"
            raise TensorMismatchError(msg)

    async def _infer_part(
        self, features: NDArray[np.float32], *, timeout_s: float
    ) -> tuple[dict[str, NDArray[Any]], str | None]:
        tensor = InferInput(self._spec.input_tensor, list(features.shape), "FP32")
        tensor.set_data_from_numpy(np.ascontiguousarray(features))
        async with self._slots:
            result = await self._call(
                lambda client: client.infer(
                    self._spec.name,
                    [tensor],
                    model_version=self._served.version,
                    outputs=self._outputs,
                    client_timeout=timeout_s,
                ),
                is_inference=True,
            )
        arrays: dict[str, NDArray[Any]] = {}
        for name, (datatype, width) in self._spec.output_tensors.items():
            array = result.as_numpy(name)
            if array is None or array.dtype != DATATYPES[datatype] or array.shape != (len(features), width):
                got = "missing" if array is None else f"{array.shape} {array.dtype}"
                expected = f"({len(features)}, {width}) {np.dtype(DATATYPES[datatype])}"
                return {}, f"{self._name} answered output {name!r} {got}, expected {expected}"
            arrays[name] = array
        return arrays, None

    async def _call(
        self, call: Callable[[InferenceServerClient], Coroutine[Any, Any, Answer]], *, is_inference: bool = False
    ) -> Answer:
        """Make one call, its errors put into Headrace's tree; only inference can be refused for its tensors."""
        if self._client is None:
            msg = f"{self._name} is not connected; call connect() before"
            raise InferenceUnavailableError(msg)
        try:
            return await call(self._client)
        except InferenceServerException as exc:
            status = str(exc.status() or "").removeprefix("StatusCode.")
            msg = f"{self._name}: {exc.message()} ({status or 'client'})"
            if status == "DEADLINE_EXCEEDED":
                raise InferenceTimeoutError(msg) from exc
            if is_inference and status in ("INVALID_ARGUMENT", ""):
                raise TensorMismatchError(msg) from exc
            raise InferenceUnavailableError(msg) from exc


async def _all(calls: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Await all; at the first failure the others are cancelled, and none is left running."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
