"""A real Triton that is killed, whose backend is killed or frozen, or answers wrongly: each row is scored once."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from infra.local.services import LocalServices
from schemas.ladder import Ladder, RecentAnswers, Rule
from schemas.model import ModelSpec, ServedVersion
from streams.inference.arms import Arms
from streams.inference.guard import GuardedModel
from streams.inference.rollout import Rollout
from streams.inference.rollout_log import Entry
from streams.inference.scorer import Scored, Scorer
from streams.inference.served_model import ServedModel
from streams.inference.triton import TritonModel
from streams.inference.vector import VectorReader
from streams.inference.versions import OpenVersion, Versions
from tests.support.feature_rows import T0_US
from tests.support.scoring import VIEWS, FakeReader, make_spec, make_triggers

SERVED = ServedVersion(version="1", sha256="ab" * 32)
OTHER = ServedVersion(version="2", sha256="cd" * 32)
SPEC: ModelSpec = make_spec(
    name="failing",
    ladder=Ladder(
        cache=RecentAnswers(),
        rules=(Rule("true", {"probability": 0.125}),),
        waived=("light_model",),
        timeout="2s",
    ),
)
RAISES, ANSWERS_NAN, ANSWERS_INFINITE, ANSWERS_OUT_OF_BOUNDS, ANSWERS_TOO_FEW = 6661.0, 6662.0, 6663.0, 6664.0, 6665.0
CONFIG = """
backend: "python"
max_batch_size: 64
input [ { name: "features" data_type: TYPE_FP32 dims: [ 5 ] } ]
output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
MODEL = f"""
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            features = pb_utils.get_input_tensor_by_name(request, "features").as_numpy()
            first = features[:, 0]
            if (first == {RAISES}).any():
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("cannot divide by this row")))
                continue
            yes = (1 / (1 + first / 100)).astype(np.float32)
            yes[first == {ANSWERS_NAN}] = np.nan
            yes[first == {ANSWERS_INFINITE}] = np.inf
            yes[first == {ANSWERS_OUT_OF_BOUNDS}] = 7
            both = np.stack([1 - yes, yes], axis=1)
            if (first == {ANSWERS_TOO_FEW}).any():
                both = both[:-1]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("probabilities", both)]))
        return answers
"""


@pytest.fixture
def services(tmp_path: Path, make_services: Callable[..., LocalServices]) -> LocalServices:
    repository = tmp_path / "models"
    (repository / "failing" / "1").mkdir(parents=True)
    (repository / "failing" / "1" / "model.py").write_text(MODEL)
    (repository / "failing" / "config.pbtxt").write_text(CONFIG)
    made = make_services(model_repository=repository)
    made.up(["triton"])
    return made


@pytest.fixture
async def scorer(services: LocalServices) -> AsyncIterator[Scorer]:
    probe = np.zeros((1, 5), dtype=np.float32)
    async with TritonModel(SPEC, SERVED, url=services.up(["triton"]).triton) as server:
        await server.connect()
        guard = GuardedModel("failing", server, probe=probe, timeout_s=2.0, pause_s=0.2)
        served = ServedModel(SPEC, SERVED, model=guard)
        yield Scorer(Arms.of(served), vectors=VectorReader(SPEC, views=VIEWS, reader=FakeReader()))
        await served.close()


async def score(scorer: Scorer, *distances: float) -> Scored:
    rows = make_triggers(*({"distance": distance} for distance in distances))
    scored = await scorer.score(rows, now_us=T0_US)
    assert scored.scores["request_id"].to_pylist() == rows["request_id"].to_pylist(), "each row has one score, in order"
    assert scored.dead_letters.num_rows == 0
    return scored


def by_whom(scored: Scored) -> list[str]:
    names: list[str] = scored.scores["served_by"].to_pylist()
    return names


def stubs_of(services: LocalServices) -> list[psutil.Process]:
    """The processes of the server's backend that run the model."""
    (triton,) = [status for status in services.status() if status.name == "triton"]
    children = psutil.Process(triton.pid).children(recursive=True)
    stubs = [child for child in children if "triton_python_backend_stub" in " ".join(child.cmdline())]
    assert stubs
    return stubs


async def until_the_model_answers(scorer: Scorer) -> None:
    async with asyncio.timeout(60):
        # Nothing tells of it but the scores themselves.
        while set(by_whom(await score(scorer, 100.0, 250.0))) != {"model"}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_rows_that_the_model_fails_on_cost_no_others(scorer: Scorer) -> None:
    wrong = [RAISES, ANSWERS_NAN, ANSWERS_INFINITE, ANSWERS_OUT_OF_BOUNDS, ANSWERS_TOO_FEW]
    distances = [float(number) for number in range(100, 190)]
    for number, distance in enumerate(wrong):
        distances.insert(7 + 15 * number, distance)
    scored = await score(scorer, *distances)

    by = by_whom(scored)
    assert [by[distances.index(distance)] for distance in wrong[:4]] == ["rules"] * 4
    served = dict(zip(distances, by, strict=True))
    # An answer with a row too few is of no use to any row of its request of 64.
    others = {distance: who for distance, who in served.items() if distance not in wrong}
    assert list(others.values()).count("model") >= 90 - 64
    for distance, value in zip(distances, scored.scores["probability"].to_pylist(), strict=True):
        assert value == pytest.approx(1 / (1 + distance / 100) if served[distance] == "model" else 0.125)


async def test_one_row_of_a_batch_that_fails_is_the_only_one_to_suffer(scorer: Scorer) -> None:
    distances = [float(number) for number in range(100, 160)]
    distances[31] = RAISES
    by = by_whom(await score(scorer, *distances))

    assert [at for at, who in enumerate(by) if who != "model"] == [31]


async def test_a_killed_server_is_stood_in_for_until_it_is_back(scorer: Scorer, services: LocalServices) -> None:
    assert by_whom(await score(scorer, 100.0)) == ["model"]
    (triton,) = [status for status in services.status() if status.name == "triton"]
    process = psutil.Process(triton.pid)
    process.kill()
    process.wait(10)
    for _ in range(4):
        assert by_whom(await score(scorer, 100.0, 700.0)) == ["cache", "rules"]
    await asyncio.to_thread(services.up, ["triton"])
    await until_the_model_answers(scorer)


async def test_a_killed_backend_that_still_calls_itself_ready_is_loaded_anew(
    scorer: Scorer, services: LocalServices
) -> None:
    assert by_whom(await score(scorer, 100.0)) == ["model"]
    for stub in stubs_of(services):
        stub.kill()
    for _ in range(4):
        assert by_whom(await score(scorer, 100.0, 700.0))[1] in ("rules", "model")
    await until_the_model_answers(scorer)


async def test_a_backend_that_died_is_found_and_loaded_anew_without_any_row(services: LocalServices) -> None:
    healed = asyncio.Event()
    failures: list[str] = []
    probe = np.full((1, 5), 100.0, dtype=np.float32)

    def open_version(served: ServedVersion) -> OpenVersion:
        server = TritonModel(SPEC, served, url=services.up(["triton"]).triton)
        guard = GuardedModel(
            "failing", server, probe=probe, timeout_s=2.0, probe_failed=failures.append, healed=healed.set
        )
        return OpenVersion(model=guard, connect=server.connect, close=server.close)

    versions = Versions(SPEC, open_version=open_version)
    arms = versions.arms(Entry(generation=1, state=Rollout(model=SPEC.name, champion=SERVED)))
    await versions.connect(arms)
    scorer = Scorer(arms, vectors=VectorReader(SPEC, views=VIEWS, reader=FakeReader()))
    (triton,) = [status for status in services.status() if status.name == "triton"]
    for stub in stubs_of(services):
        stub.kill()
    watching = asyncio.create_task(versions.watch(0.05))
    try:
        async with asyncio.timeout(60):
            await healed.wait()
        assert by_whom(await score(scorer, 100.0, 250.0)) == ["model", "model"]
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await versions.close_unused(Entry(generation=2, state=Rollout(model=SPEC.name, champion=OTHER)))
    assert failures[:2] == ["failed"] * 2
    assert triton in services.status(), "the server itself went on"


async def test_a_backend_that_hangs_holds_no_row_up(scorer: Scorer, services: LocalServices) -> None:
    assert by_whom(await score(scorer, 100.0)) == ["model"]
    stubs = stubs_of(services)
    for stub in stubs:
        stub.send_signal(signal.SIGSTOP)
    try:
        for _ in range(4):
            assert by_whom(await score(scorer, 100.0, 700.0)) == ["cache", "rules"]
        assert (await score(scorer, 700.0)).fallen == {("breaker", "rules"): 1}
    finally:
        for stub in stubs:
            with suppress(psutil.NoSuchProcess):
                stub.send_signal(signal.SIGCONT)
