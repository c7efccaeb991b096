import math
from typing import Any

import pytest

from schemas.aggregation import count, last, last_n, mean
from schemas.errors import ConfigError
from schemas.serving import Serving
from tests.support.feature_rows import make_view

FEATURES = {
    "n": count().over("5m"),
    "average": mean("amount").over("5m"),
    "category": last("category").over(last=1),
    "clicked": last("clicked").over(last=1),
    "amounts": last_n("amount").over(last=3),
}


def test_how_values_are_read_is_no_part_of_the_definition() -> None:
    plain = make_view(features=FEATURES)
    other = make_view(
        features=FEATURES,
        ttl="1s",
        serving=Serving(defaults={"n": 0}, cache="1s", fallback="delta", freshness="5s", freshness_share=0.5),
    )
    assert other.definition_hash == plain.definition_hash
    assert other.definition == plain.definition


@pytest.mark.parametrize(
    ("ttl", "serving", "cache_us"),
    [
        (None, Serving(), 10_000_000),
        ("10s", Serving(), 10_000_000),
        ("9s", Serving(), 0),
        (None, Serving(freshness="150ms"), 0),
        ("1h", Serving(freshness="1m"), 10_000_000),
        ("1h", Serving(cache="0s"), 0),
        ("1h", Serving(cache="1h"), 3_600_000_000),
    ],
)
def test_values_are_cached_for_ten_seconds_but_not_those_that_must_be_fresher(
    ttl: str | None, serving: Serving, cache_us: int
) -> None:
    view = make_view(features=FEATURES, ttl=ttl, serving=serving)
    assert view.serving.cache_us(ttl_us=view.ttl_us) == cache_us


@pytest.mark.parametrize(
    ("ttl", "serving"), [("1s", Serving(cache="2s")), (None, Serving(cache="1s", freshness="150ms"))]
)
def test_a_cache_that_outlives_what_must_be_fresh_is_refused(ttl: str | None, serving: Serving) -> None:
    with pytest.raises(ConfigError, match=r"`cache` is \ds and `(ttl|freshness)` .*expected a cache that is no longer"):
        make_view(features=FEATURES, ttl=ttl, serving=serving)


def test_defaults_of_every_type_are_taken() -> None:
    defaults = {"n": 0, "average": 1, "category": "none", "clicked": False, "amounts": [1.5, 2]}
    assert make_view(features=FEATURES, serving=Serving(defaults=defaults)).serving.defaults == defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0.5),
        ("n", True),
        ("n", None),
        ("n", 2**63),
        ("average", math.nan),
        ("average", "1"),
        ("category", 1),
        ("clicked", 0),
        ("amounts", 1.0),
        ("amounts", ["x"]),
    ],
)
def test_a_default_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"default of '{name}' is .*expected a finite"):
        make_view(features=FEATURES, serving=Serving(defaults={name: value}))


def test_a_default_of_no_feature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`defaults` has 'm', expected features of the view"):
        make_view(features=FEATURES, serving=Serving(defaults={"m": 0}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback": "disk"}, r"`fallback` 'disk', expected one of \['delta'\]"),
        ({"freshness": "0s"}, "`freshness` '0s', expected more than 0"),
        ({"freshness": "soon"}, "`freshness` is 'soon'"),
        ({"cache": "10"}, "`cache` is '10'"),
        ({"freshness_share": 0}, "`freshness_share` 0, expected more than 0"),
        ({"freshness_share": 1.1}, "`freshness_share` 1.1"),
        ({"freshness_share": True}, "`freshness_share` True"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Serving(**options)
