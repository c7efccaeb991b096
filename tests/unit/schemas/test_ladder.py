from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.ladder import NO_LADDER, RUNGS, Ladder, LightModel, RecentAnswers, Rule
from tests.support.scoring import make_spec

ALWAYS = Rule("true", {"probability": 0.5})


def make_ladder(**changes: Any) -> Ladder:
    return Ladder(
        **{"cache": RecentAnswers(), "light_model": LightModel(name="delay_light"), "rules": (ALWAYS,)} | changes
    )


def test_a_model_without_a_ladder_is_refused():
    with pytest.raises(ConfigError, match="model delay: `ladder` is None, expected a Ladder: what answers while"):
        make_spec(ladder=None)


def test_a_ladder_has_every_rung_or_waives_it_by_name():
    assert not make_ladder().is_empty
    assert NO_LADDER.is_empty
    assert make_ladder(cache=None, waived=("cache",)).waived == ("cache",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": None}, "rung 'cache' is neither there nor waived"),
        ({"rules": ()}, "rung 'rules' is neither there nor waived"),
        ({"waived": ("rules",)}, "rung 'rules' is there and waived"),
        ({"waived": ("prayer",)}, r"waives \['prayer'\], expected some of \['cache', 'light_model', 'rules'\]"),
        ({"timeout": "0s"}, "timeout is 0s, expected more than 0"),
        ({"shed_after": "0s"}, "shed_after is 0s, expected more than 0"),
    ],
)
def test_a_wrong_ladder_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_ladder(**changes)


def test_nothing_can_be_shed_where_no_rung_answers_it():
    with pytest.raises(ConfigError, match="`shed_after` and no rung"):
        Ladder(waived=RUNGS, shed_after="1s")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            (Rule("distance > 1", {"probability": 0.5}),),
            "the last of `rules` has `when` 'distance > 1', expected 'true'",
        ),
        ((Rule("speed > 1", {"probability": 0.5}), ALWAYS), "rule 1: `where` 'speed > 1' reads 'speed'"),
        ((Rule("true", {}),), r"rule 1: `then` has \[\], expected \['probability'\]"),
        (
            (Rule("true", {"probability": 1.5}),),
            r"rule 1: `probability` is 1.5, expected a finite number within \[0, 1\]",
        ),
        ((Rule("true", {"probability": float("nan")}),), "`probability` is nan"),
        ((Rule("__import__('os')", {"probability": 0.5}), ALWAYS), "calls '__import__'"),
    ],
)
def test_wrong_rules_are_refused(rules: tuple[Rule, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        make_spec(ladder=make_ladder(rules=rules))


def test_a_model_is_not_its_own_light_model():
    with pytest.raises(ConfigError, match="its light model is itself"):
        make_spec(ladder=make_ladder(light_model=LightModel(name="delay")))


def test_the_light_model_has_the_contract_of_the_model_under_its_own_name():
    spec = make_spec(ladder=make_ladder())
    assert spec.light is not None
    assert (spec.light.name, spec.light.inputs, spec.light.outputs) == ("delay_light", spec.inputs, spec.outputs)
    assert spec.light.rungs.is_empty


@pytest.mark.parametrize(("field", "value"), [("rows", 0), ("max_age", "0s")])
def test_wrong_limits_of_recent_answers_are_refused(field: str, value: Any):
    with pytest.raises(ConfigError, match=field):
        RecentAnswers(**{field: value})


@pytest.mark.parametrize(("changes", "message"), [({"name": "No"}, "name is 'No'"), ({"timeout": "0s"}, "timeout")])
def test_wrong_light_models_are_refused(changes: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        LightModel(**{"name": "light"} | changes)
