from pathlib import Path

import pytest

from infra.local.service import ServiceAddresses
from infra.local.state import ServiceRecord, write_state
from jobs.role import Role
from jobs.settings import Settings
from schemas.errors import ConfigError


def test_an_empty_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    settings = Settings.from_environment({})

    assert settings.home == tmp_path / ".headrace"
    assert settings.given_addresses() == ServiceAddresses()
    assert settings.delta == str(tmp_path / ".headrace" / "delta")
    assert settings.lineage == tmp_path / ".headrace" / "lineage" / "events.ndjson"
    assert settings.model_repository == tmp_path / "model_repository"
    assert settings.metrics_port == 9101
    assert settings.kafka_jvm_flags == ()
    assert not settings.use_triton_fallback
    assert (settings.delivery, settings.stall_timeout_s) == ("exactly_once", 60)
    assert settings.probe_every_s == 5


def test_the_stores_follow_the_home_directory() -> None:
    settings = Settings.from_environment({"HEADRACE_HOME": "/data/headrace"})

    assert settings.delta == "/data/headrace/delta"
    assert settings.lineage == Path("/data/headrace/lineage/events.ndjson")


def test_every_variable_is_read() -> None:
    settings = Settings.from_environment(
        {
            "HEADRACE_HOME": "/h",
            "HEADRACE_KAFKA": "a:9092,b:9093",
            "HEADRACE_REDIS": "rediss://:secret@cache:6380/3",
            "HEADRACE_TRITON": "[::1]:8001",
            "HEADRACE_TRITON_FALLBACK": "yes",
            "HEADRACE_MODEL_REPOSITORY": "/models",
            "HEADRACE_DELTA": "s3://bucket/delta",
            "HEADRACE_DELTA_OPTIONS": '{"AWS_SECRET_ACCESS_KEY": "hidden"}',
            "HEADRACE_LINEAGE": "/l/events.ndjson",
            "HEADRACE_METRICS_PORT": "0",
            "HEADRACE_KAFKA_JVM_FLAGS": "-Xmx1g  -XX:+UseParallelGC",
            "HEADRACE_CACHE": "/c",
            "HEADRACE_DELIVERY": "at_least_once",
            "HEADRACE_STALL_TIMEOUT": "1m30s",
            "HEADRACE_PROBE_EVERY": "20s",
            "HEADRACE_EVENT_RATE": "500",
            "HEADRACE_OPEN_EVENTS": "1",
        }
    )

    assert (settings.delivery, settings.stall_timeout_s) == ("at_least_once", 90)
    assert settings.probe_every_s == 20
    assert (settings.event_rate, settings.is_open_to_events) == (500, True)
    assert settings.home == Path("/h")
    assert settings.given_addresses() == ServiceAddresses(
        "a:9092,b:9093", "rediss://:secret@cache:6380/3", "[::1]:8001"
    )
    assert settings.use_triton_fallback
    assert settings.model_repository == Path("/models")
    assert settings.delta == "s3://bucket/delta"
    assert settings.delta_options == {"AWS_SECRET_ACCESS_KEY": "hidden"}
    assert "hidden" not in repr(settings)
    assert settings.lineage == Path("/l/events.ndjson")
    assert settings.metrics_port == 0
    assert settings.kafka_jvm_flags == ("-Xmx1g", "-XX:+UseParallelGC")
    assert settings.cache == Path("/c")


def test_the_cache_follows_the_users_cache_directory() -> None:
    assert Settings.from_environment({"XDG_CACHE_HOME": "/xdg"}).cache == Path("/xdg/headrace")
    assert Settings.from_environment({}).cache == Path("~/.cache/headrace").expanduser()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HEADRACE_KAFKA", "localhost", "host:port, several with commas between"),
        ("HEADRACE_KAFKA", "a:9092,,b:9092", "host:port, several with commas between"),
        ("HEADRACE_KAFKA", "a:9092,b", "host:port, several with commas between"),
        ("HEADRACE_TRITON", "http://triton:8000", "host:port"),
        ("HEADRACE_TRITON_FALLBACK", "maybe", "0 or 1"),
        ("HEADRACE_HTTP_PORT", "65536", "port from 1 to 65535, or 0"),
        ("HEADRACE_EVENT_RATE", "0", "events a second from 1 to 1000000"),
        ("HEADRACE_EVENT_RATE", "1000001", "events a second from 1 to 1000000"),
        ("HEADRACE_OPEN_EVENTS", "maybe", "0 or 1"),
        ("HEADRACE_METRICS_PORT", "70000", "port from 1 to 65531, or 0"),
        ("HEADRACE_METRICS_PORT", "65532", "port from 1 to 65531, or 0"),
        ("HEADRACE_METRICS_PORT", "-1", "port from 1 to 65531, or 0"),
        ("HEADRACE_DELIVERY", "at_most_once", "exactly_once or at_least_once"),
        ("HEADRACE_STALL_TIMEOUT", "60", "duration of 1s or more, such as 60s"),
        ("HEADRACE_PROBE_EVERY", "0s", "duration of 1s or more, such as 5s"),
        ("HEADRACE_STALL_TIMEOUT", "10ms", "duration of 1s or more, such as 60s"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_variable_value_and_remedy(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({name: value})

    message = str(caught.value)
    assert message.startswith(f"{name} is {value!r}, expected {expected}; correct or unset it")


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_KAFAK is set, expected one of HEADRACE_HOME, HEADRACE_KAFKA"):
        Settings.from_environment({"HEADRACE_KAFAK": "a:9092", "PATH": "/bin"})


def test_the_table_lists_every_variable_with_what_it_is_for() -> None:
    table = Settings.table()

    assert [variable.name for variable in table][:4] == [
        "HEADRACE_HOME",
        "HEADRACE_KAFKA",
        "HEADRACE_REDIS",
        "HEADRACE_TRITON",
    ]
    assert all(variable.kind and variable.doc.endswith(".") for variable in table)


def test_a_service_that_is_nowhere_is_an_error_that_says_how_to_get_one(tmp_path: Path) -> None:
    settings = Settings.from_environment({"HEADRACE_HOME": str(tmp_path)})

    assert settings.addresses() == ServiceAddresses()
    with pytest.raises(ConfigError, match=r"There is no kafka: HEADRACE_KAFKA is not set.*Run `headrace services up`"):
        settings.address("kafka")


def test_an_address_of_the_environment_goes_before_the_local_service(tmp_path: Path) -> None:
    settings = Settings.from_environment({"HEADRACE_HOME": str(tmp_path), "HEADRACE_KAFKA": "broker:9092"})

    assert settings.address("kafka") == "broker:9092"


def test_a_local_service_that_has_ended_has_no_address(tmp_path: Path) -> None:
    record = ServiceRecord(2**22, 1.0, "127.0.0.1:9092", {"broker": 9092}, "Apache Kafka", "/log", is_ready=True)
    write_state(tmp_path, {"kafka": record})

    assert Settings.from_environment({"HEADRACE_HOME": str(tmp_path)}).addresses().kafka is None


def test_a_cluster_may_be_given() -> None:
    url = "redis+cluster://:secret@a:6379"
    assert Settings.from_environment({"HEADRACE_REDIS": url}).address("redis") == url


@pytest.mark.parametrize(("first", "expected"), [("9500", [9500, 9501, 9502, 9503, 9504]), ("0", [0] * 5)])
def test_the_roles_have_ports_side_by_side_or_any_free_ones(first: str, expected: list[int]) -> None:
    settings = Settings.from_environment({"HEADRACE_METRICS_PORT": first})
    assert [settings.role_metrics_port(role) for role in Role] == expected


@pytest.mark.parametrize("url", ["localhost:6379", "redis://", "redis://:secret@cache:6379/abc"])
def test_a_wrong_address_of_redis_is_named_without_its_login(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^HEADRACE_REDIS: Redis address of .* expected one") as caught:
        Settings.from_environment({"HEADRACE_REDIS": url})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://cache",
        "redis://cache:6379/",
        "redis://cache:6379/15",
        "redis+cluster://a:1",
        "redis+sentinel://a,b/m/0",
    ],
)
def test_redis_is_a_server_with_or_without_the_number_of_a_database(url: str) -> None:
    assert Settings.from_environment({"HEADRACE_REDIS": url}).redis == url


def test_an_offline_store_is_a_directory_that_can_be_written_to_or_a_url(tmp_path: Path) -> None:
    Settings.from_environment({"HEADRACE_DELTA": str(tmp_path / "new")}).check_delta()
    Settings.from_environment({"HEADRACE_DELTA": f"file://{tmp_path}/new"}).check_delta()
    Settings.from_environment({"HEADRACE_DELTA": "s3://bucket/delta"}).check_delta()
    (tmp_path / "file").touch()
    for wrong in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"HEADRACE_DELTA is .* cannot be written to .*; correct it, or unset it"):
            Settings.from_environment({"HEADRACE_DELTA": str(tmp_path / wrong)}).check_delta()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"AWS_SECRET_ACCESS_KEY": 12345}', "AWS_SECRET_ACCESS_KEY=12345"])
def test_wrong_options_of_the_object_store_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_DELTA_OPTIONS is not a JSON object of texts") as caught:
        Settings.from_environment({"HEADRACE_DELTA_OPTIONS": text})
    assert "12345" not in str(caught.value)
