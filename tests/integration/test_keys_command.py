"""``headrace keys`` against a real Redis."""

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jobs.keys_command import app
from schemas.errors import ConfigError, ServiceError
from streams.serving.producer_key import digest_of
from tests.integration.conftest import MakeServices

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, make_services: MakeServices) -> Run:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADRACE_REDIS", make_services().up(["redis"]).get("redis") or "")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


def listed(run: Run) -> list[dict[str, Any]]:
    result = run("list", "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_a_key_is_shown_once_listed_and_revoked(run: Run) -> None:
    assert "headrace keys create NAME" in run("list").stdout
    made = run("create", "shop", "--source", "flights.departed", "--source", "flights.landed", "--rate", "50")
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert re.fullmatch(r"hrk_[\w-]{43}", secret)
    assert "it is not kept and cannot be shown again" in made.stderr
    as_json = json.loads(run("create", "all", "--burst", "7", "--json").stdout)
    assert as_json["sha256"] == digest_of(as_json["key"])
    first, second = listed(run)
    assert first.pop("created_at") <= second["created_at"]
    assert first == {
        "name": "shop",
        "sources": ["flights.departed", "flights.landed"],
        "rate": 50,
        "burst": 10_000,
        "revoked_at": None,
        "sha256": digest_of(secret),
    }
    assert (second["sources"], second["rate"], second["burst"]) == (["*"], 1_000, 7)
    assert "key" not in second
    revoked = run("revoke", "shop")
    assert revoked.stdout == "shop may send nothing any more\n"
    assert listed(run)[0]["revoked_at"] is not None
    shown = run("list").stdout
    assert "flights.departed flights.landed" in shown
    assert secret not in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("create", "a b"), "a key cannot be called 'a b'"),
        (("create", "a", "--source", "flights"), "there is no source 'flights', expected one of"),
        (("create", "a", "--rate", "0"), "the rate is 0 events, expected 1 to 1000000"),
        (("create", "a", "--burst", "-1"), "the burst is -1 events"),
        (("revoke", "a"), r"there is no key 'a' to revoke, expected one of \[\]"),
    ],
)
def test_what_is_wrong_is_told_and_changes_nothing(run: Run, arguments: tuple[str, ...], text: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert re.search(text, str(result.exception))
    assert listed(run) == []


def test_a_name_is_taken_once(run: Run) -> None:
    assert run("create", "shop").exit_code == 0
    assert "there is a key 'shop' already" in str(run("create", "shop").exception)
    assert run("revoke", "shop").exit_code == 0
    assert run("create", "shop").exit_code == 0
    assert [key["name"] for key in listed(run)] == ["shop", "shop"]


def test_without_redis_nothing_is_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS", "redis://127.0.0.1:1/0")
    result = run("create", "shop")
    assert isinstance(result.exception, ServiceError)
    assert "no Redis answers at" in str(result.exception)
    assert result.stdout == ""
