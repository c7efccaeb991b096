"""What holds for every local service, shown on the one that starts fastest, and on all of them together."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from infra.local import services as services_module
from infra.local.service import SERVICE_NAMES, ServiceAddresses
from infra.local.services import LocalServices, ServiceStatus
from infra.local.state import read_state, state_path, write_state
from schemas.errors import ConfigError, ServiceError

MakeServices = Callable[..., LocalServices]
FindProcesses = Callable[[], list[psutil.Process]]


def by_name(services: LocalServices) -> dict[str, ServiceStatus]:
    return {status.name: status for status in services.status()}


def client(url: str | None) -> "redis.Redis[bytes]":
    assert url is not None
    return redis.Redis.from_url(url)


def test_all_services_come_up_answer_and_leave_nothing_behind(
    make_services: MakeServices, processes_of: FindProcesses, tmp_path: Path
) -> None:
    services = make_services()
    ready: list[ServiceStatus] = []

    addresses = services.up(on_ready=ready.append)

    assert {status.name for status in ready} == set(SERVICE_NAMES)
    assert all(status.took_ms is not None and status.state == "running" for status in ready)
    statuses = by_name(services)
    assert {name: status.state for name, status in statuses.items()} == dict.fromkeys(SERVICE_NAMES, "running")
    assert {name: addresses.get(name) for name in SERVICE_NAMES} == {n: s.address for n, s in statuses.items()}
    assert statuses["kafka"].version.startswith("Apache Kafka 4.4.0 (Java ")
    assert statuses["redis"].version.startswith("Valkey ")
    assert statuses["triton"].version == "NVIDIA Triton 2.51.0"
    assert all(Path(status.log or "").stat().st_size > 0 for status in statuses.values())
    assert {process.pid for process in processes_of()} >= {status.pid for status in statuses.values()}
    assert services.addresses() == addresses

    assert services.down() == list(SERVICE_NAMES)

    assert processes_of() == []
    assert not state_path(tmp_path / "home").exists()
    assert {name: status.state for name, status in by_name(services).items()} == dict.fromkeys(SERVICE_NAMES, "stopped")
    assert services.addresses() == ServiceAddresses()
    assert not any(Path("/dev/shm").glob(f"{services._services['triton']._region_prefix}*"))  # noqa: S108 - where POSIX shared memory is
    assert services.down() == []


def test_a_running_service_is_used_again_by_a_later_command(make_services: MakeServices) -> None:
    first = make_services()
    address = first.up(["redis"])
    pid = by_name(first)["redis"].pid
    ready: list[ServiceStatus] = []

    again = make_services().up(["redis"], on_ready=ready.append)

    assert again == address
    assert (ready[0].pid, ready[0].took_ms) == (pid, None)


def test_only_the_services_that_are_asked_for_are_started(make_services: MakeServices) -> None:
    services = make_services()

    addresses = services.up(["redis"])

    assert (addresses.kafka, addresses.triton) == (None, None)
    assert by_name(services)["kafka"].state == "stopped"


def test_an_unknown_service_is_refused(make_services: MakeServices) -> None:
    with pytest.raises(ConfigError, match="no service 'kafak', expected one of kafka, redis, triton"):
        make_services().up(["kafak"])


def test_a_given_service_is_checked_and_used_and_never_stopped(make_services: MakeServices) -> None:
    owner = make_services("owner")
    url = owner.up(["redis"]).redis
    user = make_services("user", given=ServiceAddresses(redis=url))
    ready: list[ServiceStatus] = []

    addresses = user.up(["redis"], on_ready=ready.append)

    assert addresses.redis == url
    assert ready[0].state == "given"
    assert ready[0].version.startswith("Valkey ")
    assert by_name(user)["redis"].is_healthy
    assert user.down() == []
    assert client(url).ping()
    with pytest.raises(ServiceError, match="was given, expected a service of Headrace's own; unset HEADRACE_REDIS"):
        user.kill("redis")
    with pytest.raises(ServiceError, match="was given"):
        user.start("redis")


@pytest.mark.parametrize(
    ("name", "address"),
    [("kafka", "127.0.0.1:{port}"), ("redis", "redis://127.0.0.1:{port}/0"), ("triton", "127.0.0.1:{port}")],
)
def test_a_given_service_that_is_not_there_is_an_error_that_names_the_variable(
    make_services: MakeServices, name: str, address: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = address.format(port=port)
    services = make_services(given=ServiceAddresses(**{name: given}))

    with pytest.raises(ServiceError) as caught:
        services.up([name])

    assert f"is given as {given} (HEADRACE_{name.upper()}), but is not healthy" in str(caught.value)
    assert f"correct HEADRACE_{name.upper()}, or unset it" in str(caught.value)
    status = by_name(services)[name]
    assert (status.state, status.address, status.is_healthy) == ("unhealthy", given, False)


@pytest.mark.parametrize(("name", "scheme"), [("kafka", ""), ("redis", "redis://"), ("triton", "")])
def test_something_else_at_a_given_address_is_not_taken_for_the_service(
    make_services: MakeServices, name: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_module, "_CHECK_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = f"{scheme}127.0.0.1:{silent.getsockname()[1]}"

        with pytest.raises(ServiceError, match="but is not healthy"):
            make_services(given=ServiceAddresses(**{name: given})).up([name])


def test_standard_ports_are_taken_when_free_and_left_alone_when_not(
    make_services: MakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(services_module.ValkeyService, "standard_ports", {"redis": port})
        other = make_services("other", has_standard_ports=True).up(["redis"]).redis
    standard = make_services("standard", has_standard_ports=True).up(["redis"]).redis

    assert standard == f"redis://127.0.0.1:{port}/0"
    assert other is not None
    assert client(other).ping()
    assert other != standard


def test_a_port_that_is_taken_at_the_last_moment_is_replaced(
    make_services: MakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: list[dict[str, int]] = []

    def choose(wanted: dict[str, int]) -> dict[str, int]:
        ports = choose_ports(wanted) if choices else {"redis": server.getsockname()[1]}
        choices.append(ports)
        return ports

    choose_ports = services_module.choose_ports
    monkeypatch.setattr(services_module, "choose_ports", choose)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = make_services().up(["redis"]).redis

    assert len(choices) == 2
    assert url == f"redis://127.0.0.1:{choices[1]['redis']}/0"
    assert client(url).ping()


def test_a_service_that_dies_while_starting_is_quoted_and_its_record_removed(
    make_services: MakeServices, processes_of: FindProcesses, tmp_path: Path
) -> None:
    services = make_services()
    services.up(["redis"])
    services.down()
    (manifest,) = (tmp_path / "home" / "redis").rglob("*.manifest")
    manifest.write_text("this is no manifest\n", encoding="utf-8")

    with pytest.raises(ServiceError) as caught:
        services.up(["redis"])

    message = str(caught.value)
    assert "Redis ended while starting with exit code 1" in message
    assert f"From {tmp_path}/home/logs/redis.log:" in message
    assert "Invalid AOF manifest file format" in message
    assert "run `headrace services up` again" in message
    assert f"(data: {tmp_path}/home/redis)" in message
    assert "or set HEADRACE_REDIS to the address of a running one" in message
    assert processes_of() == []
    assert read_state(tmp_path / "home") == {}


def test_what_was_started_beside_a_failing_service_is_ended_again(
    make_services: MakeServices, processes_of: FindProcesses
) -> None:
    services = make_services(
        environment={"PATH": ""}, given=ServiceAddresses(kafka="127.0.0.1:1", triton="127.0.0.1:1")
    )

    with pytest.raises(ServiceError) as caught:
        services.up()

    assert "Kafka is given as 127.0.0.1:1" in str(caught.value)
    assert "Triton is given as 127.0.0.1:1" in str(caught.value)
    assert processes_of() == []


def test_a_home_that_cannot_be_written_to_is_told(make_services: MakeServices, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    services = LocalServices(tmp_path / "file", environment={}, model_repository=tmp_path, cache=tmp_path)

    with pytest.raises(ServiceError, match=r"file cannot be written to .*; set HEADRACE_HOME to one"):
        services.up(["redis"])


def test_data_that_cannot_be_written_is_told(make_services: MakeServices, tmp_path: Path) -> None:
    services = make_services()
    (tmp_path / "home" / "redis").write_text("not a directory", encoding="utf-8")

    with pytest.raises(ServiceError, match=r"Redis could not be set up: .*set HEADRACE_HOME and HEADRACE_CACHE"):
        services.up(["redis"])


def test_a_home_with_spaces_in_its_name_serves_as_well(make_services: MakeServices, tmp_path: Path) -> None:
    (tmp_path / "my models").mkdir()
    services = make_services("my  home, ünïcode", model_repository=tmp_path / "my models")

    services.up()

    assert [status.state for status in services.status()] == ["running"] * 3
    assert (services.home / "kafka" / "log" / "meta.properties").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my  home, ünïcode", "my models"]


def test_a_machine_without_any_redis_is_told_how_to_get_one(
    make_services: MakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.local.valkey.importlib.util.find_spec", lambda name: None)

    with pytest.raises(
        ServiceError, match=r"There is no Redis server: .*Run `make setup`, or install Redis, or set HEADRACE_REDIS"
    ):
        make_services(environment={"PATH": ""}).up(["redis"])


def test_a_redis_server_on_the_path_is_used_where_the_package_is_missing(
    make_services: MakeServices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = services_module.ValkeyService(tmp_path, environment={})._program()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(program)
    monkeypatch.setattr("infra.local.valkey.importlib.util.find_spec", lambda name: None)

    url = make_services(environment={"PATH": str(tmp_path / "bin")}).up(["redis"]).redis

    assert client(url).ping()


def test_a_killed_service_comes_back_at_the_same_address_with_its_data(make_services: MakeServices) -> None:
    services = make_services()
    url = services.up(["redis"]).redis
    client(url).set("key", "value")

    pid = services.kill("redis", signal.SIGKILL)

    status = by_name(services)["redis"]
    assert status.state == "stopped"
    assert f"process {pid} has ended by itself; `headrace services up` starts it again" in status.detail
    assert services.addresses().redis is None
    with pytest.raises(ServiceError, match=r"Redis does not run under .*; start it first"):
        services.kill("redis")

    restarted = services.start("redis")

    assert (restarted.address, restarted.state) == (url, "running")
    assert restarted.pid != pid
    assert client(url).get("key") == b"value"
    assert services.start("redis").pid == restarted.pid


def test_up_brings_a_killed_service_back_at_the_same_address_too(make_services: MakeServices) -> None:
    services = make_services()
    addresses = services.up(["redis"])
    services.kill("redis")

    assert services.up(["redis"]) == addresses


def test_start_says_so_when_the_address_has_been_taken_meanwhile(
    make_services: MakeServices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(services_module, "_PORT_RELEASE_TIMEOUT_S", 0.1)
    services = make_services()
    services.up(["redis"])
    services.kill("redis")
    port = read_state(tmp_path / "home")["redis"].ports["redis"]

    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ServiceError, match=f"Port {port} of Redis has been taken by another process, expected it free"),
    ):
        services.start("redis")


def test_a_stopped_process_is_unhealthy_and_up_replaces_it(
    make_services: MakeServices, processes_of: FindProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_module, "_CHECK_TIMEOUT_S", 0.3)
    services = make_services()
    services.up(["redis"])
    pid = services.kill("redis", signal.SIGSTOP)

    status = by_name(services)["redis"]
    assert (status.state, status.pid) == ("unhealthy", pid)
    assert "does not answer PING" in status.detail

    services.up(["redis"])

    assert [process.pid for process in processes_of()] == [by_name(services)["redis"].pid]
    assert not psutil.pid_exists(pid)


def test_the_state_of_a_crashed_run_never_leads_to_another_process(make_services: MakeServices, tmp_path: Path) -> None:
    services = make_services()
    services.up(["redis"])
    records = read_state(tmp_path / "home")
    services.down()
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stale = {**records["redis"].__dict__, "pid": bystander.pid}
        write_state(tmp_path / "home", {"redis": type(records["redis"])(**stale)})

        assert by_name(services)["redis"].state == "stopped"
        assert services.down() == []
        assert bystander.poll() is None

        write_state(tmp_path / "home", {"redis": type(records["redis"])(**stale)})
        assert client(services.up(["redis"]).redis).ping()
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")


def test_a_service_left_by_a_command_that_died_while_starting_is_taken_over(
    make_services: MakeServices, tmp_path: Path
) -> None:
    services = make_services()
    addresses = services.up(["redis"])
    content = json.loads(state_path(tmp_path / "home").read_text(encoding="utf-8"))
    content["services"]["redis"].update(is_ready=False, version="")
    state_path(tmp_path / "home").write_text(json.dumps(content), encoding="utf-8")
    assert services.addresses().redis is None

    assert make_services().up(["redis"]) == addresses

    assert services.addresses() == addresses
    assert by_name(services)["redis"].version.startswith("Valkey ")


def test_an_interrupted_up_ends_what_it_started(
    make_services: MakeServices, processes_of: FindProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_spawned = threading.Event()
    told: list[str] = []
    services = make_services(notify=told.append)
    services.up(["redis"])
    services.kill("redis")

    def never_healthy(address: str, *, timeout_s: float) -> str:
        is_spawned.set()
        msg = "not yet"
        raise ServiceError(msg)

    monkeypatch.setattr(services._services["redis"], "check", never_healthy)
    interrupter = threading.Thread(target=lambda: is_spawned.wait(30) and os.kill(os.getpid(), signal.SIGINT))
    interrupter.start()

    with pytest.raises(KeyboardInterrupt):
        services.up(["redis"])

    interrupter.join()
    assert processes_of() == []
    assert told == ["Interrupted: ending Redis, which was starting."]


def test_what_was_up_already_when_another_fails_is_said_to_be_ended(
    make_services: MakeServices, processes_of: FindProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    is_up = threading.Event()
    services = make_services(notify=told.append)

    def fails(_: object) -> None:
        is_up.wait(30)
        msg = "no Triton here"
        raise ServiceError(msg)

    monkeypatch.setattr(services._services["triton"], "prepare", fails)
    with pytest.raises(ServiceError, match="no Triton here"):
        services.up(["redis", "triton"], on_ready=lambda _: is_up.set())
    assert processes_of() == []
    assert told == ["Ending redis, which this had started."]


def test_a_service_that_never_becomes_healthy_is_ended_and_said_so(
    make_services: MakeServices, processes_of: FindProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_module.ValkeyService, "start_timeout_s", 0.2)
    services = make_services()

    def never_healthy(address: str, *, timeout_s: float) -> str:
        msg = "it is busy loading"
        raise ServiceError(msg)

    monkeypatch.setattr(services._services["redis"], "check", never_healthy)

    with pytest.raises(ServiceError, match=r"Redis is not healthy 0 s after its start \(it is busy loading\). From "):
        services.up(["redis"])
    assert processes_of() == []


def test_given_services_are_asked_before_any_other_is_started(make_services: MakeServices, tmp_path: Path) -> None:
    services = make_services(given=ServiceAddresses(kafka="127.0.0.1:1"))

    with pytest.raises(ServiceError, match=r"HEADRACE_KAFKA\), but is not healthy: .*[^.]\. Start it, or correct"):
        services.up(["redis", "kafka"])

    assert not (tmp_path / "home" / "logs" / "redis.log").exists()


def test_nothing_is_started_once_it_is_cancelled(make_services: MakeServices, tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()

    with pytest.raises(ServiceError, match="Redis was interrupted while starting"):
        make_services().up(["redis"], cancelled=cancelled)

    assert not (tmp_path / "home" / "logs" / "redis.log").exists()


def test_a_run_ends_the_services_that_it_started_and_no_others(make_services: MakeServices) -> None:
    told: list[str] = []
    earlier, run, later = make_services(), make_services(notify=told.append), make_services()
    earlier.up(["redis"])

    with run.guarded(only_started=True):
        run.up(["redis"])
        run.kill("redis")
        assert list(run.ended(["redis"])) == ["redis"]
        run.start("redis")  # it stays the service of whoever had started it
        assert run.ended(["redis"]) == {}
    assert earlier.status(["redis"])[0].is_healthy
    assert told == []

    earlier.down()
    with run.guarded(only_started=True):
        run.up(["redis"])
        assert later.up(["redis"]).redis
    assert later.status(["redis"])[0].state == "stopped"
    assert told == ["Ending redis."]
    assert later.ended(["redis"]) == {"redis": None}


@pytest.mark.timeout(60)
def test_a_killed_run_leaves_the_services_running_that_it_did_not_start(
    make_services: MakeServices, tmp_path: Path
) -> None:
    services = make_services()
    services.up(["redis"])
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER.format("only_started=True"), str(tmp_path / "home")], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    owner.stdout.readline()
    home = str(tmp_path / "home")
    guards = [
        p for p in psutil.process_iter(["cmdline"]) if {home, "infra.local.guard"} <= set(p.info["cmdline"] or [])
    ]

    owner.kill()
    owner.communicate()

    own = [p for p in guards if len(p.info["cmdline"]) > 4]
    assert own
    psutil.wait_procs(own, timeout=30)
    assert services.status(["redis"])[0].is_healthy


@pytest.mark.timeout(60)
def test_without_a_model_repository_triton_starts_without_models_and_makes_none(
    make_services: MakeServices, tmp_path: Path
) -> None:
    services = make_services(model_repository=tmp_path / "models", use_triton_fallback=True)
    services.up(["triton"])
    assert not (tmp_path / "models").exists()
    assert services.status(["triton"])[0].is_healthy

    (tmp_path / "models").mkdir()
    ready: list[ServiceStatus] = []
    services.up(["triton"], on_ready=ready.append)
    assert ready[0].took_ms is not None  # started anew, now that there is one


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which", ["", "only_started=True"])
def test_services_do_not_outlive_a_killed_owner(tmp_path: Path, which: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER.format(which), str(tmp_path / "home")],
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    service = psutil.Process(pid)

    owner.kill()
    owner.communicate()

    psutil.wait_procs([service], timeout=30)
    assert not service.is_running()
    guards = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    psutil.wait_procs(guards, timeout=30)
    assert not state_path(tmp_path / "home").exists()


_OWNER = """
import os, pathlib, sys, threading
from infra.local.services import LocalServices
home = pathlib.Path(sys.argv[1])
services = LocalServices(home, environment=os.environ, model_repository=home, cache=home, has_standard_ports=False)
with services.guarded({}):
    services.up(["redis"])
    print(services.process_ids("redis")[0], flush=True)
    threading.Event().wait()
"""
