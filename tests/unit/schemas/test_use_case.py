from typing import Any

import pytest

from jobs.flights.model import LATE_ARRIVAL
from schemas.aggregation import count
from schemas.errors import ConfigError
from schemas.use_case import Lookup, UseCase
from tests.support.feature_rows import make_view

VIEW = make_view("counts", features={"n": count().over("5m")})


def test_a_use_case_names_what_answers_it() -> None:
    use_case = UseCase("/v1/flights/{flight_id}/late-arrival", model=LATE_ARRIVAL, score_ttl="2h", keep_score="1d")
    assert use_case.parameters == ["flight_id"]
    assert (use_case.score_ttl_us, use_case.keep_score_us) == (7_200_000_000, 86_400_000_000)
    assert use_case.shape == "/v1/flights/{}/late-arrival"


def test_features_and_a_score_may_answer_together() -> None:
    lookups = (Lookup(VIEW, "user_id", ("n",)), Lookup(VIEW, "flight_id"))
    assert UseCase("/v1/users/{user_id}/flights/{flight_id}", model=LATE_ARRIVAL, lookups=lookups).score_ttl_us is None


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("flights/{flight_id}", {"model": LATE_ARRIVAL}, "`UseCase` path is 'flights"),
        ("/v1/Flights/{flight_id}", {"model": LATE_ARRIVAL}, "`UseCase` path is"),
        ("/flights/{flight_id}", {"model": LATE_ARRIVAL}, "`UseCase` path is"),
        ("/v1/features/{flight_id}", {"model": LATE_ARRIVAL}, "not below /v1/features or /v1/views"),
        ("/v1/x/{y}", {}, "neither `model` nor `lookups`"),
        ("/v1/x/{y}", {"model": LATE_ARRIVAL}, r"parameters are \['y'\], expected \['flight_id'\]"),
        ("/v1/x/{a}/{a}", {"lookups": (Lookup(VIEW, "a"),)}, r"parameters are \['a', 'a'\], expected \['a'\]"),
        ("/v1/x/{a}", {"lookups": (Lookup(VIEW, "a", ("m",)),)}, r"no features \['m'\], expected some of \['n'\]"),
        ("/v1/x/{flight_id}", {"model": LATE_ARRIVAL, "score_ttl": "0s"}, "`score_ttl` is '0s'"),
        ("/v1/x/{flight_id}", {"model": LATE_ARRIVAL, "keep_score": "0s"}, "`keep_score` is '0s'"),
        ("/v1/x/{flight_id}", {"model": LATE_ARRIVAL, "keep_score": "long"}, "`keep_score` is 'long'"),
    ],
)
def test_a_wrong_use_case_says_what_was_expected(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UseCase(path, **options)
