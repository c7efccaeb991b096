import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.application import consumer_groups, load_application, load_recorded_application
from jobs.role import CONSUMERS, Role
from schemas.errors import ConfigError

WriteModule = Callable[[str], str]

DEFINITIONS = """
from streams import Entity, EventSource, FeatureView, count

user = Entity("user", key="user_id")
shop = EventSource("shop.events", contract="shop_event@1")


def view(name, version=1, slide="1m"):
    return FeatureView(
        name, version=version, entity=user, source=shop, slide=slide, features={"n": count().over("5m")}
    )
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """Write a module of its own name to the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    numbers = iter(range(100))

    def write(text: str) -> str:
        name = f"application_{tmp_path.name}_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(DEFINITIONS + text)
        return name

    return write


def test_the_application_that_ships_loads() -> None:
    application = load_application("jobs.flights")
    assert list(application.views) == ["airport_departures", "carrier_departures", "aircraft_landings"]
    assert list(application.models) == ["late_arrival"]
    assert application.view("airport_departures").name == "airport_departures"


def test_views_are_those_listed(write_module: WriteModule) -> None:
    application = load_application(write_module('a, b = view("a"), view("b")\nVIEWS = [b]'))
    assert list(application.views) == ["b"]
    assert application.models == {}


def test_a_file_may_be_named(write_module: WriteModule, tmp_path: Path) -> None:
    name = write_module('VIEWS = [view("a")]')
    assert list(load_application(str(tmp_path / f"{name}.py")).views) == ["a"]


def test_a_view_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'nope' is not defined in jobs\.flights.*'aircraft_landings'"):
        load_application("jobs.flights").view("nope")


def test_a_file_may_import_what_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_module: WriteModule
) -> None:
    beside = write_module('VIEWS = [view("a")]')
    (tmp_path / "importing.py").write_text(f"from {beside} import VIEWS\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])

    assert list(load_application(str(tmp_path / "importing.py")).views) == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x = 1\n1 / 0\n",
            r"cannot be imported: ZeroDivisionError: division by zero at .*broken\.py, line 2; expected",
        ),
        ("def (\n", r"cannot be imported: SyntaxError: invalid syntax \(broken\.py, line 1\)"),
        ("from streams import nothing\n", r"cannot be imported: ImportError: cannot import name 'nothing'"),
        (
            "from streams import FeatureView\nFeatureView('v', sldie='1m')\n",
            r"TypeError: .*unexpected keyword argument 'sldie' at .*broken\.py, line 2",
        ),
        (
            "import json\nimport not_installed\n",
            r"cannot be imported: ModuleNotFoundError: No module named 'not_installed' at .*broken\.py, line 2",
        ),
        ("open('not/there')\n", r"cannot be imported: FileNotFoundError: .*'not/there' at .*broken\.py, line 1"),
    ],
)
def test_a_module_that_does_not_run_through_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(text)

    with pytest.raises(ConfigError, match=message):
        load_application(str(tmp_path / "broken.py"))


def test_a_module_may_end_the_program_by_itself(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text("raise SystemExit(3)\n")

    with pytest.raises(SystemExit):
        load_application(str(tmp_path / "ending.py"))


@pytest.mark.parametrize("module", ["", ".", ".views", "shop.", "shop/views", "1shop"])
def test_what_is_no_name_of_a_module_is_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a module, expected one such as"):
        load_application(module)


@pytest.mark.parametrize("module", ["no.such.module", "json.no_such_module", "no_such_file.py"])
def test_a_module_that_is_not_there_is_an_error(module: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_application(module)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("VIEWS = []", "defines views"),
        ('VIEWS = ["airport_departures"]', "defines views"),
        ('VIEWS = view("a")', r"defines views FeatureView.*, expected a FeatureView or more in a list, VIEWS"),
        ("VIEWS = 3", r"defines views 3, expected a FeatureView or more in a list, VIEWS"),
        ('VIEWS = {"a": view("a")}', r"defines views {'a': .*, expected a FeatureView or more in a list, VIEWS"),
        ('VIEWS = [view("a")]\nMODELS = None', "defines models None, expected a ModelSpec or more"),
        ('VIEWS = [view("a")]\nMODELS = ["m"]', r"defines models \['m'\], expected a ModelSpec or more"),
        ('VIEWS = [view("a")]\nUSE_CASES = 3', "defines use_cases 3, expected a UseCase or more in a list, USE_CASES"),
        ('VIEWS = [view("a")]\nTOPICS = ["a"]', r"has \['a'\] in TOPICS, expected TopicSettings by the names"),
        ('VIEWS = [view("a"), view("a", version=2)]', "a view name twice"),
    ],
)
def test_views_that_are_none_or_ambiguous_are_an_error(write_module: WriteModule, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_application(write_module(text))


def test_a_module_without_definitions_is_an_error() -> None:
    with pytest.raises(ConfigError, match="defines views"):
        load_application("json")


def test_a_model_over_another_version_of_a_view_is_an_error(write_module: WriteModule) -> None:
    text = """
from dataclasses import replace
from jobs.flights import MODELS
from jobs.flights.views import VIEWS as _VIEWS

VIEWS = [replace(_VIEWS[0], version=99), *_VIEWS[1:]]
"""
    with pytest.raises(ConfigError, match="airport_departures"):
        load_application(write_module(text))


def test_an_error_inside_a_module_is_not_taken_for_its_absence(write_module: WriteModule) -> None:
    name = write_module("1 / 0")
    with pytest.raises(ConfigError, match=rf"ZeroDivisionError: division by zero at .*{name}\.py, line \d+") as caught:
        load_application(name)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_two_models_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("jobs.flights")
    monkeypatch.setattr(module, "MODELS", [*module.MODELS, *module.MODELS])
    with pytest.raises(ConfigError, match=r"defines a model name twice: \['late_arrival', 'late_arrival'\]"):
        load_application("jobs.flights")


def test_scores_that_are_not_as_published_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recorded_application("jobs.flights").models
    published = tmp_path / "schemas" / "scores" / "late_arrival@1.json"
    published.parent.mkdir(parents=True)
    published.write_text("{}")
    with pytest.raises(ConfigError, match=r"late_arrival@1.json differs from what model late_arrival version 1 says"):
        load_recorded_application("jobs.flights")


def test_each_role_has_a_group_and_the_topics_that_it_reads() -> None:
    groups = consumer_groups(load_application("jobs.flights"))
    assert set(groups) == set(CONSUMERS)
    assert groups[Role.FEATURES][1] == ["flights.departed", "flights.landed", "repartition.flights.departed.carrier"]
    features = [f"features.{view}" for view in ("aircraft_landings", "airport_departures", "carrier_departures")]
    assert groups[Role.ONLINE][1] == [*features, "scores.late_arrival"]
    assert groups[Role.OFFLINE][1] == [*features, *groups[Role.FEATURES][1]]
    assert groups[Role.SCORING][1] == ["features.airport_departures"]


@pytest.mark.parametrize(
    ("use_cases", "message"),
    [
        ("['/v1/x/{user_id}']", "expected a UseCase"),
        ("[case('/v1/x/{user_id}'), case('/v1/x/{user_id}')]", "expected each path once, whatever its parameters"),
        ("[UseCase('/v1/x/{u}', lookups=[Lookup(view('b'), 'u')])]", r"views \['b'\] is not in VIEWS or MODELS"),
    ],
)
def test_a_wrong_use_case_is_refused(write_module: WriteModule, use_cases: str, message: str) -> None:
    case = "case = lambda path: UseCase(path, lookups=[Lookup(VIEWS[0], 'user_id')])"
    text = f"from streams import Lookup, UseCase\nVIEWS = [view('a')]\n{case}\nUSE_CASES = {use_cases}"
    with pytest.raises(ConfigError, match=message):
        load_application(write_module(text))


def test_an_application_may_have_use_cases(write_module: WriteModule) -> None:
    text = "from streams import Lookup, UseCase\nVIEWS = [view('a')]\n"
    module = write_module(f"{text}USE_CASES = [UseCase('/v1/x/{{u}}', lookups=[Lookup(VIEWS[0], 'u')])]")
    (use_case,) = load_application(module).use_cases
    assert use_case.parameters == ["u"]


def test_an_application_is_named_by_its_module_unless_it_says_otherwise(
    write_module: WriteModule, tmp_path: Path
) -> None:
    assert load_application("jobs.flights").name == "flights"
    module = write_module('VIEWS = [view("a")]')
    assert load_application(module).name == load_application(str(tmp_path / f"{module}.py")).name == module
    assert load_application(write_module('NAME = "shop-eu"\nVIEWS = [view("a")]')).name == "shop-eu"
    with pytest.raises(ConfigError, match=r"has the name 'shop\.eu', expected letters, digits"):
        load_application(write_module('NAME = "shop.eu"\nVIEWS = [view("a")]'))


def test_two_applications_over_one_topic_share_no_group(write_module: WriteModule) -> None:
    one, other = (load_application(write_module('VIEWS = [view("a")]')) for _ in range(2))
    groups = [group for application in (one, other) for group, _ in consumer_groups(application).values()]
    assert len(set(groups)) == 6
    assert groups[0] == f"headrace.{one.name}.features"
