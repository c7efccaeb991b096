import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from prometheus_client import CollectorRegistry

from jobs import composition
from jobs import scoring as scoring_role
from jobs.application import consumer_groups, load_application
from jobs.composition import run_worker
from jobs.role import CONSUMERS, Role
from jobs.settings import Settings
from schemas.errors import ConfigError, InferenceUnavailableError
from schemas.model import ServedVersion
from streams.agents import features, scoring
from streams.inference.rollout import Rollout
from streams.inference.rollout_log import Entry, View
from streams.observability.metrics import Metrics
from tests.support.running import SHIPPED_MODELS

NO_LINEAGE: Any = None


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An app that has crashed, and Faust that ends with code 1, as it does."""
    made = SimpleNamespace(crash_reason=None, headrace=SimpleNamespace())

    def run(*_: Any, **__: Any) -> NoReturn:
        raise SystemExit(1)

    monkeypatch.setattr(composition, "ensure_topics", lambda *_, **__: [])
    monkeypatch.setattr(composition, "_compose", lambda *_, **__: made)
    monkeypatch.setattr(composition, "run", run)
    return made


def settings(tmp_path: Any) -> Settings:
    return Settings.from_environment(
        {
            "HEADRACE_HOME": str(tmp_path),
            "HEADRACE_KAFKA": "127.0.0.1:1",
            "HEADRACE_REDIS": "redis://127.0.0.1:1",
            "HEADRACE_TRITON": "127.0.0.1:1",
            "HEADRACE_MODEL_REPOSITORY": str(SHIPPED_MODELS),
        }
    )


def start(tmp_path: Any) -> None:
    run_worker(
        Role.SCORING,
        load_application("jobs.flights"),
        settings(tmp_path),
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


@pytest.mark.parametrize("role", CONSUMERS)
def test_a_worker_joins_the_group_of_its_application_and_role(
    role: Role, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    transactional: list[str] = []

    def make_epoch(*_: Any, transactional_id: str, **__: Any) -> object:
        transactional.append(transactional_id)
        return object()

    for module in (features, scoring):
        monkeypatch.setattr(module, "Epoch", make_epoch)
    application = load_application("jobs.flights")

    @contextlib.contextmanager
    def open_log(*_: Any) -> Iterator[Any]:
        def begin(newest: Callable[[], ServedVersion], **_: Any) -> Entry:
            return Entry(generation=1, state=Rollout(model="late_arrival", champion=newest()))

        yield SimpleNamespace(begin=begin, view=View(n_bins=10))

    monkeypatch.setattr(scoring_role, "RolloutLog", open_log)
    metrics = Metrics(CollectorRegistry())
    app = composition._compose(
        role, application, settings(tmp_path), worker_id="box-3", metrics=metrics, lineage=NO_LINEAGE
    )
    group = consumer_groups(application)[role][0]
    assert group.startswith(f"headrace.flights.{role}")
    assert (app.conf.id, app.headrace.kafka["group.id"]) == (group, group)
    expected = [f"{group}.box-3"] if role in (Role.FEATURES, Role.SCORING) else []
    assert transactional == expected
