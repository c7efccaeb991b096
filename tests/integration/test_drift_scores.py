"""Scores on a real Kafka topic, window by window, next to the answers in training."""

import json
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from jobs.drift_scores import ScoreWindow, read_score_windows
from offline.card import ModelCard, described_inputs, described_outputs
from offline.drift import Verdict
from offline.profile import profile_inputs
from schemas.errors import DecodeError
from schemas.time import format_rfc3339
from tests.support.kafka import TIMEOUT_S, produce
from tests.support.scoring import make_spec

DAY_US = 86_400_000_000
FIRST_US = 15_706 * DAY_US
SPEC = make_spec(name=f"m{uuid4().hex[:8]}")
COLUMN = SPEC.outputs[0].column
CARD = ModelCard(
    name=SPEC.name,
    version=2,
    semver="1.0.0",
    contract=SPEC.reference,
    sha256="0" * 64,
    license="Apache-2.0",
    description="",
    created="2013-01-01T00:00:00.000000Z",
    inputs=described_inputs(SPEC),
    outputs=described_outputs(SPEC),
    training={},
    training_set={},
    evaluation={},
    golden=[],
)
PROFILES = profile_inputs([COLUMN], np.random.default_rng(0).beta(2, 5, 5_000)[:, np.newaxis])


def score(day: int, answer: float, **values: Any) -> bytes:
    document = {
        "request_id": "r",
        "entity": "f1",
        "model_version": "2",
        "arm": "champion",
        "served_by": "model",
        "complete": True,
        "event_time": format_rfc3339(FIRST_US + day * DAY_US),
        COLUMN: answer,
    }
    return json.dumps(document | values).encode()


def read(brokers: str, *, until_us: int | None = None) -> list[ScoreWindow]:
    return read_score_windows(
        brokers, SPEC, CARD, PROFILES, since_us=FIRST_US, until_us=until_us, width_us=DAY_US, confidence=0.6
    )


def test_scores_are_judged_by_window_and_those_that_others_made_are_counted(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(SPEC.topic, 1, 1)])[SPEC.topic].result(TIMEOUT_S)
    random = np.random.default_rng(1)
    alike, sure, unsure = random.beta(2, 5, 400), np.full(100, 0.99), random.uniform(0.42, 0.58, 300)
    produce(
        kafka,
        SPEC.topic,
        [
            score(-1, 0.99),
            *(score(0, answer, complete=number >= 100) for number, answer in enumerate(alike)),
            *(score(0, answer, served_by="rules") for answer in sure),
            *(score(0, answer, arm="shadow") for answer in sure),
            *(score(0, answer, model_version="1") for answer in sure),
            *(score(1, answer, served_by="cache") for answer in unsure),
            score(2, 0.5),
        ],
    )
    steady, drifted, few = read(kafka)
    assert (steady.start_us, steady.end_us) == (FIRST_US, FIRST_US + DAY_US)
    assert (steady.rows, steady.judged_rows) == (600, 400)
    assert steady.fallback_share == pytest.approx(1 / 6)
    assert steady.incomplete_share == pytest.approx(1 / 6)
    assert steady.outputs[COLUMN].verdict is Verdict.STEADY
    assert steady.low_confidence_shares[COLUMN] == pytest.approx(((alike > 0.4) & (alike < 0.6)).mean())
    assert drifted.outputs[COLUMN].verdict is Verdict.DRIFT
    assert drifted.low_confidence_shares == {COLUMN: 1.0}
    assert (few.rows, few.outputs[COLUMN].verdict) == (1, Verdict.TOO_FEW_ROWS)
    assert len(read(kafka, until_us=FIRST_US + DAY_US)) == 1

    produce(kafka, SPEC.topic, [b"no score"])
    with pytest.raises(DecodeError):
        read(kafka)
