import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.local.kafka import jar
from infra.local.kafka.jar import ensure_jars, expected_jars, fetch_with_maven, kafka_version
from schemas.errors import ServiceError

JARS = {"kafka_2.13-4.4.0.jar": b"broker", "slf4j-api-2.0.20.jar": b"logging"}


@pytest.fixture(autouse=True)
def small_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect two small jars, and offer no way to fetch them but those that a test adds."""
    checksums = tmp_path / "jars.sha256"
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in JARS.items()]
    checksums.write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(jar, "CHECKSUMS", checksums)
    monkeypatch.setattr(jar.importlib.util, "find_spec", lambda name: None)


def offer(monkeypatch: pytest.MonkeyPatch, **ways: Mapping[str, bytes] | str) -> list[str]:
    """Offer ways that write these jars, or fail with this message; return the list of those tried."""
    tried: list[str] = []

    def fetch(name: str, result: Mapping[str, bytes] | str, directory: Path) -> None:
        tried.append(name)
        if isinstance(result, str):
            raise ServiceError(result)
        for jar_name, content in result.items():
            (directory / jar_name).write_bytes(content)

    def make(name: str, result: Mapping[str, bytes] | str) -> tuple[str, object]:
        return name, lambda directory, scratch: fetch(name, result, directory)

    monkeypatch.setattr(jar, "_ways", lambda environment: [make(name, result) for name, result in ways.items()])
    return tried


def ensure(cache: Path) -> tuple[Path, list[str]]:
    notes: list[str] = []
    return ensure_jars(cache, environment={"PATH": ""}, notify=notes.append), notes


def test_jars_are_fetched_once_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = offer(monkeypatch, Maven=JARS)

    first, notes = ensure(tmp_path / "cache")
    second, later_notes = ensure(tmp_path / "cache")

    assert first == second
    assert {path.name: path.read_bytes() for path in first.iterdir()} == JARS
    assert tried == ["Maven"]
    assert notes == ["Downloading Apache Kafka 4.4.0 (2 jars, 43 MB, once) with Maven"]
    assert later_notes == []
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


def test_other_versions_have_a_directory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Maven=JARS)
    first, _ = ensure(tmp_path / "cache")
    (tmp_path / "pom.xml").write_bytes(jar.POM.read_bytes().replace(b"2.26.1", b"2.26.2"))
    monkeypatch.setattr(jar, "POM", tmp_path / "pom.xml")

    second, _ = ensure(tmp_path / "cache")

    assert first != second


def test_a_damaged_cache_is_filled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = offer(monkeypatch, Maven=JARS)
    directory, _ = ensure(tmp_path / "cache")
    (directory / "slf4j-api-2.0.20.jar").unlink()

    again, _ = ensure(tmp_path / "cache")

    assert again == directory
    assert {path.name for path in again.iterdir()} == set(JARS)
    assert tried == ["Maven", "Maven"]


def test_jgo_is_tried_when_maven_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = offer(monkeypatch, Maven="exit code 1", jgo=JARS)

    directory, _ = ensure(tmp_path / "cache")

    assert tried == ["Maven", "jgo"]
    assert {path.name for path in directory.iterdir()} == set(JARS)


def test_a_jar_with_another_digest_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Maven={**JARS, "slf4j-api-2.0.20.jar": b"something else"})

    with pytest.raises(
        ServiceError, match=r"Maven: the jars are not those of .*: wrong SHA-256 of slf4j-api-2.0.20.jar"
    ):
        ensure(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_and_unexpected_jars_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Maven={"kafka_2.13-4.4.0.jar": b"broker", "log4j-9.jar": b"?"})

    with pytest.raises(ServiceError, match=r"missing slf4j-api-2.0.20.jar; not expected log4j-9.jar"):
        ensure(tmp_path / "cache")


def test_the_error_tells_what_each_way_answered_and_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, Maven="no route to host", jgo="timed out")

    with pytest.raises(ServiceError) as caught:
        ensure(tmp_path / "cache")

    message = str(caught.value)
    assert "Maven: no route to host" in message
    assert "jgo: timed out" in message
    assert "Check the connection" in message
    assert "HEADRACE_KAFKA" in message


def test_the_error_says_when_there_is_neither_maven_nor_jgo(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="neither mvn is on the PATH nor the package jgo installed"):
        ensure(tmp_path / "cache")


def test_maven_is_run_on_a_copy_of_the_pom(tmp_path: Path) -> None:
    mvn = tmp_path / "mvn"
    mvn.write_text('#!/bin/sh\necho "$@" > arguments\n', encoding="utf-8")
    mvn.chmod(0o755)
    (tmp_path / "scratch").mkdir()

    fetch_with_maven(str(mvn), tmp_path / "jars", scratch=tmp_path / "scratch", environment={"PATH": "/usr/bin:/bin"})

    arguments = (tmp_path / "scratch" / "arguments").read_text(encoding="utf-8").split()
    assert f"{tmp_path}/scratch/pom.xml" in arguments
    assert "-DincludeScope=runtime" in arguments
    assert f"-DoutputDirectory={tmp_path}/jars" in arguments


def test_a_failing_maven_is_quoted(tmp_path: Path) -> None:
    mvn = tmp_path / "mvn"
    mvn.write_text("#!/bin/sh\necho '[ERROR] Could not transfer artifact'; exit 1\n", encoding="utf-8")
    mvn.chmod(0o755)

    with pytest.raises(ServiceError, match=r"exit code 1: \[ERROR\] Could not transfer artifact"):
        fetch_with_maven(str(mvn), tmp_path / "jars", scratch=tmp_path, environment={"PATH": "/usr/bin:/bin"})


def test_the_list_of_jars_is_that_of_the_pinned_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jar, "CHECKSUMS", Path(jar.__file__).with_name("jars.sha256"))

    jars = expected_jars()

    assert f"kafka_2.13-{kafka_version()}.jar" in jars
    assert "log4j-core-2.26.1.jar" in jars
    assert all(len(digest) == 64 for digest in jars.values())
