import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.local.state import RUN_LOCK, claimed
from jobs.demo import demo
from jobs.settings import Settings
from schemas.errors import ConfigError


class FakeServices:
    """Services of which the start is interrupted."""

    def __init__(self) -> None:
        self.ended = 0

    def down(self) -> None:
        self.ended += 1

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        yield

    def up(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeServices:
    fake = FakeServices()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(Settings, "local_services", lambda *_, **__: fake)
    return fake


def test_ctrl_c_says_where_the_logs_are(
    services: FakeServices, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        demo()
    assert services.ended == 1
    told = capsys.readouterr().out.replace("\n", "")
    assert told == f"Interrupted: ending everything. Logs are in {tmp_path / 'demo' / 'logs'}"


def test_an_interrupt_is_heard_also_in_the_background_of_a_shell_which_ignores_it(
    services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "up", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            demo()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_setting_that_cannot_work_is_refused_before_anything_is_touched(
    services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_METRICS_ADDRESS", "no.such.host.invalid")
    with pytest.raises(ConfigError, match="HEADRACE_METRICS_ADDRESS is"):
        demo()
    assert services.ended == 0


def test_each_run_begins_afresh_and_keeps_its_claim(services: FakeServices, tmp_path: Path) -> None:
    left = tmp_path / "demo" / "delta" / "rows"
    left.mkdir(parents=True)
    (tmp_path / "demo" / "old").touch()
    with pytest.raises(KeyboardInterrupt):
        demo()
    assert services.ended
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {RUN_LOCK, "models"}


def test_a_second_demo_in_the_same_home_is_refused_and_touches_nothing(services: FakeServices, tmp_path: Path) -> None:
    (tmp_path / "demo" / "delta").mkdir(parents=True)
    with (
        claimed(tmp_path / "demo", by="demo"),
        pytest.raises(ConfigError, match=rf"`headrace demo` already runs here \(pid {os.getpid()}\)"),
    ):
        demo()
    assert services.ended == 0
    assert (tmp_path / "demo" / "delta").is_dir()
