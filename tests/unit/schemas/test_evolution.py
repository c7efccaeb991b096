"""What a new version of a contract may change, and what of payloads the answer rests on."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from schemas.contract import Contract
from schemas.errors import ConfigError
from schemas.evolution import check_evolution, record_contracts, unreadable
from streams.decoding import decode
from tests.support.transport import make_batch

INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}


def contract(version: int = 1, *, required: tuple[str, ...] = (), mode: str | None = None, **fields: Any) -> Contract:
    document = {"type": "object", "properties": fields, "required": list(required)}
    return Contract(f"order@{version}", document | ({"x-compatibility": mode} if mode else {}))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


WIDENED = (contract(n=INT32), contract(2, n={"type": "integer"}))
ADDED = (contract(n=INT32), contract(2, n=INT32, more={"type": "string"}))
REQUIRED = (contract(n=INT32), contract(2, n=INT32, more={"type": "string"}, required=("more",)))
NULLED = (contract(n=INT32), contract(2, n={**INT32, "type": ["integer", "null"]}))


def wider(name: str = "`n`") -> list[str]:
    return [
        f"{name} has minimum -9223372036854775808, expected -2147483648",
        f"{name} has maximum 9223372036854775807, expected 2147483647",
    ]


def changed(old: dict[str, Any], new: dict[str, Any]) -> tuple[Contract, Contract]:
    return contract(n=old), contract(2, n=new)


@pytest.mark.parametrize(
    ("versions", "backward", "forward"),
    [
        (WIDENED, [], wider()),
        (ADDED, [], []),
        (REQUIRED, ["`more` may be absent"], []),
        (NULLED, [], ["`n` may be null, expected integer"]),
        (changed({"type": "integer"}, {"type": "number"}), [], ["`n` may be number, expected integer"]),
        (
            changed({"type": "string"}, {"type": "integer"}),
            ["`n` may be string, expected integer"],
            ["`n` may be integer, expected string"],
        ),
        (
            changed({"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a", "b"]}),
            [],
            ["`n` may be ['b'], expected one of ['a']"],
        ),
        (
            changed({"type": "integer", "x-unit": "s"}, {"type": "integer", "x-unit": "ms"}),
            ["`n` has x-unit 's', expected 'ms'"],
            ["`n` has x-unit 'ms', expected 's'"],
        ),
        (
            changed({"type": "string"}, {"type": "string", "pattern": "^a"}),
            ["`n` has pattern None, expected '^a'"],
            [],
        ),
        (
            changed({"type": "number", "exclusiveMinimum": 0}, {"type": "number", "minimum": 0}),
            [],
            ["`n` has minimum 0, expected more than 0"],
        ),
        (
            changed({"type": "array", "items": INT32}, {"type": "array", "items": {"type": "integer"}}),
            [],
            wider("`n` []"),
        ),
    ],
)
def test_what_may_change(versions: tuple[Contract, Contract], backward: list[str], forward: list[str]) -> None:
    old, new = (version.definition for version in versions)
    assert unreadable(old, new) == backward
    assert unreadable(new, old) == forward


@pytest.mark.parametrize(
    ("versions", "mode", "failure"),
    [
        (WIDENED, "BACKWARD", None),
        (WIDENED, "FORWARD", "not FORWARD: `n` has minimum"),
        (WIDENED, "FULL", "not FORWARD: `n` has minimum"),
        (REQUIRED, None, "does not fit order@1, expected BACKWARD: not BACKWARD: `more` may be absent"),
        (REQUIRED, "FORWARD", None),
        (REQUIRED, "NONE", None),
        (ADDED, "FULL", None),
    ],
)
def test_a_new_version_has_to_fit_the_recorded_one(
    versions: tuple[Contract, Contract], mode: str | None, failure: str | None
) -> None:
    old, new = versions
    record_contracts([old])
    new = Contract(new.reference, new.document | ({"x-compatibility": mode} if mode else {}))
    if failure is None:
        assert check_evolution([old, new]) == ["order@2"]
        return
    with pytest.raises(ConfigError, match=failure):
        record_contracts([new])
    assert not Path("schemas/recorded/order@2.json").exists()


def test_a_recorded_version_keeps_its_rules_and_may_change_its_words(directory: Path) -> None:
    assert check_evolution([contract(n=INT32)]) == ["order@1"]
    assert record_contracts([contract(n=INT32)]) == [directory / "schemas" / "recorded" / "order@1.json"]
    assert check_evolution([contract(n={**INT32, "description": "How many."})]) == []
    with pytest.raises(
        ConfigError, match=r"order@1 differs from its record .*`n` has minimum .* Add a version order@2"
    ):
        check_evolution([contract(n={"type": "integer"})])


def test_the_newest_version_before_counts(directory: Path) -> None:
    record_contracts([contract(1, n={"type": "string"})])
    record_contracts([contract(2, n=INT32, mode="NONE")])
    assert check_evolution([contract(10, n={"type": "integer"})]) == ["order@10"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"contract": "order@1", "rules": {}}',
        '{"contract": "x@1", "rules": {"fields": {}, "required": []}}',
    ],
)
def test_a_record_that_is_none_is_refused(directory: Path, text: str) -> None:
    record_contracts([contract(n=INT32)])
    (directory / "schemas" / "recorded" / "order@1.json").write_text(text)
    with pytest.raises(ConfigError, match=r"order@1\.json is .*restore it"):
        check_evolution([contract(n=INT32)])


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="has `x-compatibility` 'SIDEWAYS', expected one of"):
        contract(n=INT32, mode="SIDEWAYS")


BOUNDS = st.integers(-3, 3)
FIELDS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number", ["integer", "null"], ["number", "null"]])},
        optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUNDS)
        | {"enum": st.lists(BOUNDS, min_size=1, max_size=3, unique=True)},
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", ["string", "null"]])},
        optional={"minLength": st.integers(0, 2), "maxLength": st.integers(0, 2), "enum": st.just(["", "a"])},
    ),
)
VALUES = st.one_of(st.none(), st.integers(-5, 5), st.floats(-5, 5), st.text("ab", max_size=3), st.booleans())


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.filter_too_much])
@given(old=FIELDS, new=FIELDS, values=st.lists(VALUES, min_size=5, max_size=20), is_required=st.booleans())
def test_what_is_said_to_be_readable_is_read(
    old: dict[str, Any], new: dict[str, Any], values: list[Any], is_required: bool
) -> None:
    before, after = contract(1, n=old), contract(2, n=new, required=("n",) if is_required else ())
    assume(not unreadable(before.definition, after.definition))
    payloads = [b"{}", *(json.dumps({"n": value}).encode() for value in values)]
    passed = set(decode(make_batch(payloads), before).rows["_offset"].to_pylist())
    assert passed <= set(decode(make_batch(payloads), after).rows["_offset"].to_pylist())
