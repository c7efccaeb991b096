"""Reference tables: what a file must be, and what a view may look up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.aggregation import count, from_event
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.reference import Reference
from schemas.view import FeatureView
from tests.support.builders import make_source

PLANES = "tail,year,seats,maker\nN1,1999,55,BOEING\nN2,,20,NA\n"
WEATHER = "place,hour,temp\nJFK,2013-01-01T10:00:00Z,1.5\nJFK,2013-01-01T11:00:00Z,2.5\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a reference file where definitions find it."""
    monkeypatch.chdir(tmp_path)

    def to(name: str, content: str | pa.Table) -> Path:
        path = tmp_path / "schemas" / "references" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            pq.write_table(content, path)
        return path

    return to


def make_view(**settings: Any) -> FeatureView:
    given: dict[str, Any] = {"version": 1, "slide": "1m", "features": {"n": count().over("1m")}}
    return FeatureView("v", entity=Entity("thing", key="key"), source=make_source(), **given | settings)


def test_a_file_is_a_table_of_text_numbers_and_truth_values(write: Callable[..., Path]) -> None:
    write("planes@1.csv", PLANES)
    reference = Reference("planes", version=1, key="tail")

    assert reference.value_schema == pa.schema([("year", pa.int64()), ("seats", pa.int64()), ("maker", pa.string())])
    assert reference.table.to_pylist()[1] == {"tail": "N2", "year": None, "seats": 20, "maker": None}


def test_parquet_and_ndjson_are_the_same_table(write: Callable[..., Path]) -> None:
    write("weather@1.csv", WEATHER)
    expected = Reference("weather", version=1, key="place", valid_from="hour").table
    hours = pa.array(["2013-01-01T10:00:00Z", "2013-01-01T11:00:00Z"]).cast(pa.timestamp("ms", "UTC"))
    write("weather@2.parquet", pa.table({"place": ["JFK", "JFK"], "hour": hours, "temp": [1.5, 2.5]}))
    lines = [f'{{"place": "JFK", "hour": "2013-01-01T1{n}:00:00Z", "temp": {n + 1}.5}}' for n in range(2)]
    write("weather@3.ndjson", "\n".join(lines))

    for version in (2, 3):
        assert Reference("weather", version=version, key="place", valid_from="hour").table.equals(expected)


TIMED: dict[str, Any] = {"key": "place", "valid_from": "hour"}


@pytest.mark.parametrize(
    ("content", "settings", "says"),
    [
        (None, {"key": "tail"}, r"'r@1' not found, expected a file r@1.parquet or r@1.csv or r@1.ndjson in "),
        (PLANES, {"key": "absent"}, r"has the key \['absent'\] .*expected distinct columns of .*'tail'"),
        (PLANES, {"key": ()}, "expected distinct columns"),
        (PLANES, {"key": ("tail", "tail")}, "expected distinct columns"),
        (PLANES, {"key": "year"}, "has a row without `year`, expected one in each"),
        (PLANES + "N1,2000,1,X\n", {"key": "tail"}, r"two rows for {'tail': 'N1'}, expected one"),
        (WEATHER, {"key": "place"}, r"two rows for {'place': 'JFK'}"),
        (WEATHER, {"key": "temp"}, "column `temp` is double, expected text or integers"),
        (WEATHER, {"key": "place", "valid_from": "temp"}, "`temp` is double, expected timestamps, or RFC 3339 text"),
        (WEATHER.replace("T11:00:00Z", ""), TIMED, "expected RFC 3339 such as"),
        ("a,b\n1,2,3\n", {"key": "a"}, "cannot be read: .*expected csv"),
        (PLANES, {"key": "tail", "version": 0}, "`version` is 0, expected a whole number of 1 or more"),
        (PLANES, {"key": "tail", "name": "no name"}, "`Reference` name is 'no name'"),
    ],
)
def test_a_mistake_in_a_reference_is_refused(
    write: Callable[..., Path], content: str | None, settings: dict[str, Any], says: str
) -> None:
    if content is not None:
        write("r@1.csv", content)
    with pytest.raises(ConfigError, match=says):
        Reference(**{"name": "r", "version": 1} | settings)


def test_two_files_of_one_version_are_refused(write: Callable[..., Path]) -> None:
    write("planes@1.csv", PLANES)
    write("planes@1.ndjson", '{"tail": "N1"}')
    with pytest.raises(ConfigError, match="expected one file; delete the others"):
        Reference("planes", version=1, key="tail")


def test_features_read_what_is_looked_up_by_the_name_of_the_lookup(write: Callable[..., Path]) -> None:
    write("planes@1.csv", PLANES)
    planes = Reference("planes", version=1, key="tail")
    view = make_view(
        lookups={"plane": planes.on("key")},
        features={"old": count(where="plane_year < 2000").over("1m"), "seats": from_event("plane_seats")},
    )

    assert view.feature_schema.field("seats").type == pa.int64()
    with pytest.raises(ConfigError, match=r"no field of .*, planes@1, expected one of"):
        make_view(lookups={"plane": planes.on("key")}, features={"x": from_event("seats")})


@pytest.mark.parametrize(
    ("lookups", "says"),
    [
        (lambda r: {"plane": r}, "lookup 'plane' is a Reference, expected a lower-case name and a lookup such as"),
        (lambda r: {"Plane": r.on("key")}, "lookup 'Plane' is a ReferenceLookup, expected a lower-case name"),
        (lambda r: {"plane": r.on("absent")}, "is on 'absent', which is no column of the events"),
        (
            lambda r: {"plane": r.on("n")},
            "is on 'n', which is int64, expected a column of type string as `tail`",
        ),
        (lambda r: {"plane": r.on("key", "kind")}, r"expected a column for each of the key \['tail'\]"),
        (lambda r: {"plane": r.on("key", max_age="1h")}, "rows of planes@1 have no `valid_from`"),
    ],
)
def test_a_mistake_in_a_lookup_is_refused(write: Callable[..., Path], lookups: Any, says: str) -> None:
    write("planes@1.csv", PLANES)
    planes = Reference("planes", version=1, key="tail")
    with pytest.raises(ConfigError, match=says):
        make_view(lookups=lookups(planes))


def test_a_lookup_does_not_take_the_name_of_a_column_of_the_events(write: Callable[..., Path]) -> None:
    write("planes@1.csv", "tail,b_year,year\nN1,1,2\n")
    planes = Reference("planes", version=1, key="tail")
    with pytest.raises(ConfigError, match=r"make the columns \['a_b_year'\] twice"):
        make_view(lookups={"a": planes.on("key"), "a_b": planes.on("key")})


def test_what_has_changed_in_the_file_is_another_definition(write: Callable[..., Path]) -> None:
    plain = make_view()
    hashes = {plain.definition_hash}
    for version, content in enumerate((PLANES, PLANES.replace("55", "56")), start=1):
        write(f"planes@{version}.csv", content)
        planes = Reference("planes", version=version, key="tail")
        hashes.add(make_view(lookups={"plane": planes.on("key")}).definition_hash)

    assert len(hashes) == 3
    write("copy@7.csv", PLANES)
    copy = Reference("copy", version=7, key="tail").on("key")
    assert make_view(lookups={"plane": copy}).definition_hash in hashes
