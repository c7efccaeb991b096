"""``headrace models load|compare|shadow|canary|promote|rollback|status`` on a real Kafka and a real Triton."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from typer.testing import CliRunner

from jobs.models_command import app
from jobs.topics import ensure_topics, plan_topics
from offline.card import load_card, loaded_versions, request_shape
from schemas.errors import ConfigError, HeadraceError, ServiceError
from schemas.model import ModelSpec, ServedVersion
from schemas.request_shape import RequestShape
from streams.inference.rollout import Limits, Rollout, start_canary
from streams.inference.rollout_log import Entry, RolloutLog, View
from streams.inference.tally import Tally
from streams.inference.triton import TritonModel
from tests.support.model_versions import GOOD, SHIFTED, write_model_version
from tests.support.scoring import VIEWS, make_spec

NAMES = iter(f"commanded_{number}" for number in range(100))
OTHER = ServedVersion(version="7", sha256="ab" * 32)


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A model with versions 1 and 2, of which the first is the champion.

    Attributes:
        spec: The model.
        repository: The server's repository.
        kafka: Bootstrap servers.
    """

    spec: ModelSpec
    repository: Path
    kafka: str

    def run(self, *arguments: str) -> dict[str, Any]:
        command, *rest = arguments
        result = CliRunner().invoke(app, [command, self.spec.name, *rest, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def log(self) -> RolloutLog:
        return RolloutLog(self.kafka, self.spec)


@pytest.fixture
def rig(kafka: str, triton: str, model_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    spec = make_spec(name=next(NAMES))
    module = tmp_path / "application.py"
    module.write_text(
        "from tests.support.scoring import VIEWS as BY_NAME, make_spec\n"
        f"VIEWS, MODELS = list(BY_NAME.values()), [make_spec(name={spec.name!r})]\n"
    )
    for name, value in {
        "HOME": tmp_path,
        "APP": module,
        "KAFKA": kafka,
        "TRITON": triton,
        "MODEL_REPOSITORY": model_repository,
    }.items():
        monkeypatch.setenv(f"HEADRACE_{name}", str(value))
    ensure_topics(kafka, plan_topics(list(VIEWS.values()), [spec]), partitions=1)
    champion = write_model_version(model_repository, spec, 1, GOOD)
    made = Rig(spec=spec, repository=model_repository, kafka=kafka)
    state = Rollout(model=spec.name, champion=champion.served_version)
    with made.log() as log:
        log.change(lambda _: Entry(generation=0, state=state))
    write_model_version(model_repository, spec, 2, SHIFTED)
    return made


def test_a_version_goes_from_its_file_to_champion_and_back(rig: Rig) -> None:
    loaded = rig.run("load", "2")
    assert (loaded["version"], loaded["loaded"]) == (2, [1, 2])
    compared = rig.run("compare", "2")
    assert compared["is_within"]
    assert compared["max_difference"]["probability"] < 1e-5

    assert rig.run("shadow", "2", "--window", "1m")["stage"] == "shadow"
    canary = rig.run("canary", "2", "--share", "0.1", "--share", "0.5", "--window", "2m", "--min-rows", "50")
    assert (canary["stage"], canary["share"], canary["shares"]) == ("canary", 0.1, [0.1, 0.5])
    assert (canary["window_us"], canary["min_rows"]) == (120_000_000, 50)
    promoted = rig.run("promote", "--reason", "we like it")
    assert (promoted["stage"], promoted["champion"], promoted["previous"]) == ("watch", "2", "1")
    assert rig.run("load", "2")["loaded"] == [1, 2], "the one before may be taken back"
    back = rig.run("rollback", "--reason", "we do not")
    assert (back["stage"], back["champion"], back["reason"]) == ("stable", "1", "rolled back: we do not")
    shown = rig.run("status")
    assert shown == {**back, "versions": shown["versions"]}
    assert shown["generation"] == 5


async def rows_asked_at_once(rig: Rig, triton: str) -> int:
    served = load_card(rig.repository, rig.spec.name, 2).served_version
    async with TritonModel(rig.spec, served, url=triton) as model:
        await model.attach()
        return model.max_batch_size


def test_requests_are_measured_on_what_is_loaded_and_answers_right(rig: Rig, triton: str) -> None:
    with pytest.raises(ConfigError, match=r"version 2 .* is not loaded, expected it loaded and warm; run `headrace"):
        rig.run("bench")
    rig.run("load", "2")
    measured = rig.run("bench", "--rounds", "1", "--write")
    pairs = {(pair["rows"], pair["in_flight"]) for pair in measured["pairs"]}
    assert (measured["version"], len(pairs)) == (2, 5 * 4)
    assert {(64, 1), (1_024, 8)} < pairs
    assert measured["chosen"] in measured["pairs"]
    chosen = RequestShape(rows=measured["chosen"]["rows"], in_flight=measured["chosen"]["in_flight"])
    assert request_shape(rig.repository, rig.spec.name) == chosen
    assert loaded_versions(rig.repository, rig.spec.name) == [1, 2]
    rig.run("load", "2")
    assert request_shape(rig.repository, rig.spec.name) == chosen, "what was measured stays"
    assert asyncio.run(rows_asked_at_once(rig, triton)) == chosen.rows


def test_what_no_rollout_uses_is_unloaded_and_stays_so(rig: Rig) -> None:
    for version in (3, 4):
        write_model_version(rig.repository, rig.spec, version, GOOD)
    assert loaded_versions(rig.repository, rig.spec.name) == [1, 2, 3, 4]
    assert rig.run("load", "4")["loaded"] == [1, 4]
    with pytest.raises(ConfigError, match=r"version 3 .* is not loaded, expected it loaded and warm; run `headrace"):
        rig.run("canary", "3")
    # A champion stays where it is, however many newer ones are trained.
    write_model_version(rig.repository, rig.spec, 5, GOOD)
    assert rig.run("load", "5")["loaded"] == [1, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "9"], r"has no version 9 in .*, expected one of \[1, 2\]; train it"),
        (["promote"], "has no candidate, expected one in shadow or canary; start one before"),
        (["rollback"], "is stable, expected a candidate or a champion that is watched"),
        (["canary", "2", "--share", "0.5", "--share", "0.1"], r"canary shares are \(0.5, 0.1\), expected rising ones"),
        (["canary", "1"], "version 1 to be neither champion nor second candidate"),
        (["shadow", "2", "--window", "0s"], "watch window is 0 us of at least 200 rows, expected 1 or more"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(rig: Rig, arguments: list[str], message: str) -> None:
    if arguments[0] in ("canary", "shadow"):
        rig.run("load", "2")
    with pytest.raises(ConfigError, match=message):
        rig.run(*arguments)
    with rig.log() as log:
        entry = log.read().entry
    assert entry is not None
    assert entry.generation == 1


def test_a_version_that_answers_otherwise_than_its_card_scores_nobody(rig: Rig) -> None:
    rig.run("load", "2")
    card = rig.repository / rig.spec.name / "2" / "model.yaml"
    card.write_text(card.read_text().replace("probability: 0.15", "probability: 0.19"))
    with pytest.raises(HeadraceError, match=r"answers the golden rows of its card off by \{'probability': 0.0[34]"):
        rig.run("canary", "2")
    assert rig.run("compare", "2", "--tolerance", "0.1")["is_within"]
    with rig.log() as log:
        assert log.read().entry is not None
    assert rig.run("status")["stage"] == "stable"


def test_a_model_that_no_worker_has_served_has_no_state(rig: Rig) -> None:
    producer = Producer({"bootstrap.servers": rig.kafka})
    producer.produce(rig.spec.rollout_topic, key=b"state", value=None, partition=0)
    assert producer.flush(30) == 0
    with pytest.raises(
        ConfigError, match=r"has no state on topic rollout\..*, expected a champion there; start a scoring worker"
    ):
        rig.run("promote")
    # Nobody knows which of them workers score with.
    assert rig.run("load", "2")["loaded"] == [1, 2]
    with pytest.raises(ConfigError, match=r"model 'other' is not served by .*, expected one of \["):
        CliRunner().invoke(app, ["status", "other"], catch_exceptions=False)


def test_a_topic_that_is_not_there_is_told(kafka: str) -> None:
    with (
        RolloutLog(kafka, make_spec(name="nowhere")) as log,
        pytest.raises(ServiceError, match=r"no topic rollout.nowhere at .* run `headrace topics apply`"),
    ):
        log.read()


def test_of_changes_at_once_each_sees_what_those_before_it_made(rig: Rig) -> None:
    def count(view: View) -> Entry:
        assert view.entry is not None
        state = view.entry.state
        return Entry(generation=0, state=replace(state, reason=str(int(state.reason or 0) + 1)))

    def change(_: int) -> None:
        RolloutLog(rig.kafka, rig.spec).change(count)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(change, range(16)))
    with rig.log() as log:
        entry = log.read().entry
    assert entry is not None
    assert (entry.state.reason, entry.generation) == ("16", 17), "none was made on what had changed meanwhile"


def test_a_change_whose_answer_is_lost_is_made_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([KafkaError(KafkaError.UNKNOWN)])

    class Forgetful(Producer):
        def commit_transaction(self, *arguments: float) -> None:
            super().commit_transaction(*arguments)
            for lost in answers:
                raise KafkaException(lost)

    monkeypatch.setattr("streams.inference.rollout_log.Producer", Forgetful)
    with rig.log() as log:
        made = log.change(lambda view: replace(view.entry, limits=Limits(max_failures=0.5)) if view.entry else None)
        assert made == log.read().entry
    assert made is not None
    assert (made.generation, made.limits.max_failures) == (2, 0.5)


def test_of_workers_that_begin_at_once_one_says_who_is_champion(kafka: str) -> None:
    spec = make_spec(name=next(NAMES))
    ensure_topics(kafka, plan_topics(list(VIEWS.values()), [spec]), partitions=1)

    def begin(number: int) -> Entry:
        with RolloutLog(kafka, spec) as log:
            return log.begin(lambda: replace(OTHER, version=str(number)), now_us=number)

    with ThreadPoolExecutor(4) as threads:
        entries = list(threads.map(begin, range(1, 5)))
    assert [entry.generation for entry in entries] == [1] * 4
    assert len({entry.state.champion for entry in entries}) == 1


def test_evidence_of_workers_adds_up_and_counts_for_its_own_step_alone(rig: Rig) -> None:
    first, second = Tally(rows=10, failures=1), Tally(rows=30)
    with rig.log() as one, rig.log() as two:
        one.post("a", generation=1, tallies={"1": first})
        two.post("b", generation=1, tallies={"1": second})
        two.post("c", generation=0, tallies={"1": second})
        one.close()
        two.close()
    with rig.log() as log:
        view = log.read()
        assert view.entry is not None
        champion = view.entry.state.champion
        assert (view.tally(champion).rows, view.tally(champion).failures) == (40, 1)
        state = start_canary(view.entry.state, OTHER, now_us=1)
        log.change(lambda _: Entry(generation=0, state=state))
        assert log.read().tally(champion).rows == 0
