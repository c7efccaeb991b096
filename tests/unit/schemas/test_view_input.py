"""What a view reads: which way its rows go, and what is refused."""

import dataclasses
from typing import Any

import pyarrow as pa
import pytest

from schemas.aggregation import count, last
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.source import EventSource
from schemas.topology import connect
from schemas.view import FeatureView
from tests.support.builders import EVENT_FIELDS, make_contract, make_source

THING, KIND = Entity("thing", key="key"), Entity("kind", key="kind")


def make_view(source: Any, *, entity: Entity = THING, name: str = "v", **settings: Any) -> FeatureView:
    given: dict[str, Any] = {"version": 1, "slide": "1m", "features": {"n": count().over("1m")}}
    return FeatureView(name, entity=entity, source=source, **given | settings)


def other_source(fields: Any = EVENT_FIELDS, **settings: Any) -> EventSource:
    return dataclasses.replace(make_source(fields, **settings), topic="other.events")


@pytest.mark.parametrize(
    ("key", "entity", "topic"),
    [
        (None, THING, "test.events"),
        (None, KIND, "test.events"),
        ("key", THING, "test.events"),
        ("key", KIND, "repartition.test.events.kind"),
        ("", THING, "repartition.test.events.key"),
    ],
)
def test_rows_go_through_a_repartition_topic_where_they_are_keyed_by_something_else(
    key: str | None, entity: Entity, topic: str
) -> None:
    view = make_view(make_source(key=key), entity=entity)

    assert view.input.topic == topic
    assert view.input.is_repartitioned == topic.startswith("repartition.")
    assert ("origin_topic" in view.row_schema.names) == view.input.is_repartitioned


def test_several_sources_are_one_input_in_whatever_order_they_are_named() -> None:
    one, two = make_view([make_source(), other_source()]), make_view([other_source(), make_source()])

    assert one.input.topic == "repartition.other.events--test.events.key"
    assert one.definition_hash == two.definition_hash
    assert one.columns.names == [*EVENT_FIELDS, "_source"]


def test_what_a_topic_is_keyed_by_is_no_part_of_a_definition_unless_it_takes_rows_another_way() -> None:
    plain, keyed, routed = (make_view(make_source(key=key)) for key in (None, "key", "kind"))

    assert plain.definition_hash == keyed.definition_hash != routed.definition_hash


def test_a_feature_may_say_which_source_it_reads() -> None:
    view = make_view(
        [make_source(), other_source()],
        features={"n": count(where="_source == 'other.events'").over("1m"), "of": last("_source").over(last=1)},
    )

    assert view.feature_schema.field("of").type == pa.string()
    with pytest.raises(ConfigError, match="_source"):
        make_view(make_source(), features={"n": count(where="_source == 'test.events'").over("1m")})


TEXT_N = {**EVENT_FIELDS, "n": {"type": "string"}}
WITHOUT_KEY = {name: field for name, field in EVENT_FIELDS.items() if name != "key"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_source(key="absent"), r"`key` is 'absent', expected a field of .* or ''"),
        (lambda: make_view([]), "view v: `source` has the topics \\[\\], expected one source or more"),
        (lambda: make_view([make_source(), make_source()]), "expected one source or more, each of another topic"),
        (lambda: make_view([make_source(), other_source(WITHOUT_KEY)]), "entity key 'key' is no field of"),
        (lambda: make_view([make_source(), other_source(TEXT_N)]), "field 'n' is .* and .*, expected one type"),
        (
            lambda: make_view(
                [
                    make_source(event_id="id", dedup_window="1m"),
                    other_source(event_id="id", dedup_window="2m"),
                ]
            ),
            "expected the same `dedup_window` in all",
        ),
        (
            lambda: make_view(make_source(contract=make_contract(**{"x-max-bytes": 2**21}), key="")),
            "`x-max-bytes` 2097152, expected at most 1048576 where rows go through a repartition topic",
        ),
        (
            lambda: make_view(dataclasses.replace(make_source(key=""), topic="t" * 240)),
            "expected at most 249",
        ),
    ],
)
def test_a_mistake_is_refused_with_what_was_expected(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_views_of_one_entity_share_a_repartition_topic_and_others_do_not() -> None:
    source = make_source(key="")
    views = [make_view(source, name="a"), make_view(source, name="b"), make_view(source, name="c", entity=KIND)]
    topology = connect([*views, make_view([source, other_source()], name="d")])

    assert {topic: [view.name for view in read] for topic, read in topology.views.items()} == {
        "repartition.test.events.key": ["a", "b"],
        "repartition.test.events.kind": ["c"],
        "repartition.other.events--test.events.key": ["d"],
    }
    assert topology.routes["other.events"] == ["repartition.other.events--test.events.key"]
    assert len(topology.routes["test.events"]) == 3
    assert topology.topics == sorted(["test.events", "other.events", *topology.views])


def test_two_ways_to_describe_one_topic_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"describes topic test\.events otherwise than another view"):
        connect([make_view(make_source()), make_view(make_source(max_out_of_orderness="5s"), name="w")])


def test_two_sets_of_sources_that_would_share_a_topic_are_refused() -> None:
    def named(topic: str) -> EventSource:
        return dataclasses.replace(make_source(), topic=topic)

    with pytest.raises(ConfigError, match="of different sources; rename"):
        connect(
            [
                make_view([named("a"), named("b--c")]),
                make_view([named("a--b"), named("c")], name="w"),
            ]
        )
