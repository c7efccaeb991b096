"""``headrace bench scoring``: the scorer of the flights model, next to its model server called directly.

Triton and Valkey are the run's own. In turns, a batch of feature rows is scored (looked up in Valkey, put together,
asked of Triton, made into score rows), the same matrix is sent to Triton by its own client in requests of the same
size, as many at a time, and single rows are sent one request after the other, to Triton and to a FastAPI endpoint
around onnxruntime. Answers are compared with onnxruntime's own before a time counts. Kafka is not in it.
"""

import asyncio
import http.client
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from infra.local.port import choose_ports
from infra.local.process import spawn, wait_until
from jobs.bench.figure import Figure
from jobs.bench.own_services import own_services
from jobs.flights.model import LATE_ARRIVAL
from jobs.flights.views import VIEWS, aircraft_landings, airport_departures, carrier_departures
from jobs.settings import Settings
from offline.card import MAX_BATCH_SIZE, MODEL_FILE, load_card
from offline.export import run_classifier
from schemas.errors import InferenceError, ServiceError
from schemas.view import FeatureView
from streams.agents.worker import collect_seldom
from streams.inference.arms import Arms
from streams.inference.guard import GuardedModel
from streams.inference.score_table import encode_scores
from streams.inference.scorer import Scorer
from streams.inference.served_model import ServedModel
from streams.inference.triton import TritonModel
from streams.inference.vector import VectorReader
from streams.sinks.online import OnlineReader, OnlineWriter

_SHIPPED: Final = Path(__file__).parents[2] / "model_repository"
_ROWS: Final = 4 * MAX_BATCH_SIZE
"""A micro-batch of the scoring role: four requests, all of which are on the way at once."""
_ROUNDS: Final = 40
_QUICK_ROUNDS: Final = 10
_SINGLE: Final = 100
"""Single requests in a round."""
_CARRIERS: Final = 16
_AIRCRAFT: Final = 3_000
_TOLERANCE: Final = 1e-5
_T0_US: Final = 1_700_000_000_000_000
_PATIENCE_S: Final = 30.0

Tell = Callable[[str], None]


@dataclass
class _Times:
    """Seconds a row, by what was done."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def run(*, quick: bool, tell: Tell) -> list[Figure]:
    """Measure scoring.

    Args:
        quick: Fewer rounds.
        tell: Takes a line of progress.

    Raises:
        InferenceError: Scores are not what the model answers.
        ServiceError: A service cannot be started.
    """
    collect_seldom()  # as the scoring role does
    with own_services(["redis", "triton"]) as settings:
        shutil.copytree(_SHIPPED, settings.model_repository, dirs_exist_ok=True)
        model = settings.model_repository / LATE_ARRIVAL.name / "1" / MODEL_FILE
        port = choose_ports({"endpoint": 8_090})["endpoint"]
        log = settings.home / "logs" / "endpoint.log"
        argv = [sys.executable, "-m", "jobs.bench.one_row_endpoint", str(model), str(port)]
        endpoint = spawn(argv, environment=settings.environment, cwd=Path.cwd(), log=log)
        try:
            if not wait_until(lambda: _answers(port), timeout_s=_PATIENCE_S):
                msg = f"the endpoint to compare with does not answer within {_PATIENCE_S:.0f} s, see {log}"
                raise ServiceError(msg)
            times = asyncio.run(_measure(settings, port, model.read_bytes(), quick=quick, tell=tell))
        finally:
            endpoint.end(grace_s=5.0)
    return _figures(times)


async def _measure(settings: Settings, port: int, model: bytes, *, quick: bool, tell: Tell) -> _Times:
    redis_url, triton = settings.address("redis"), settings.address("triton")
    views = {view.name: view for view in VIEWS}
    card = load_card(settings.model_repository, LATE_ARRIVAL.name)
    async with OnlineWriter(redis_url) as writer:
        for view in (carrier_departures, aircraft_landings):
            await writer.write(_rows(view, _AIRCRAFT if view is aircraft_landings else _CARRIERS), view=view)
    times = _Times()
    async with (
        OnlineReader(redis_url) as reader,
        TritonModel(LATE_ARRIVAL, card.served_version, url=triton, golden=card.golden_rows) as server,
    ):
        await server.connect()
        vectors = VectorReader(LATE_ARRIVAL, views=views, reader=reader)
        model_timeout_s = LATE_ARRIVAL.rungs.timeout_us / 1e6
        guard = GuardedModel(LATE_ARRIVAL.name, server, probe=card.golden_rows.features[:1], timeout_s=model_timeout_s)
        served = ServedModel(LATE_ARRIVAL, card.served_version, model=guard)
        scorer, client = Scorer(Arms.of(served), vectors=vectors), InferenceServerClient(triton)
        rows = _rows(airport_departures, _ROWS)
        matrix = (await vectors.read(rows)).matrix
        expected = run_classifier(model, matrix)
        with closing(http.client.HTTPConnection("127.0.0.1", port)) as endpoint:
            for number in range(_QUICK_ROUNDS if quick else _ROUNDS):
                if number % 10 == 0:
                    tell(f"round {number + 1}")
                await _round(times, scorer, client, endpoint, rows=rows, matrix=matrix, expected=expected)
        await client.close()
        await served.close()
    return times


async def _round(
    times: _Times,
    scorer: Scorer,
    client: InferenceServerClient,
    endpoint: http.client.HTTPConnection,
    *,
    rows: pa.Table,
    matrix: NDArray[np.float32],
    expected: NDArray[np.float32],
) -> None:
    began_s = time.perf_counter()
    scored = await scorer.score(rows, now_us=_T0_US + 10_000)
    scored_s = time.perf_counter()
    payloads = encode_scores(scored.scores)
    encoded_s = time.perf_counter()
    _check(scored.scores["late_probability"].to_numpy(), expected, what="scores")
    if set(scored.scores["served_by"].to_pylist()) != {"model"} or len(payloads) != len(expected):
        msg = "scoring: not every score was made by the model; its times count for nothing"
        raise InferenceError(msg)
    times.add("score", (scored_s - began_s) / _ROWS)
    times.add("encode", (encoded_s - scored_s) / _ROWS)
    times.add("columns", (scored_s - began_s - (scored.inference_ms + scored.lookup_ms) / 1_000) / _ROWS)
    times.add("lookup", scored.lookup_ms / 1_000 / _ROWS)
    times.add("inference", scored.inference_ms / 1_000 / _ROWS)

    began_s = time.perf_counter()
    parts = [matrix[start : start + MAX_BATCH_SIZE] for start in range(0, _ROWS, MAX_BATCH_SIZE)]
    answers = await asyncio.gather(*(_infer(client, part) for part in parts))
    times.add("direct", (time.perf_counter() - began_s) / _ROWS)
    _check(np.concatenate(answers), expected, what="answers of Triton")

    began_s = time.perf_counter()
    single = [await _infer(client, matrix[at : at + 1]) for at in range(_SINGLE)]
    times.add("one_row", (time.perf_counter() - began_s) / _SINGLE)
    _check(np.concatenate(single), expected[:_SINGLE], what="single answers of Triton")

    began_s = time.perf_counter()
    posted = [_post(endpoint, matrix[at]) for at in range(_SINGLE)]
    times.add("endpoint", (time.perf_counter() - began_s) / _SINGLE)
    _check(np.array(posted), expected[:_SINGLE], what="answers of the endpoint")


async def _infer(client: InferenceServerClient, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    tensor = InferInput(LATE_ARRIVAL.input_tensor, list(matrix.shape), "FP32")
    tensor.set_data_from_numpy(np.ascontiguousarray(matrix))
    answer = await client.infer(LATE_ARRIVAL.name, [tensor])
    probabilities: NDArray[np.float32] = answer.as_numpy("probabilities")[:, 1]
    return probabilities


def _post(endpoint: http.client.HTTPConnection, row: NDArray[np.float32]) -> float:
    body = json.dumps({"features": row.tolist()})
    endpoint.request("POST", "/score", body, {"Content-Type": "application/json"})
    return float(json.loads(endpoint.getresponse().read())["probability"])


def _answers(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)) as endpoint:
        try:
            _post(endpoint, np.zeros(len(LATE_ARRIVAL.inputs), dtype=np.float32))
        except (OSError, http.client.HTTPException):
            return False
        return True


def _check(got: NDArray[Any], expected: NDArray[np.float32], *, what: str) -> None:
    off = float(np.abs(got - expected).max(initial=0.0)) if len(got) == len(expected) else float("inf")
    if not off <= _TOLERANCE:
        msg = f"scoring: {what} are off by {off:.2e}, expected {_TOLERANCE:.0e} at most; their times count for nothing"
        raise InferenceError(msg)


def _rows(view: FeatureView, n_rows: int) -> pa.Table:
    """Make feature rows with plausible numbers; an entity each, but for the trigger view, whose rows name others."""
    chance = np.random.default_rng(n_rows)
    plain: dict[str, Any] = {
        "event_time": _T0_US if view is airport_departures else _T0_US - 1_000_000,
        "window_end": _T0_US,
        "pane": "EARLY",
        "pane_index": 0,
        "is_final": False,
        "watermark": _T0_US - 5_000_000,
        "broker_time": _T0_US,
        "view": view.name,
        "view_version": view.version,
        "definition_hash": view.definition_hash,
        "source_topic": view.input.topic,
        "source_partition": 0,
        "computed_time": _T0_US + 1_000,
        "epoch": 1,
    }
    texts = {
        view.entity.key: [f"{view.entity.key}-{number}" for number in range(n_rows)],
        "request_id": [f"request-{number}" for number in range(n_rows)],
        "flight_id": [f"flight-{number}" for number in range(n_rows)],
    }
    if view is airport_departures:
        texts["origin"] = [("EWR", "JFK", "LGA")[at] for at in chance.integers(0, 3, n_rows)]
        texts["carrier"] = [f"carrier-{at}" for at in chance.integers(0, _CARRIERS, n_rows)]
        texts["tail_number"] = [f"tail_number-{at}" for at in chance.integers(0, _AIRCRAFT, n_rows)]
    columns = []
    for column in view.row_schema:
        if column.name in texts:
            columns.append(pa.array(texts[column.name], column.type))
        elif column.name in plain:
            columns.append(pa.repeat(pa.scalar(plain[column.name], column.type), n_rows))
        elif column.name == "source_offset" or pa.types.is_integer(column.type):
            columns.append(pa.array(np.arange(n_rows) % 50, column.type))
        elif pa.types.is_floating(column.type):
            columns.append(pa.array(np.round(chance.normal(10, 30, n_rows), 1), column.type))
        else:
            columns.append(pa.nulls(n_rows, column.type))
    return pa.table(columns, schema=view.row_schema)


def _figures(times: _Times) -> list[Figure]:
    direct, score = times.median("direct"), times.median("score")
    whole = score + times.median("encode")
    figures = [
        Figure(name="scoring.direct", value=1 / direct, unit="rows/s"),
        Figure(
            name="scoring.inference_by_direct",
            value=times.median("inference") / direct,
            unit="x the time",
            compared_with="scoring.direct",
            ratio=times.median("inference") / direct,
        ),
        Figure(
            name="scoring.scores_by_direct",
            value=score / direct,
            unit="x the time",
            bar=1.3,
            is_lower_better=True,
            compared_with="scoring.direct",
            ratio=score / direct,
        ),
        Figure(
            name="scoring.scores", value=1 / score, unit="rows/s", compared_with="scoring.direct", ratio=direct / score
        ),
        Figure(name="scoring.scores_encoded", value=1 / whole, unit="rows/s"),
    ]
    figures += [
        Figure(name=f"scoring.{name}", value=times.median(name) * 1e6, unit="us/row")
        for name in ("lookup", "inference", "columns", "encode")
    ]
    figures += [
        Figure(
            name=f"scoring.{name}",
            value=1 / times.median(name),
            unit="rows/s",
            compared_with="scoring.scores",
            ratio=score / times.median(name),
        )
        for name in ("one_row", "endpoint")
    ]
    return figures
