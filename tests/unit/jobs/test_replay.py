"""What a replay takes on, before it touches a service."""

from jobs.replay import _count
from jobs.replay_feed import Section


def test_a_topic_has_the_partitions_that_are_live_or_archived_and_one_where_nothing_is_left() -> None:
    archived = [Section(topic="a", partition=n, read=range(3), wanted=range(3)) for n in (0, 4)]
    counts = [_count(topic, {"a": 2, "b": 3}, archived) for topic in ("a", "b", "c")]
    assert counts == [5, 3, 1]
