"""Each mistake in a definition is refused when it is made, and the message says which, and what to do."""

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest

from schemas.aggregation import (
    Aggregation,
    Feature,
    approx_distinct,
    count,
    decayed_sum,
    derived,
    distinct,
    from_event,
    last_n,
    mean,
    min_,
    quantile,
    rate,
    sum_,
    top_k,
)
from schemas.contract import Contract, load_contract
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.source import EventSource
from schemas.time import parse_rfc3339_us
from schemas.view import FeatureView
from tests.support.builders import EVENT_FIELDS, make_contract, make_source

THING = Entity("thing", key="key")


def make_view(**settings: Any) -> FeatureView:
    defaults: dict[str, Any] = {
        "name": "view",
        "version": 1,
        "entity": THING,
        "source": make_source(),
        "slide": "1m",
        "features": {"n": count().over("5m")},
    }
    return FeatureView(**defaults | settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "Bad Name"}, "`FeatureView` name is 'Bad Name', expected lower-case letters"),
        ({"name": 3}, "name is 3"),
        ({"version": 0}, "view view: `version` is 0, expected a whole number of 1 or more"),
        ({"version": "1"}, "`version` is '1'"),
        ({"version": True}, "`version` is True, expected a whole number of 1 or more"),
        ({"version": 2**31}, "`version` is 2147483648, expected .* 2147483647 at most"),
        ({"name": "v" * 129}, "expected lower-case letters"),
        ({"entity": "thing"}, "view view: `entity` is 'thing', expected an entity such as Entity"),
        ({"entity": None}, "`entity` is None, expected an entity"),
        ({"source": "test.events"}, "`source` is 'test.events', expected an event source such as EventSource"),
        ({"source": None}, "`source` is None, expected an event source"),
        ({"source": ["test.events"]}, r"`source` is \['test.events'\], expected an event source .*, or a list"),
        ({"source": []}, r"`source` has the topics \[\], expected one source or more"),
        ({"features": [count().over("5m")]}, "`features` is .*, expected features by name, such as"),
        ({"features": "n"}, "`features` is 'n', expected features by name"),
        ({"features": None}, "`features` is None, expected features by name"),
        ({"lookups": [1]}, r"`lookups` is \[1\], expected lookups by name"),
        ({"serving": 5}, "`serving` is 5, expected how it is read"),
        ({"owner": None}, "`owner` is None, expected text"),
        ({"align_to": datetime(2020, 1, 1, tzinfo=UTC)}, "`align_to` is datetime.*, expected RFC 3339"),
        ({"align_to": "2020-01-01T00:00:00"}, "`align_to` is '2020-01-01T00:00:00', expected RFC 3339"),
        (
            {"align_to": "0001-01-01T00:00:00Z", "time_zone": "America/New_York", "slide": "1d"},
            "`align_to` is '0001-01-01T00:00:00Z', expected RFC 3339",
        ),
        (
            {"align_to": "2020-01-01T00:00:00Z", "slide": None, "gap": "1h", "features": {"n": count()}},
            "`align_to` is '2020-01-01T00:00:00Z' in a session view, expected none",
        ),
        ({"features": {"n": count(where="kind == '\\ud800'").over("5m")}}, "uses the literal .*, expected .*Unicode"),
        (
            {"source": make_source(plausible_until="9999-12-31T00:00:00Z")},
            "`plausible_until` of its source is 9999-12-31T00:00:00.000000Z: windows .* would end after the year 9999",
        ),
        (
            {
                "source": make_source(plausible_until="9999-12-31T00:00:00Z"),
                "slide": None,
                "gap": "1h",
                "features": {"n": count()},
            },
            "`plausible_until` of its source is 9999",
        ),
        (
            {"source": make_source(plausible_from="0001-01-01T00:00:00Z", max_out_of_orderness="1us")},
            "`plausible_from` of its source is 0001-01-01T00:00:00.000000Z: the watermark .* before the year 1",
        ),
        ({"slide": None}, "expected exactly one of `slide`"),
        ({"gap": "1m"}, "expected exactly one of `slide`"),
        ({"emit": "sometimes"}, r"`emit` is 'sometimes', expected one of \['on_close', 'every_event', 'latest'\]"),
        ({"slide": "0s"}, "`slide` is 0s, expected more than 0"),
        ({"slide": "x"}, "`slide` is 'x', expected a duration"),
        ({"state_ttl": "0s"}, "`state_ttl` is 0s, expected more than 0"),
        ({"ttl": "0s"}, "`ttl` is 0s, expected more than 0"),
        ({"allowed_lateness": "soon"}, "`allowed_lateness` is 'soon'"),
        ({"allowed_lateness": "99999999d"}, "`allowed_lateness` is 99999999d, expected at most 36500d"),
        ({"align_to": "midnight"}, "`align_to` is 'midnight', expected RFC 3339"),
        ({"time_zone": "New York"}, "`time_zone` is 'New York', expected a name of the tz database such as"),
        ({"time_zone": 5}, "`time_zone` is 5, expected a name of the tz database"),
        (
            {"time_zone": "Asia/Kolkata", "slide": None, "gap": "1h", "features": {"n": count()}},
            "`time_zone` is 'Asia/Kolkata' in a session view, expected none: a gap has a fixed length",
        ),
        (
            {"time_zone": "Asia/Kolkata", "slide": "90m"},
            "`slide` is 90m, expected whole days, or whole hours that divide a day .*leave the time zone out",
        ),
        ({"time_zone": "Asia/Kolkata", "slide": "5h"}, "`slide` is 5h, expected whole days, or whole hours"),
        (
            {"time_zone": "Asia/Kolkata", "slide": "1d", "features": {"n": count().over("36h")}},
            "has the size 1d12h, expected a multiple of the slide 1d: with a `time_zone` slides differ in length",
        ),
        ({"entity": Entity("thing", key="nobody")}, "entity key 'nobody' is no field of"),
        ({"entity": Entity("thing", key="x")}, "entity key 'x' is double, expected text or an integer"),
        ({"features": {}}, "`features` is empty"),
        ({"features": {"N": count().over("5m")}}, "feature 'N': expected a lower-case name"),
        ({"features": {3: count().over("5m")}}, "feature 3: expected a lower-case name"),
        ({"features": {"watermark": count().over("5m")}}, "feature 'watermark': expected a lower-case name"),
        ({"features": {"key": count().over("5m")}}, "feature 'key': expected a lower-case name"),
        ({"features": {"n": count()}}, "count has no window, expected"),
        ({"features": {"n": "count"}}, "is a str, expected a feature such as"),
        ({"features": {"n": Feature(function="count")}}, "count has no window size"),
        (
            {"features": {"n": Feature(function="median", column="x", size_us=60_000_000)}},
            "aggregation 'median' is unknown",
        ),
        ({"features": {"n": Feature(function="sum", size_us=60_000_000)}}, "sum reads no column"),
        (
            {"features": {"n": Feature(function="count", column="x", size_us=60_000_000)}},
            "count needs no column, but 'x'",
        ),
        ({"features": {"n": sum_("nothing").over("5m")}}, "column 'nothing' is no field of"),
        ({"features": {"n": sum_("kind").over("5m")}}, "sum needs a number column, but 'kind' is string"),
        ({"features": {"n": mean("flag").over("5m")}}, "mean needs a number column, but 'flag' is bool"),
        ({"features": {"n": min_("flag").over("5m")}}, "min needs a orderable column, but 'flag' is bool"),
        ({"features": {"n": distinct("x").over("5m")}}, "distinct needs a category column, but 'x' is double"),
        ({"features": {"n": last_n("x").over("5m")}}, "last_n does not run over windows, expected `.over.last=N.`"),
        (
            {"features": {"n": last_n("x").over(lifetime=True)}},
            "last_n does not run over all rows, expected `.over.last=N.`",
        ),
        ({"features": {"n": rate().over(last=3)}}, r"rate does not run over the newest rows, expected `.over\('5m'\)`"),
        ({"features": {"n": rate("kind").over("5m")}}, "rate needs a number column, but 'kind' is string"),
        ({"features": {"n": rate().over(lifetime=True)}}, "rate does not run over all rows, expected"),
        (
            {"features": {"n": approx_distinct("kind").over(last=3)}},
            r"newest rows, expected `.over\('5m'\)` or `.over\(lifetime=True\)`; `distinct` counts the newest rows",
        ),
        (
            {"features": {"n": count().over("5m"), "r": derived("n / m")}},
            r"feature 'r': `derived` 'n / m' reads 'm', expected one of the columns \['n'\]",
        ),
        ({"features": {"r": derived("r + 1")}}, r"the derived features \['r'\] read each other or themselves"),
        (
            {"features": {"a": derived("b"), "b": derived("c"), "c": derived("a"), "n": count().over("5m")}},
            r"the derived features \['a', 'b', 'c'\] read each other",
        ),
        ({"features": {"r": derived("")}}, "`derived` '' is empty, expected an expression over features"),
        ({"features": {"r": derived("1 +")}}, "can't be parsed"),
        ({"features": {"r": derived("null")}}, "is a null, expected a number, a condition or a text"),
        ({"features": {"n": last_n("x").over(last=3), "r": derived("n")}}, "`derived` 'n' is a other, expected"),
        ({"features": {"n": count().over("5m"), "r": derived("bucketize(n, 3, 2)")}}, "expected edges that rise"),
        ({"features": {"n": count().over("5m"), "r": derived("bucketize(n, n)")}}, "bucketize.number, number literal"),
        ({"features": {"n": top_k("x").over("5m")}}, "top_k needs a category column, but 'x' is double"),
        (
            {"features": {"n": Feature(function="decayed_sum", column="x", size_us=60_000_000)}},
            r"decayed_sum has the parameters \[\], expected \['half_life_us'\]",
        ),
        ({"features": {"n": count().over("30s")}}, "has the size 30s, expected the slide 1m or more"),
        ({"slide": "1us", "features": {"n": count().over("1m")}}, "expected at most 100000 slides of 1us"),
        ({"features": {"n": count(where="y > 1").over("5m")}}, "feature 'n': `where` 'y > 1' reads 'y'"),
        ({"slide": None, "gap": "1m"}, "has a window size in a session view"),
        ({"emit": "on_close", "features": {"n": count().over(last=3)}}, "no feature has a window"),
    ],
)
def test_a_wrong_view_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_view(**settings)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "`over` takes exactly one of"),
        (("5m", {"last": 3}), "`over` takes exactly one of"),
        (({"last": 0},), "`last` is 0, expected a whole number of rows of 1 or more"),
        (({"last": 1.5},), "`last` is 1.5"),
        (({"last": True},), "`last` is True"),
        (({"last": 10_001},), "`last` is 10001, expected at most 10000 rows; take a window"),
        (({"lifetime": 1},), "`lifetime` is 1, expected True or False"),
        (({"lifetime": "yes"},), "`lifetime` is 'yes', expected True or False"),
        (({"lifetime": False},), "`over` takes exactly one of"),
        (("36501d",), "`over` is 36501d, expected at most 36500d"),
        ((5,), "`over` is 5, expected a duration"),
        (("0s",), "`over` is '0s', expected a window size of more than 0"),
        (("5",), "`over` is '5', expected a duration"),
    ],
)
def test_a_wrong_over_is_refused(arguments: tuple[Any, ...], says: str) -> None:
    size = [a for a in arguments if not isinstance(a, dict)]
    named = next((a for a in arguments if isinstance(a, dict)), {})
    with pytest.raises(ConfigError, match=says):
        count().over(*size, **named)


@pytest.mark.parametrize("k", [0, 1_001, 2.0, True])
def test_a_wrong_k_is_refused(k: Any) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of 1 to 1000"):
        top_k("kind", k=k)


@pytest.mark.parametrize("q", [-0.1, 1.5, 0.1234567, "0.5", True, float("nan")])
def test_a_wrong_q_is_refused(q: Any) -> None:
    with pytest.raises(ConfigError, match="expected a number from 0 to 1 with at most 6 decimals"):
        quantile("x", q=q)


@pytest.mark.parametrize("lg_k", [6, 22, 12.0, True])
def test_a_wrong_size_of_a_sketch_is_refused(lg_k: Any) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of 7 to 21"):
        approx_distinct("kind", lg_k=lg_k)


@pytest.mark.parametrize(
    ("half_life", "says"),
    [("0s", "`half_life` is '0s', expected more"), ("x", "expected a dur"), ("36501d", "at most")],
)
def test_a_wrong_half_life_is_refused(half_life: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decayed_sum("x", half_life=half_life)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"event_time": "when"}, "`event_time` is 'when', expected a field of"),
        ({"event_time": "n"}, "integer event time `n` of .* has unit None"),
        ({"event_time": "x"}, "event time `x` of .* is double, expected integer or RFC 3339 text"),
        ({"max_out_of_orderness": "5"}, "`max_out_of_orderness` is '5'"),
        ({"idle_timeout": "0s"}, "`idle_timeout` is 0s, expected more than 0; leave it out to switch idleness off"),
        ({"idle_advance": True}, "`idle_advance` is True without `idle_timeout`"),
        ({"event_id": "id"}, "`event_id` and `dedup_window` go together"),
        ({"dedup_window": "5m"}, "`event_id` and `dedup_window` go together"),
        ({"event_id": "id", "dedup_window": "0s"}, "`dedup_window` is 0s, expected more than 0"),
        ({"event_id": "uid", "dedup_window": "5m"}, "`event_id` is 'uid', expected a field of"),
        ({"topic": ""}, "`topic` is '', expected a name of 1 to 249 letters"),
        ({"topic": None}, "`topic` is None, expected a name"),
        ({"topic": "a b"}, "`topic` is 'a b', expected a name"),
        ({"topic": ".."}, "`topic` is '..', expected a name"),
        ({"topic": "t" * 250}, "expected a name of 1 to 249 letters"),
        ({"contract": None}, "`contract` is None, expected name@version"),
        ({"event_time": None}, "`event_time` is None, expected a field of"),
        ({"event_time": ["at"]}, r"`event_time` is \['at'\], expected a field of"),
        ({"key": ["key"]}, r"`key` is \['key'\], expected a field of"),
        ({"event_id": ["id"], "dedup_window": "5m"}, r"`event_id` is \['id'\], expected a field of"),
        ({"max_out_of_orderness": None}, "`max_out_of_orderness` is None, expected a duration"),
        ({"max_out_of_orderness": "36501d"}, "`max_out_of_orderness` is 36501d, expected at most 36500d"),
        ({"max_future_skew": "36501d"}, "`max_future_skew` is 36501d, expected at most 36500d"),
        ({"idle_timeout": "99999999999d"}, "`idle_timeout` is 99999999999d, expected at most 36500d"),
        ({"idle_timeout": "1s", "idle_advance": "no"}, "`idle_advance` is 'no', expected True or False"),
        ({"event_id": "id", "dedup_window": "36501d"}, "`dedup_window` is 36501d, expected at most 36500d"),
        ({"event_id": "x", "dedup_window": "5m"}, "event id `x` of .* is double, expected text or an integer"),
        ({"event_id": "tags", "dedup_window": "5m"}, "event id `tags` of .* is list.*, expected text or an integer"),
        ({"plausible_from": None}, "`plausible_from` is None, expected RFC 3339"),
        ({"plausible_from": 0}, "`plausible_from` is 0, expected RFC 3339"),
        ({"plausible_until": datetime(2020, 1, 1, tzinfo=UTC)}, "`plausible_until` is datetime.*, expected RFC 3339"),
        ({"plausible_from": "never"}, "`plausible_from` is 'never', expected RFC 3339"),
        ({"plausible_from": "2100-01-01T00:00:00Z"}, "is not before `plausible_until`"),
    ],
)
def test_a_wrong_source_is_refused(settings: dict[str, Any], says: str) -> None:
    right = {"contract": make_contract(), "event_time": "at"}
    with pytest.raises(ConfigError, match=says):
        EventSource(**{"topic": "test.events"} | right | settings)


@pytest.mark.parametrize("field", ["name", "key"])
@pytest.mark.parametrize("value", ["", "user id", "1st", None])
def test_a_wrong_entity_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`Entity.{field}` is"):
        Entity(**{"name": "user", "key": "user_id"} | {field: value})


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"type": 3}, "is no valid JSON Schema"),
        ({"type": "array"}, "has type 'array', expected 'object'"),
        ({"type": "object"}, "expected 'object' with `properties`"),
        ({"type": "object", "properties": {"a": {"type": "string", "oneOf": []}}}, "is no valid JSON Schema"),
        ({"type": "object", "properties": {"a": {"type": "string", "not": {}}}}, r"field `a` uses \['not'\]"),
        ({"type": "object", "properties": {"a": {"type": "object"}}}, "field `a` has `type` 'object'"),
        ({"type": "object", "properties": {"a": {}}}, "field `a` has `type` None"),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}, r"requires \['b'\]"),
    ],
)
def test_a_wrong_contract_is_refused(document: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Contract("thing@1", document)


@pytest.mark.parametrize("reference", ["thing", "@1", "thing@x"])
def test_a_wrong_reference_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match="expected name@version"):
        load_contract(reference)


def test_a_missing_contract_says_where_it_was_looked_for() -> None:
    with pytest.raises(ConfigError, match=r"contract 'nobody@1' not found, expected a file .*nobody@1\.json"):
        load_contract("nobody@1")


def test_a_contract_file_that_is_no_json_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schemas" / "events" / "broken@1.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no JSON"):
        load_contract("broken@1")


def test_a_sliding_view_takes_sizes_that_are_no_multiple_of_the_slide() -> None:
    assert make_view(features={"n": count().over("90s")}).describe_windows() == "sliding 1m30s every 1m"
    alone = make_view(features={"n": count().over(last=3)})
    assert alone.describe_windows() == "no windows (last-N and lifetime features), slide 1m"


def test_times_of_the_first_and_the_last_year_are_plausible_where_windows_stay_inside() -> None:
    source = make_source(plausible_from="0001-01-02T00:00:00Z", plausible_until="9999-12-30T00:00:00Z")

    assert make_view(source=source).input.plausible_us[0] == parse_rfc3339_us("0001-01-02T00:00:00Z")


def test_a_view_in_a_time_zone_says_which() -> None:
    view = make_view(slide="1d", time_zone="America/New_York", features={"n": count().over("7d")})

    assert view.describe_windows() == "sliding 7d every 1d in America/New_York"


def test_a_derived_feature_has_the_type_of_its_expression_and_is_in_no_order() -> None:
    features = {
        "twice": derived("ratio * 2"),
        "ratio": derived("n / m"),
        "is_many": derived("n > 3"),
        "kind_of": derived("lower(kind)"),
        "n": count().over("5m"),
        "m": sum_("n").over("5m"),
        "kind": from_event("kind"),
    }
    view = make_view(features=features)

    assert list(view.derived) == ["ratio", "is_many", "kind_of", "twice"]
    assert [str(view.feature_schema.field(name).type) for name in features][:4] == [
        "double",
        "double",
        "bool",
        "string",
    ]
    assert view.definition_hash != make_view(features=features | {"ratio": derived("m / n")}).definition_hash


def test_a_session_view_takes_features_without_over() -> None:
    view = make_view(slide=None, gap="5m", features={"n": count(), "newest": count().over(last=3)})
    assert view.describe_windows() == "session, gap 5m"
    assert "window_start" in view.engine_schema.names


def test_the_hash_is_of_what_is_computed_alone() -> None:
    view = make_view()
    same = dataclasses.replace(view, version=2, owner="somebody", ttl="5m")
    other = dataclasses.replace(view, allowed_lateness="1s")
    assert same.definition_hash == view.definition_hash != other.definition_hash
    assert len(view.definition_hash) == 16


def test_definitions_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_view().version = 2  # type: ignore[misc]  # that is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_event("x").column = "n"  # type: ignore[misc]  # that is the point


def test_the_example_of_the_readme_is_a_definition() -> None:
    shop = EventSource("shop.events", contract="shop_event@1", max_out_of_orderness="5s", idle_timeout="30s")
    view = FeatureView(
        "user_activity",
        version=1,
        entity=Entity("user", key="user_id"),
        source=shop,
        slide="1m",
        allowed_lateness="30s",
        owner="growth",
        features={
            "clicks_5m": count(where="event_type == 'click'").over("5m"),
            "spend_1h": sum_("amount", where="event_type == 'order'").over("1h"),
            "amounts": last_n("amount").over(last=3),
        },
    )
    assert [str(field.type) for field in view.feature_schema] == ["string", "int64", "double", "list<item: double>"]


def test_an_aggregation_without_over_is_not_yet_a_feature() -> None:
    assert isinstance(count(), Aggregation)
    assert isinstance(count().over("5m"), Feature)


def test_equal_fields_have_equal_contracts() -> None:
    assert make_contract(EVENT_FIELDS) == make_contract(dict(EVENT_FIELDS))
