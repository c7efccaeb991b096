from dataclasses import replace

from jobs.flights import MODELS, VIEWS
from jobs.topics import Topic, plan_topics
from tests.support.feature_rows import make_view


def by_name(topics: list[Topic]) -> dict[str, Topic]:
    return {topic.name: topic for topic in topics}


def test_a_view_has_its_source_and_dead_letters_rows_and_state_with_as_many_partitions() -> None:
    topics = by_name(plan_topics([make_view()], []))
    assert list(topics) == ["store.events", "dlq.store.events", "features.user_activity", "state.user_activity"]
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
