"""A small model with its views, and fakes of the services that scoring needs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offline.label import Label
from schemas.aggregation import count, from_event, last, max_
from schemas.entity import Entity
from schemas.ladder import NO_LADDER
from schemas.model import ModelInput, ModelSpec, ServedVersion, ViewReference
from schemas.output import ModelOutput
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.inference.arms import Arms
from streams.inference.guard import GuardedModel
from streams.inference.scorer import Scorer
from streams.inference.served_model import ServedModel
from streams.inference.vector import VectorReader
from streams.ports import Inference, ModelServer, OnlineColumns, Recovery
from tests.support.feature_rows import T0_US, make_rows

MINUTE_US = 60_000_000
SERVED = ServedVersion(version="3", sha256="ab" * 32)


def make_trigger_view(*, name: str = "trips", **changes: Any) -> FeatureView:
    """Departures of an airport, each of which is scored."""
    settings: dict[str, Any] = {
        "version": 2,
        "entity": Entity("airport", key="origin"),
        "source": EventSource("flights.departed", contract="flight_departed@1", max_out_of_orderness="2m"),
        "slide": "5m",
        "emit": "every_event",
        "features": {
            "trips_1h": count().over("1h"),
            "worst_1h": max_("departure_delay").over("1h"),
            "flight_id": from_event("flight_id"),
            "carrier": from_event("carrier"),
            "tail_number": from_event("tail_number"),
            "distance": from_event("distance"),
        },
    }
    return FeatureView(name, **settings | changes)


def make_carrier_view(**changes: Any) -> FeatureView:
    """What a carrier did last, to look up."""
    settings: dict[str, Any] = {
        "version": 1,
        "entity": Entity("carrier", key="carrier"),
        "source": EventSource("flights.by_carrier", contract="flight_departed@1", max_out_of_orderness="2m"),
        "slide": "5m",
        "features": {
            "trips_1h": count().over("1h"),
            "last_delay": last("departure_delay").over(last=1),
        },
    }
    return FeatureView("carrier_trips", **settings | changes)


def make_aircraft_view(**changes: Any) -> FeatureView:
    """What an aircraft did last, to look up."""
    settings: dict[str, Any] = {
        "version": 1,
        "entity": Entity("aircraft", key="tail_number"),
        "source": EventSource("flights.landed", contract="flight_landed@1", max_out_of_orderness="2m"),
        "slide": "5m",
        "emit": "every_event",
        "features": {
            "last_delay": last("arrival_delay").over(last=1),
            "flight_id": from_event("flight_id"),
            "arrival_delay": from_event("arrival_delay"),
        },
    }
    return FeatureView("aircraft_trips", **settings | changes)


TRIPS = make_trigger_view()
CARRIERS = make_carrier_view()
AIRCRAFT = make_aircraft_view()
VIEWS = {view.name: view for view in (TRIPS, CARRIERS, AIRCRAFT)}


def make_spec(*, view: FeatureView = TRIPS, **changes: Any) -> ModelSpec:
    """A model with inputs of its trigger row and of two views to look up."""
    settings: dict[str, Any] = {
        "name": "delay",
        "version": "1",
        "trigger": ViewReference.of(view),
        "entity": "flight_id",
        "inputs": (
            ModelInput.of(view, "distance"),
            ModelInput.of(CARRIERS, "last_delay", key="carrier"),
            ModelInput.of(view, "trips_1h"),
            ModelInput.of(CARRIERS, "trips_1h", key="carrier", default=-1.0),
            ModelInput.of(AIRCRAFT, "last_delay", key="tail_number"),
        ),
        "outputs": (ModelOutput(column="probability", tensor="probabilities", width=2, index=1, minimum=0, maximum=1),),
        "ladder": NO_LADDER,
    }
    return ModelSpec(**settings | changes)


LABEL = Label(view=AIRCRAFT, entity="flight_id", value="arrival_delay", above=15)


def make_flights(n_flights: int, *, seed: int = 0) -> dict[str, pa.Table]:
    """Offline rows of all views for flights that leave one a minute and land within two hours.

    Half of them are late, those that go far and whose carrier's last flight was late more often than others.
    """
    random = np.random.default_rng(seed)
    departed_us = T0_US + np.arange(n_flights) * MINUTE_US
    landed_us = departed_us + random.integers(40, 120, n_flights) * MINUTE_US
    distance = random.integers(100, 2_000, n_flights).astype(float)
    last_delay = random.normal(0, 20, n_flights)
    arrival_delay = np.round((distance - 1_000) / 25 + last_delay + random.normal(0, 20, n_flights) + 15, 1)
    carrier, tail = (random.integers(0, n, n_flights) for n in (5, 60))
    triggers, carriers, landings = [], [], []
    for i in range(n_flights):
        names = {"flight_id": f"f{i}", "carrier": f"C{carrier[i]}", "tail_number": f"N{tail[i]}"}
        triggers.append(names | {"event_time": int(departed_us[i]), "distance": distance[i], "trips_1h": i % 9})
        carriers.append(
            {
                "carrier": names["carrier"],
                "event_time": int(departed_us[i]),
                "window_end": int(departed_us[i]),
                "watermark": int(departed_us[i]) - 2 * MINUTE_US,
                "source_offset": i,
                "last_delay": last_delay[i],
                "trips_1h": i % 7,
            }
        )
        landings.append(
            {
                "tail_number": names["tail_number"],
                "event_time": int(landed_us[i]),
                "window_end": int(landed_us[i]),
                "watermark": int(landed_us[i]) - 2 * MINUTE_US,
                "source_offset": i,
                "flight_id": names["flight_id"],
                "last_delay": arrival_delay[i],
                "arrival_delay": arrival_delay[i],
            }
        )
    return {
        "trips": make_triggers(*triggers),
        "carrier_trips": make_rows(CARRIERS, carriers),
        "aircraft_trips": make_rows(AIRCRAFT, landings),
    }


def make_triggers(*rows: Mapping[str, Any], view: FeatureView = TRIPS) -> pa.Table:
    """Rows of the trigger view, one minute apart; what a row leaves out takes a plain default."""
    complete = [
        {
            "origin": "JFK",
            "trips_1h": 4,
            "worst_1h": 30.0,
            "flight_id": f"f{number}",
            "carrier": "AA",
            "tail_number": "N1",
            "distance": 100.0,
            "event_time": T0_US + number * MINUTE_US,
            "source_offset": number,
            "request_id": f"flights.departed-0-{number}",
            **row,
        }
        for number, row in enumerate(rows)
    ]
    return make_rows(view, complete)


@dataclass(frozen=True, kw_only=True)
class FakeFeatures:
    """One answer of :class:`FakeReader`."""

    features: Mapping[str, Any] = field(default_factory=dict)
    event_time_us: int = T0_US
    is_empty: bool = False


class FakeReader:
    """An online store in a dictionary by (view name, key); fails as often as it is told."""

    def __init__(
        self, stored: Mapping[tuple[str, str | int], FakeFeatures] | None = None, *, failures: Sequence[Exception] = ()
    ) -> None:
        self.stored = dict(stored or {})
        self.failures = list(failures)
        self.calls: list[list[tuple[str, list[str | int]]]] = []

    async def read_columns(self, requests: Sequence[tuple[FeatureView, Sequence[str | int]]]) -> list[OnlineColumns]:
        self.calls.append([(view.name, list(keys)) for view, keys in requests])
        if self.failures:
            raise self.failures.pop(0)
        return [_columns(view, [self.stored.get((view.name, key)) for key in keys]) for view, keys in requests]


def _columns(view: FeatureView, stored: Sequence[FakeFeatures | None]) -> OnlineColumns:
    rows = [row for row in stored if row is not None]
    number = iter(range(len(rows)))
    return OnlineColumns(
        row_of=pa.array([None if row is None else next(number) for row in stored], pa.int32()),
        event_time_us=[row.event_time_us for row in rows],
        is_empty=[row.is_empty for row in rows],
        features={name: [row.features.get(name) for row in rows] for name in view.definitions},
    )


def by_distance(features: NDArray[np.float32]) -> Inference:
    """Answer 1/(1+distance/100), so that a row's answer tells which row it is."""
    positive = 1 / (1 + np.nan_to_num(features[:, 0]) / 100)
    return Inference(outputs={"probabilities": np.stack([1 - positive, positive], axis=1).astype(np.float32)})


class FakeModel:
    """A model server that computes in place; fails as often as it is told."""

    def __init__(
        self,
        answer: Callable[[NDArray[np.float32]], Inference] = by_distance,
        *,
        failures: Sequence[Exception] = (),
    ) -> None:
        self.answer = answer
        self.failures = list(failures)
        self.batches: list[NDArray[np.float32]] = []
        self.recovery = Recovery.LOADED
        self.recoveries = 0

    async def infer(self, features: NDArray[np.float32], *, timeout_s: float) -> Inference:
        self.batches.append(features)
        if self.failures:
            raise self.failures.pop(0)
        return self.answer(features)

    async def recover(self) -> Recovery:
        self.recoveries += 1
        return self.recovery


def make_scorer(
    spec: ModelSpec, model: ModelServer, *, served: ServedVersion = SERVED, reader: FakeReader | None = None
) -> Scorer:
    """Score by a model server that may be a fake; nothing is waited for between two attempts."""

    async def sleep(_: float) -> None:
        await asyncio.sleep(0)

    probe = np.zeros((1, len(spec.inputs)), dtype=np.float32)
    guard = GuardedModel(spec.name, model, probe=probe, timeout_s=5.0, pause_s=0.01, sleep=sleep)
    vectors = VectorReader(spec, views=VIEWS, reader=reader or FakeReader(), sleep=sleep)
    return Scorer(Arms.of(ServedModel(spec, served, model=guard)), vectors=vectors)
