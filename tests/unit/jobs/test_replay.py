"""What a replay takes on, before it touches a service."""

from dataclasses import replace

import pytest

from jobs.application import Application
from jobs.replay import _choose, _count
from jobs.replay_feed import Section
from schemas.errors import ConfigError
from tests.support.feature_rows import make_view

PLAIN = make_view("plain")
CLOCKED = replace(make_view("clocked"), source=replace(PLAIN.sources[0], idle_timeout="5s", idle_advance=True))
BY_WAY = replace(make_view("by_way"), source=replace(PLAIN.sources[0], key=""))
VIEWS = {view.name: view for view in (PLAIN, CLOCKED, BY_WAY)}
APPLICATION = Application(name="m", module="m", views=VIEWS, models={})


def test_where_no_view_is_named_those_that_records_do_not_decide_are_left_out_and_it_is_said_why() -> None:
    views, left_out = _choose(APPLICATION, None)
    assert views == [PLAIN]
    clocked, by_way = map(str, left_out)
    assert clocked.startswith("rows of view clocked cannot be made anew: `idle_advance` of store.events")
    assert by_way.startswith("view by_way reads ")


@pytest.mark.parametrize("name", ["clocked", "by_way"])
def test_one_that_is_named_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"view {name} "):
        _choose(APPLICATION, ["plain", name])


def test_an_application_of_nothing_else_is_refused() -> None:
    views = {view.name: view for view in (CLOCKED, BY_WAY)}
    with pytest.raises(ConfigError, match="view clocked "):
        _choose(replace(APPLICATION, views=views), None)


def test_a_topic_has_the_partitions_that_are_live_or_archived_and_one_where_nothing_is_left() -> None:
    archived = [Section(topic="a", partition=n, read=range(3), wanted=range(3)) for n in (0, 4)]
    counts = [_count(topic, {"a": 2, "b": 3}, archived) for topic in ("a", "b", "c")]
    assert counts == [5, 3, 1]
