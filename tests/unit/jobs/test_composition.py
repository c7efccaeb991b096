from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from jobs import composition
from jobs.application import load_application
from jobs.composition import run_worker
from jobs.role import Role
from jobs.settings import Settings
from schemas.errors import ConfigError, InferenceUnavailableError


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An app that has crashed, and Faust that ends with code 1, as it does."""
    made = SimpleNamespace(crash_reason=None)

    def run(*_: Any, **__: Any) -> NoReturn:
        raise SystemExit(1)

    monkeypatch.setattr(composition, "ensure_topics", lambda *_, **__: [])
    monkeypatch.setattr(composition, "_compose", lambda *_, **__: made)
    monkeypatch.setattr(composition, "run", run)
    return made


def start(tmp_path: Any) -> None:
    environment = {
        "HEADRACE_HOME": str(tmp_path),
        "HEADRACE_KAFKA": "127.0.0.1:1",
        "HEADRACE_REDIS": "redis://127.0.0.1:1",
    }
    run_worker(
        Role.SCORING,
        load_application("jobs.flights"),
        Settings.from_environment(environment),
        worker_id="w",
        metrics_port=0,
        log_level="info",
    )


def test_a_worker_that_meets_another_model_ends_as_one_with_a_wrong_setting(app: Any, tmp_path: Any) -> None:
    app.crash_reason = ConfigError("the model has SHA-256 cd")
    with pytest.raises(ConfigError, match="SHA-256 cd"):
        start(tmp_path)


def test_a_worker_that_fails_otherwise_can_be_started_again(app: Any, tmp_path: Any) -> None:
    app.crash_reason = InferenceUnavailableError("no Triton")
    with pytest.raises(SystemExit) as ended:
        start(tmp_path)
    assert ended.value.code == 1
