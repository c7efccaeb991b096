"""What of the container files can be held to the code without a Docker engine."""

import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import infra
from infra.docker.select_requirements import select_requirements
from jobs.role import Role
from jobs.settings import Settings

ROOT = Path(infra.__path__[0]).parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = DOCKERFILE.split("\nFROM ")[1:]
ROLES = [str(role) for role in Role]
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "ports", "profiles"),
    *("restart", "security_opt", "shm_size", "stop_grace_period", "volumes"),
}


def lines_of(instruction: str, text: str = DOCKERFILE) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", text)
    return re.findall(rf"^{instruction} (.*)$", joined, flags=re.MULTILINE)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


class TestCompose:
    def test_it_runs_the_whole_stack(self) -> None:
        assert set(SERVICES) == {"kafka", "redis", "triton", *ROLES, "tools", "prometheus", "grafana"}

    def test_services_use_keys_of_the_specification(self) -> None:
        assert set(COMPOSE) - {"x-role", "x-health"} == {"name", "services", "volumes"}
        for service in SERVICES.values():
            assert set(service) <= SERVICE_KEYS

    def test_the_engines_own_check_agrees_where_there_is_one(self) -> None:
        docker = shutil.which("docker")
        if docker is None or run(docker, "compose", "version").returncode:
            return  # a Docker without the plugin, or none: the other tests here must do
        checked = run(docker, "compose", "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet")
        assert checked.returncode == 0, checked.stderr

    @pytest.mark.parametrize("name", SERVICES)
    def test_images_are_pinned(self, name: str) -> None:
        image, _, tag = SERVICES[name]["image"].rpartition(":")
        assert image
        assert re.search(r"\d+\.\d+", tag)

    def test_kafka_is_of_the_series_that_the_local_one_is(self) -> None:
        assert SERVICES["kafka"]["image"].startswith("apache/kafka:4.")

    def test_everything_listens_on_the_loopback_address_of_the_host(self) -> None:
        ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
        assert len(ports) == 8
        assert all(port.startswith("127.0.0.1:") for port in ports)
        published = [port.split(":")[1] for port in ports]
        assert len(published) == len(set(published))

    def test_mounts_are_of_files_there_are_and_of_declared_volumes(self) -> None:
        used = set()
        for service in SERVICES.values():
            for volume in service.get("volumes", []):
                source, target, *options = volume.split(":")
                assert target.startswith("/")
                assert set(options) <= {"ro"}
                if source.startswith("./"):
                    # model_repository/ is written by `headrace train`, and made by Docker before that.
                    assert (ROOT / source).exists() or source == "./model_repository"
                else:
                    used.add(source)
        assert used == set(COMPOSE["volumes"])

    @pytest.mark.parametrize("name", [name for name in SERVICES if name != "tools"])
    def test_long_running_services_are_health_checked_and_restarted(self, name: str) -> None:
        check = SERVICES[name]["healthcheck"]
        assert check["test"][0] == "CMD"
        assert {"interval", "timeout", "retries", "start_period"} <= set(check)
        assert SERVICES[name]["restart"] == "unless-stopped"

    def test_services_wait_for_healthy_ones_without_a_circle(self) -> None:
        waits = {name: set(service.get("depends_on", {})) for name, service in SERVICES.items()}
        for name, service in SERVICES.items():
            assert waits[name] <= set(SERVICES)
            assert all(on == {"condition": "service_healthy"} for on in service.get("depends_on", {}).values())
        started: set[str] = set()
        while started != set(SERVICES):
            ready = {name for name in SERVICES if name not in started and waits[name] <= started}
            assert ready, f"a circle among {set(SERVICES) - started}"
            started |= ready

    def test_values_of_environment_variables_are_text(self) -> None:
        for service in SERVICES.values():
            assert all(isinstance(value, str) for value in service.get("environment", {}).values())

    @pytest.mark.parametrize("role", ROLES)
    def test_each_role_is_a_worker_of_its_role(self, role: str) -> None:
        assert SERVICES[role]["command"] == ["worker", "--role", role]

    @pytest.mark.parametrize("role", ROLES)
    def test_roles_are_checked_and_scraped_where_they_serve_their_metrics(self, role: str) -> None:
        settings = Settings.from_environment(SERVICES[role]["environment"])
        port = settings.metrics_port + ROLES.index(role)
        assert settings.metrics_address == "0.0.0.0"  # noqa: S104  # in a container, to be scraped
        assert f"http://127.0.0.1:{port}/readyz" in SERVICES[role]["healthcheck"]["test"][-1]
        targets = yaml.safe_load((ROOT / "infra/prometheus/targets.compose.yml").read_text())
        assert {"targets": [f"{role}:{port}"], "labels": {"role": role}} in targets
        assert str(port) in lines_of("EXPOSE")[0].split()

    @pytest.mark.parametrize("role", [*ROLES, "tools"])
    def test_settings_are_accepted_and_lead_to_the_services(self, role: str) -> None:
        settings = Settings.from_environment(SERVICES[role]["environment"])
        assert settings.kafka == "kafka:9092"
        assert settings.redis == "redis://redis:6379/0"
        assert settings.triton == "triton:8001"
        mounts = {volume.split(":")[1] for volume in SERVICES[role]["volumes"]}
        assert str(settings.model_repository) in mounts
        assert all(str(place).startswith("/data/") for place in (settings.delta, settings.lineage))
        assert "/data" in mounts

    def test_the_api_is_published_where_it_listens(self) -> None:
        settings = Settings.from_environment(SERVICES["serve"]["environment"])
        assert settings.http_address == "0.0.0.0"  # noqa: S104  # in a container, to be reached
        assert SERVICES["serve"]["ports"] == [f"127.0.0.1:{settings.http_port}:{settings.http_port}"]
        assert str(settings.http_port) in lines_of("EXPOSE")[0].split()

    def test_kafka_advertises_what_clients_are_told(self) -> None:
        environment = SERVICES["kafka"]["environment"]
        listeners = dict(item.split("://") for item in environment["KAFKA_LISTENERS"].split(","))
        advertised = dict(item.split("://") for item in environment["KAFKA_ADVERTISED_LISTENERS"].split(","))
        protocols = dict(item.split(":") for item in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
        assert set(listeners) == set(protocols)
        assert advertised == {"PLAINTEXT": "kafka:9092", "HOST": "localhost:19092"}
        assert all(advertised[name].endswith(listeners[name]) for name in advertised)
        assert SERVICES["kafka"]["ports"] == ["127.0.0.1:19092:19092"]
        assert environment["KAFKA_CONTROLLER_QUORUM_VOTERS"].endswith(listeners["CONTROLLER"])
        assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"

    def test_roles_may_do_no_more_than_they_must(self) -> None:
        for role in ROLES:
            assert SERVICES[role]["cap_drop"] == ["ALL"]
            assert SERVICES[role]["security_opt"] == ["no-new-privileges:true"]


class TestDockerfile:
    def test_what_builds_is_not_in_the_image(self) -> None:
        assert len(STAGES) == 2
        assert STAGES[0].splitlines()[0].endswith(" AS build")
        assert lines_of("COPY", STAGES[1]) == ["--from=build /opt/headrace /opt/headrace"]
        assert "pip install" not in STAGES[1]

    def test_it_runs_as_a_user_without_rights(self) -> None:
        (user,) = lines_of("USER")
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)

    def test_the_base_image_is_pinned_to_a_python_the_project_supports(self) -> None:
        (image,) = [line for line in lines_of("ARG") if line.startswith("PYTHON_IMAGE=")]
        match = re.fullmatch(r"PYTHON_IMAGE=python:3\.(\d+)\.\d+-slim-bookworm", image)
        assert match is not None
        assert 11 <= int(match[1]) <= 13

    def test_dependencies_are_installed_by_hash_from_the_lock(self) -> None:
        run = " ".join(lines_of("RUN", STAGES[0]))
        assert "select_requirements.py requirements.lock" in run
        assert "--require-hashes --no-deps --requirement image.lock" in run

    def test_what_is_copied_is_there_and_in_the_build_context(self) -> None:
        rules = [
            line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
        ]
        sources = [source for line in lines_of("COPY", STAGES[0]) for source in line.split()[:-1]]
        assert len(sources) == 10
        for source in sources:
            assert (ROOT / source).exists()
            assert is_in_context(source, rules)
        for unwanted in (".git", ".venv", ".headrace", "tests", "model_repository", "jobs/__pycache__"):
            assert not is_in_context(unwanted, rules)


def is_in_context(path: str, rules: list[str]) -> bool:
    """Tell whether the rules of a .dockerignore, of which the last that fits decides, leave a path in."""
    is_in = True
    parts = path.split("/")
    prefixes = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for rule in rules:
        pattern = rule.removeprefix("!")
        names = prefixes if not pattern.startswith("**/") else [prefix.rpartition("/")[2] for prefix in prefixes]
        if any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
            is_in = rule.startswith("!")
    return is_in


class TestSelectRequirements:
    LOCK = (
        "a==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:ab\n"
        "b-c==2 ; python_version < '3.12' \\\n    --hash=sha256:bb\n"
    )

    def test_entries_keep_version_marker_and_hashes(self) -> None:
        picked = select_requirements(self.LOCK, ["# a comment", "", "B_C==2"])
        assert picked == "b-c==2 ; python_version < '3.12' \\\n    --hash=sha256:bb\n"

    def test_entries_come_in_the_order_of_the_lock(self) -> None:
        assert select_requirements(self.LOCK, ["b.c==2", "a[extra]==1"]) == self.LOCK

    def test_both_entries_of_a_package_with_two_markers_are_kept(self) -> None:
        lock = "a==1 ; python_version < '3.12'\na==2 ; python_version >= '3.12'\n"
        assert select_requirements(lock, ["a==1"]) == lock

    def test_what_is_not_in_the_lock_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="the lock has no d, e, expected every package"):
            select_requirements(self.LOCK, ["e==1", "d==1", "a==1"])

    def test_every_dependency_of_the_project_is_in_its_lock(self) -> None:
        names = ["aiokafka", "confluent-kafka", "deltalake", "faust-streaming", "polars", "pyarrow", "redis"]
        picked = select_requirements((ROOT / "requirements.lock").read_text(), names)
        assert picked.count("--hash=sha256:") >= len(names)
