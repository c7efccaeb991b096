import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from schemas.errors import (
    ConfigError,
    InferenceError,
    InferenceTimeoutError,
    InferenceUnavailableError,
    TensorMismatchError,
)
from schemas.model import GoldenRows
from schemas.output import ModelOutput
from streams.inference import triton
from streams.inference.triton import TritonModel
from streams.ports import Recovery
from tests.support.scoring import SERVED, make_spec


def tensor(name: str, shape: list[int], datatype: str = "FP32") -> SimpleNamespace:
    return SimpleNamespace(name=name, shape=shape, datatype=datatype)


def refusal(status: str | None, message: str = "no") -> InferenceServerException:
    return InferenceServerException(message, status=None if status is None else f"StatusCode.{status}")


class FakeClient:
    """The part of the client that is used; each call can be made to fail."""

    def __init__(self, url: str, **_: Any) -> None:
        self.url = url
        self.calls: list[str] = []
        self.failures: dict[str, list[Exception]] = {}
        self.is_live = True
        self.is_ready = True
        self.inputs = [tensor("features", [-1, 5])]
        self.outputs = [tensor("probabilities", [-1, 2])]
        self.parameters: dict[str, str] = {"sha256_3": SERVED.sha256}
        self.max_batch_size = 4
        self.sizes: list[int] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.answer: Callable[[np.ndarray], Any] = lambda features: np.stack(
            [1 - features[:, 0], features[:, 0]], axis=1
        )
        self.gate: asyncio.Event | None = None
        self.is_unloading, self.unload_gate = asyncio.Event(), asyncio.Event()
        self.unload_gate.set()
        self.stays_ready = True

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.failures.get(name):
            raise self.failures[name].pop(0)

    async def is_server_live(self, **_: Any) -> bool:
        self._called("is_server_live")
        return self.is_live

    async def is_model_ready(self, *_: Any, **__: Any) -> bool:
        self._called("is_model_ready")
        return self.is_ready

    async def load_model(self, name: str, **_: Any) -> None:
        self._called("load_model")

    async def unload_model(self, name: str, **_: Any) -> None:
        self._called("unload_model")
        self.is_unloading.set()
        await self.unload_gate.wait()
        self.is_ready = self.stays_ready

    async def get_model_metadata(self, *_: Any, **__: Any) -> SimpleNamespace:
        self._called("get_model_metadata")
        return SimpleNamespace(inputs=self.inputs, outputs=self.outputs)

    async def get_model_config(self, *_: Any, **__: Any) -> SimpleNamespace:
        self._called("get_model_config")
        parameters = {name: SimpleNamespace(string_value=value) for name, value in self.parameters.items()}
        return SimpleNamespace(config=SimpleNamespace(max_batch_size=self.max_batch_size, parameters=parameters))

    async def infer(self, name: str, inputs: list[Any], **options: Any) -> SimpleNamespace:
        self._called("infer")
        assert (name, options["model_version"]) == ("delay", "3")
        features = np.frombuffer(inputs[0]._get_content(), dtype=np.float32).reshape(inputs[0].shape())
        self.sizes.append(len(features))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.gate is not None:
                await self.gate.wait()
            else:
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        answer = self.answer(features)
        return SimpleNamespace(as_numpy=lambda _: answer)

    async def close(self) -> None:
        self._called("close")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    monkeypatch.setattr(triton, "_HEAL_JITTER_S", 0.0)
    fake = FakeClient("host:1")
    monkeypatch.setattr(triton, "InferenceServerClient", lambda url, **_: fake)
    return fake


def make_model(**changes: Any) -> TritonModel:
    return TritonModel(make_spec(), SERVED, url="host:1", **changes)


def features(n_rows: int) -> np.ndarray:
    values = np.zeros((n_rows, 5), dtype=np.float32)
    values[:, 0] = np.arange(n_rows) / 100
    return values


def golden(off: float = 0.0) -> GoldenRows:
    return GoldenRows(features=features(3), outputs={"probability": features(3)[:, 0].astype(np.float64) + off})


async def connected(**changes: Any) -> TritonModel:
    model = make_model(**changes)
    await model.connect()
    return model


async def test_rows_are_split_by_the_server_s_batch_size_and_come_back_in_order(client: FakeClient):
    model = await connected()
    answer = await model.infer(features(11), timeout_s=1)

    assert model.max_batch_size == 4
    assert sorted(client.sizes) == [3, 4, 4]
    np.testing.assert_array_equal(answer.outputs["probabilities"][:, 1], features(11)[:, 0])
    assert answer.outputs["probabilities"].dtype == np.float32
    assert answer.rejected == []


async def test_no_more_requests_are_on_the_way_than_allowed(client: FakeClient):
    model = await connected(max_in_flight=2)
    await asyncio.gather(model.infer(features(20), timeout_s=1), model.infer(features(20), timeout_s=1))

    assert client.most_in_flight == 2
    assert sum(client.sizes) == 40


async def test_how_it_is_asked_is_as_the_server_s_configuration_says(client: FakeClient):
    client.parameters |= {"request_rows": "3", "requests_in_flight": "2"}
    model = await connected()
    await model.infer(features(20), timeout_s=1)

    assert max(client.sizes) == 3
    assert client.most_in_flight == 2


async def test_who_names_a_number_of_requests_has_them_as_large_as_the_server_takes_them(client: FakeClient):
    client.parameters |= {"request_rows": "1", "requests_in_flight": "2"}

    assert (await connected(max_in_flight=3)).max_batch_size == 4


async def test_no_request_is_larger_than_the_server_takes_it(client: FakeClient):
    client.parameters |= {"request_rows": "512", "requests_in_flight": "2"}

    assert (await connected()).max_batch_size == 4


async def test_a_configuration_that_says_half_of_it_is_refused(client: FakeClient):
    client.parameters["request_rows"] = "512"
    with pytest.raises(
        ConfigError, match=r"has parameters {'request_rows': '512'}, expected request_rows and requests"
    ):
        await connected()


async def test_no_rows_need_no_request(client: FakeClient):
    answer = await (await connected()).infer(features(0), timeout_s=1)

    assert answer.outputs["probabilities"].shape == (0, 2)
    assert client.sizes == []


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("UNAVAILABLE", InferenceUnavailableError),
        ("NOT_FOUND", InferenceUnavailableError),
        ("INTERNAL", InferenceUnavailableError),
        ("RESOURCE_EXHAUSTED", InferenceUnavailableError),
        ("CANCELLED", InferenceUnavailableError),
        ("UNKNOWN", InferenceUnavailableError),
        ("DEADLINE_EXCEEDED", InferenceTimeoutError),
        ("INVALID_ARGUMENT", TensorMismatchError),
        (None, TensorMismatchError),
    ],
)
async def test_each_error_of_the_client_becomes_one_of_ours(
    client: FakeClient, status: str | None, error: type[InferenceError]
):
    model = await connected()
    client.failures["infer"] = [refusal(status, "what the server said")]

    with pytest.raises(
        error, match=rf"version 3 on Triton at host:1: what the server said \({status or 'client'}\)"
    ) as caught:
        await model.infer(features(1), timeout_s=1)
    assert isinstance(caught.value.__cause__, InferenceServerException)


async def test_when_one_request_fails_the_others_are_given_up(client: FakeClient):
    model = await connected()
    client.gate = asyncio.Event()
    client.failures["infer"] = [refusal("UNAVAILABLE")]

    with pytest.raises(InferenceUnavailableError):
        await model.infer(features(9), timeout_s=1)
    assert client.in_flight == 0


async def test_an_answer_that_does_not_come_in_time_is_given_up(client: FakeClient):
    model = await connected()
    client.gate = asyncio.Event()

    with pytest.raises(InferenceTimeoutError, match=r"did not answer 9 rows within 0.01 s"):
        await model.infer(features(9), timeout_s=0.01)
    assert client.in_flight == 0


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda given: np.zeros((len(given) + 1, 2), dtype=np.float32), r"\(5, 2\) float32, expected \(4, 2\)"),
        (lambda given: np.zeros((len(given), 3), dtype=np.float32), r"\(4, 3\) float32, expected \(4, 2\)"),
        (lambda given: np.zeros((len(given), 2)), r"\(4, 2\) float64, expected \(4, 2\) float32"),
        (lambda given: None, "missing, expected"),
    ],
)
async def test_an_answer_of_the_wrong_shape_rejects_the_rows_of_its_request_alone(
    client: FakeClient, answer: Callable[[np.ndarray], Any], got: str
):
    right = client.answer
    client.answer = lambda given: answer(given) if given[0, 0] == np.float32(0.04) else right(given)
    inference = await (await connected()).infer(features(11), timeout_s=1)

    ((rows, fault),) = inference.rejected
    assert rows == range(4, 8)
    with pytest.raises(AssertionError, match=got):
        raise AssertionError(fault)
    np.testing.assert_array_equal(inference.outputs["probabilities"][8:, 1], features(11)[8:, 0])


@pytest.mark.parametrize("given", [np.zeros((2, 4), np.float32), np.zeros((2, 5)), np.zeros(5, np.float32)])
async def test_a_matrix_that_is_not_the_contract_s_is_not_sent(client: FakeClient, given: np.ndarray):
    with pytest.raises(TensorMismatchError, match=r"expected \(n_rows, 5\) float32; build them with ModelSpec.matrix"):
        await (await connected()).infer(given, timeout_s=1)
    assert client.sizes == []


async def test_connecting_waits_until_the_server_is_live(client: FakeClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "_POLL_S", 0.001)
    client.failures["is_server_live"] = [refusal("UNAVAILABLE"), refusal("DEADLINE_EXCEEDED")]
    await connected()

    assert client.calls == [*["is_server_live"] * 3, "load_model", "get_model_metadata", "get_model_config"]


async def test_a_server_that_does_not_come_is_told_with_what_to_do(client: FakeClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "_POLL_S", 0.001)
    client.is_live = False
    with pytest.raises(
        InferenceUnavailableError, match=r"host:1 was not live within 0.01 s: it is not live yet; see `headrace"
    ):
        await make_model().connect(timeout_s=0.01)


async def test_a_server_that_loads_models_by_itself_need_not_be_told(client: FakeClient):
    client.failures["load_model"] = [refusal("UNAVAILABLE", "explicit model load / unload is not allowed")]
    await connected()

    assert "is_model_ready" in client.calls


async def test_a_model_that_cannot_be_loaded_is_unavailable_and_not_called_a_mismatch(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
):
    async def is_model_ready(*_: Any, **__: Any) -> bool:
        return False

    monkeypatch.setattr(client, "is_model_ready", is_model_ready)
    client.failures["load_model"] = [refusal("INVALID_ARGUMENT", "load failed for model 'delay'")]
    with pytest.raises(InferenceUnavailableError, match="load failed for model 'delay'"):
        await connected()


async def test_a_version_that_the_server_has_not_is_told(client: FakeClient):
    client.failures["get_model_metadata"] = [refusal("NOT_FOUND", "unknown version")]
    with pytest.raises(
        InferenceUnavailableError, match=r"is not loaded: .*unknown version.*repository has that version"
    ):
        await connected()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"inputs": [tensor("features", [-1, 6])]},
            r"input 'features' is \('FP32', \[-1, 6\]\) .*, expected \('FP32', \[-1, 5\]\)",
        ),
        ({"inputs": [tensor("features", [-1, 5], "FP64")]}, r"input 'features' is \('FP64'"),
        ({"inputs": [tensor("other", [-1, 5])]}, r"input 'features' is None among \['other'\]"),
        ({"inputs": [tensor("features", [-1, 5]), tensor("more", [-1, 1])]}, r"also wants inputs \['more'\]"),
        (
            {"outputs": [tensor("probabilities", [-1, 3])]},
            r"output 'probabilities' is .*expected \('FP32', \[-1, 2\]\)",
        ),
        ({"outputs": []}, r"output 'probabilities' is None among \[\]"),
    ],
)
async def test_a_model_with_other_tensors_is_refused(client: FakeClient, changes: dict[str, Any], message: str):
    vars(client).update(changes)
    with pytest.raises(TensorMismatchError, match=message):
        await connected()


async def test_a_model_with_further_outputs_or_any_width_is_fine(client: FakeClient):
    client.outputs = [tensor("probabilities", [-1, -1]), tensor("label", [-1, 1], "INT64")]
    await connected()


async def test_another_file_under_the_same_version_is_refused(client: FakeClient):
    client.parameters["sha256_3"] = "cd" * 32
    with pytest.raises(ConfigError, match=rf"has SHA-256 {'cd' * 32} .*, expected {'ab' * 32} as its card says"):
        await connected()


async def test_a_configuration_without_checksums_is_believed(client: FakeClient):
    client.parameters = {}
    await connected()


async def test_golden_rows_prove_that_the_server_computes_what_training_did(client: FakeClient):
    model = await connected()
    await model.prove(golden(off=1e-6))

    with pytest.raises(
        InferenceError, match=r"answers `probability` of its card's golden rows off by 1.00e-01, expected"
    ):
        await model.prove(golden(off=0.1))
    with pytest.raises(InferenceError, match=r"golden rows off by 1.00e-01"):
        await connected(golden=golden(off=0.1))


async def test_golden_rows_that_are_answered_with_nan_prove_nothing(client: FakeClient):
    client.answer = lambda given: np.full((len(given), 2), np.nan, dtype=np.float32)
    with pytest.raises(InferenceError, match="off by nan"):
        await connected(golden=golden())


CHECKED = ["get_model_metadata", "get_model_config"]
LOOKED = ["is_server_live", "is_model_ready", "infer"]
LOOKED_AGAIN = ["is_model_ready", "infer"]
DEAD = refusal("INTERNAL", "stub process is not healthy")


async def test_a_ready_model_that_does_not_answer_is_unloaded_and_loaded(client: FakeClient):
    model = await connected()
    client.calls.clear()
    client.failures["infer"] = [DEAD, DEAD]

    assert await model.recover() is Recovery.HEALED
    assert client.calls == [*LOOKED, *LOOKED_AGAIN, "unload_model", "load_model", *CHECKED, "infer"]


async def test_a_dead_model_that_another_worker_loads_meanwhile_is_left_to_it(client: FakeClient):
    model = await connected()
    client.calls.clear()
    client.failures["infer"] = [DEAD]

    assert await model.recover() is Recovery.UNNEEDED
    assert client.calls == [*LOOKED, *LOOKED_AGAIN]


async def test_a_model_that_loading_anew_does_not_help_is_told(client: FakeClient):
    model = await connected()
    client.failures["infer"] = [DEAD] * 3
    assert await model.recover() is Recovery.FAILED

    client.failures = {"infer": [DEAD] * 2, "load_model": [refusal("INTERNAL", "no room")]}
    client.stays_ready = False
    assert await model.recover() is Recovery.FAILED


async def test_a_model_is_not_left_unloaded_by_who_is_cancelled_or_closes(client: FakeClient):
    model = await connected()
    client.calls.clear()
    client.failures["infer"] = [DEAD, DEAD]
    client.unload_gate.clear()
    recovering = asyncio.create_task(model.recover())
    async with asyncio.timeout(5):
        await client.is_unloading.wait()
    recovering.cancel()
    closing = asyncio.create_task(model.close())
    await asyncio.wait([recovering])
    client.unload_gate.set()
    await closing

    assert recovering.cancelled()
    assert client.calls[-5:] == ["load_model", *CHECKED, "infer", "close"]


async def test_the_row_that_is_tried_is_one_that_the_card_answers(client: FakeClient):
    asked: list[float] = []
    model = await connected(golden=GoldenRows(features=features(5)[3:], outputs={"probability": features(5)[3:, 0]}))
    answer = client.answer
    client.answer = lambda given: (asked.extend(given[:, 0]), answer(given))[1]
    await model.recover()

    assert asked == [np.float32(0.03)]


async def test_a_model_that_answers_again_is_left_alone(client: FakeClient):
    model = await connected()
    client.calls.clear()

    assert await model.recover() is Recovery.UNNEEDED
    assert client.calls == LOOKED


async def test_a_model_that_is_slow_is_left_alone(client: FakeClient):
    model = await connected()
    client.calls.clear()
    client.failures["infer"] = [refusal("DEADLINE_EXCEEDED", "busy")]

    assert await model.recover() is Recovery.UNNEEDED
    assert client.calls == LOOKED


async def test_a_model_that_is_not_ready_is_loaded(client: FakeClient):
    model = await connected()
    client.calls.clear()
    client.is_ready = False

    assert await model.recover() is Recovery.LOADED
    assert client.calls == ["is_server_live", "is_model_ready", "load_model", *CHECKED]


async def test_a_model_that_comes_back_as_another_is_refused(client: FakeClient):
    model = await connected()
    client.is_ready = False
    client.parameters["sha256_3"] = "cd" * 32
    with pytest.raises(ConfigError, match="has SHA-256 cdcd"):
        await model.recover()


async def test_a_server_that_names_no_batch_size_takes_any_number_of_rows(client: FakeClient):
    client.max_batch_size = 0
    model = await connected()
    await model.infer(features(1_000), timeout_s=1)

    assert client.sizes == [1_000]


async def test_nothing_is_loaded_where_the_server_is_gone(client: FakeClient, caplog: pytest.LogCaptureFixture):
    model = await connected()
    client.calls.clear()
    client.failures["is_server_live"] = [refusal("UNAVAILABLE", "connection refused")]

    assert await model.recover() is Recovery.AWAY
    assert client.calls == ["is_server_live"]
    assert "could not be recovered" in caplog.text


async def test_a_model_that_is_not_connected_says_so():
    with pytest.raises(InferenceUnavailableError, match=r"is not connected: what runs there has not been proved"):
        await make_model().infer(features(1), timeout_s=1)


async def test_the_connection_is_closed_with_the_context(client: FakeClient):
    async with make_model() as model:
        await model.connect()

    assert client.calls[-1] == "close"


def test_fewer_than_one_request_in_flight_is_refused():
    with pytest.raises(ConfigError, match="`max_in_flight` is 0, expected 1 or more"):
        make_model(max_in_flight=0)


async def test_outputs_of_several_tensors_are_asked_for_by_name(client: FakeClient):
    spec = make_spec(
        outputs=(ModelOutput(column="a", tensor="x", width=2), ModelOutput(column="b", tensor="y", width=2))
    )
    client.outputs = [tensor("x", [-1, 2]), tensor("y", [-1, 2])]
    model = TritonModel(spec, SERVED, url="host:1")
    await model.connect()

    assert set((await model.infer(features(2), timeout_s=1)).outputs) == {"x", "y"}
