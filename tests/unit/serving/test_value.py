from typing import Any

import pytest

from schemas.aggregation import count, mean
from schemas.errors import ConfigError
from schemas.row import Pane
from schemas.serving import Serving
from streams.serving.value import FeatureValue, ValueSource, asked_features, resolve_value
from streams.sinks.online import Status
from streams.sinks.packing import UnpackedValue
from tests.support.feature_rows import T0_US, make_view

VIEW = make_view(
    ttl="1s",
    serving=Serving(defaults={"n": 0}),
    features={"n": count().over("5m"), "average": mean("amount").over("5m")},
)
SECOND_US = 1_000_000


def stored(**changed: Any) -> UnpackedValue:
    fields: dict[str, Any] = {
        "window_end_us": T0_US + 60 * SECOND_US,
        "pane_index": 0,
        "source_offset": 4,
        "event_time_us": T0_US,
        "pane": Pane.EARLY,
        "watermark_us": T0_US - 5 * SECOND_US,
        "broker_time_us": T0_US + 1,
        "features": {"n": 7, "average": None},
    }
    return UnpackedValue(**{**fields, **changed})


def resolve(found: UnpackedValue | None, *, now_us: int = T0_US, is_stale_wanted: bool = False) -> FeatureValue:
    return resolve_value(
        found,
        view=VIEW,
        entity="u1",
        names=asked_features(VIEW, None),
        ttl_us=VIEW.ttl_us,
        source=ValueSource.ONLINE,
        now_us=now_us,
        is_stale_wanted=is_stale_wanted,
    )


def test_a_young_value_is_present_and_its_nulls_make_it_less_complete() -> None:
    value = resolve(stored(), now_us=T0_US + SECOND_US)
    assert (value.status, value.source, value.age_ms) == (Status.PRESENT, ValueSource.ONLINE, 1_000)
    assert (value.features, value.defaulted, value.completeness) == ({"n": 7, "average": None}, (), 0.5)


def test_a_value_of_17_minutes_under_a_ttl_of_a_second_is_never_present() -> None:
    for is_stale_wanted in (False, True):
        value = resolve(stored(), now_us=T0_US + 17 * 60 * SECOND_US, is_stale_wanted=is_stale_wanted)
        assert (value.status, value.age_ms) == (Status.STALE, 17 * 60 * 1_000)


def test_a_stale_value_gives_defaults_unless_it_is_wanted_as_it_is() -> None:
    withheld = resolve(stored(), now_us=T0_US + 2 * SECOND_US)
    assert (withheld.features, withheld.defaulted, withheld.completeness) == ({"n": 0, "average": None}, ("n",), 0.0)
    shown = resolve(stored(), now_us=T0_US + 2 * SECOND_US, is_stale_wanted=True)
    assert (shown.features, shown.defaulted) == ({"n": 7, "average": None}, ())


def test_a_missing_value_is_defaults_from_nowhere() -> None:
    value = resolve(None)
    assert (value.status, value.source) == (Status.MISSING, ValueSource.NONE)
    assert (value.features, value.defaulted, value.completeness) == ({"n": 0, "average": None}, ("n",), 0.0)
    assert (value.age_ms, value.is_closed, value.pane) == (None, None, None)


def test_an_empty_value_is_empty_however_old() -> None:
    value = resolve(stored(pane=Pane.EMPTY, features={"n": 0, "average": None}), now_us=T0_US + 3_600 * SECOND_US)
    assert (value.status, value.features["n"], value.defaulted) == (Status.EMPTY, 0, ())


@pytest.mark.parametrize(("watermark_us", "is_closed"), [(None, False), (T0_US, False), (T0_US + 60 * SECOND_US, True)])
def test_a_window_is_closed_once_the_watermark_has_reached_its_end(watermark_us: int | None, is_closed: bool) -> None:
    assert resolve(stored(watermark_us=watermark_us)).is_closed is is_closed


def test_features_are_given_as_asked_for_each_once() -> None:
    assert asked_features(VIEW, None) == ["n", "average"]
    assert asked_features(VIEW, ["average", "n", "average"]) == ["average", "n"]
    with pytest.raises(ConfigError, match=r"has no features \['m'\], expected some of \['average', 'n'\]"):
        asked_features(VIEW, ["m", "n"])
