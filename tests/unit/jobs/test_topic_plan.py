from dataclasses import replace

import pytest

from jobs.application import Application
from jobs.flights import MODELS, VIEWS
from jobs.topics import Topic, application_topics, plan_topics
from schemas.errors import ConfigError
from schemas.topic import TopicSettings
from tests.support.feature_rows import make_view


def by_name(topics: list[Topic]) -> dict[str, Topic]:
    return {topic.name: topic for topic in topics}


def test_a_view_has_its_source_and_dead_letters_rows_and_state_with_as_many_partitions() -> None:
    topics = by_name(plan_topics([make_view()], []))
    assert list(topics) == [
        "store.events",
        "dlq.store.events",
        "redriven.store.events",
        "features.user_activity",
        "state.user_activity",
    ]
    assert topics["store.events"].like == ()
    assert {topic.like for name, topic in topics.items() if name != "store.events"} == {("store.events",)}


def test_state_is_compacted_and_dead_letters_may_be_larger_than_records() -> None:
    topics = by_name(plan_topics([make_view()], []))
    assert topics["state.user_activity"].config["cleanup.policy"] == "compact"
    assert int(topics["dlq.store.events"].config["max.message.bytes"]) > 1_048_588
    assert "cleanup.policy" not in topics["features.user_activity"].config


def test_views_over_one_topic_share_it() -> None:
    names = [topic.name for topic in plan_topics([make_view("a"), make_view("b")], [])]
    assert names.count("store.events") == names.count("dlq.store.events") == 1
    assert {"features.a", "features.b", "state.a", "state.b"} <= set(names)


def test_a_model_has_topics_for_scores_and_dead_letters_as_its_trigger_has() -> None:
    topics = by_name(plan_topics(VIEWS, MODELS))
    assert topics["scores.late_arrival"].like == ("features.airport_departures",)
    assert topics["dlq.scores.late_arrival"].like == ("features.airport_departures",)


def test_each_topic_comes_after_the_one_it_takes_its_partitions_from() -> None:
    planned = plan_topics(VIEWS, MODELS)
    for number, topic in enumerate(planned):
        assert set(topic.like) <= {earlier.name for earlier in planned[:number]}


def test_raw_events_are_kept_for_good_since_a_broker_would_delete_those_of_years_ago() -> None:
    topics = by_name(plan_topics(VIEWS, MODELS))
    kept = {name for name, topic in topics.items() if topic.config.get("retention.ms") == "-1"}
    assert kept == {source.topic for view in VIEWS for source in view.sources} | {
        view.input.topic for view in VIEWS if view.input.is_repartitioned
    }


def test_a_repartition_topic_has_as_many_partitions_as_the_largest_of_its_sources_unless_it_is_there() -> None:
    view = make_view("a")
    (source,) = view.sources
    both = replace(view, source=[source, replace(source, topic="more.events")])
    topics = by_name(plan_topics([both], []))
    name = "repartition.more.events--store.events.user_id"

    assert topics[name].like == topics[f"state.{name}"].like == ("more.events", "store.events")
    assert not topics[name].is_exact
    assert topics["features.a"].like == topics["state.a"].like == (name,)
    assert topics["dlq.more.events"].like == ("more.events",)
    assert topics[f"state.{name}"].config["cleanup.policy"] == "compact"


def make_application(**topics: TopicSettings) -> Application:
    names = {name.replace("__", "."): settings for name, settings in topics.items()}
    return Application(name="a", module="a", views={"user_activity": make_view()}, models={}, topics=names)


def test_an_application_says_how_its_topics_are_kept() -> None:
    settings = TopicSettings(partitions=12, retention="30d", min_insync_replicas=2)
    topics = by_name(application_topics(make_application(store__events=settings)))
    assert topics["store.events"].partitions == 12
    assert topics["store.events"].config == {"retention.ms": "2592000000", "min.insync.replicas": "2"}
    assert "min.insync.replicas" not in topics["dlq.store.events"].config


def test_a_pattern_is_for_all_that_match_it_and_a_later_one_goes_first() -> None:
    application = make_application(**{"*": TopicSettings(min_insync_replicas=2)})
    later = replace(application, topics={**application.topics, "dlq.*": TopicSettings(min_insync_replicas=1)})
    found = {name: topic.config["min.insync.replicas"] for name, topic in by_name(application_topics(later)).items()}
    assert found.pop("dlq.store.events") == "1"
    assert set(found.values()) == {"2"}


def test_what_stands_on_a_topic_is_kept_as_its_role_needs_it_whatever_else_is_said() -> None:
    application = make_application(**{"state.*": TopicSettings(min_insync_replicas=2)})
    assert by_name(application_topics(application))["state.user_activity"].config["cleanup.policy"] == "compact"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("store__event", TopicSettings(retention="1d"), r"'store.event' in TOPICS is no topic, expected one of \["),
        (
            "features__user_activity",
            TopicSettings(partitions=3),
            r"topics whose number of partitions is given, expected one of \['store.events'\]",
        ),
    ],
)
def test_a_name_that_there_is_not_is_refused(name: str, settings: TopicSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        application_topics(make_application(**{name: settings}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partitions": 0}, "`partitions` of a topic is 0, expected a whole number of 1 or more"),
        ({"min_insync_replicas": True}, "`min_insync_replicas` of a topic is True"),
        ({"retention": "500us"}, "`retention` of a topic is '500us', expected 1ms or more, or 'forever'"),
        ({"retention": "a month"}, "`retention` is 'a month', expected a duration"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TopicSettings(**settings)  # type: ignore[arg-type]
