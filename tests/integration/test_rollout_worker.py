"""Scoring workers that follow a rollout, on a real Kafka, Valkey and Triton: told by what is on the topic of scores."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.process import exit_code, wait_until
from jobs.scoring import version_card
from jobs.settings import Settings
from schemas.errors import ConfigError
from schemas.model import ServedVersion
from streams.inference.rollout import Stage, belongs_to_candidate
from tests.support.kafka import TIMEOUT_S
from tests.support.model_versions import FAILING, GOOD, SHIFTED, SIMILAR, SLOW, probability, write_model_version
from tests.support.scoring_bench import ScoringBench

NAMES = iter(f"followed_{number}" for number in range(100))
DISTANCES = [float(distance) for distance in range(100, 700, 3)]


@pytest.fixture
def bench(kafka: str, redis_url: str, triton: str, model_repository: Path, tmp_path: Path) -> Iterator[ScoringBench]:
    made = ScoringBench(
        name=next(NAMES),
        directory=tmp_path,
        kafka=kafka,
        redis=redis_url,
        triton=triton,
        repository=model_repository,
    )
    yield made
    made.close()


def test_the_first_worker_begins_with_the_newest_version_and_the_next_ones_with_the_champion(
    bench: ScoringBench,
) -> None:
    write_model_version(bench.repository, bench.spec, 1, SHIFTED)
    champion = write_model_version(bench.repository, bench.spec, 2, GOOD)
    bench.start("a", "b")
    bench.send(DISTANCES)
    bench.drain()
    bench.stop("a", "b")
    write_model_version(bench.repository, bench.spec, 3, SHIFTED)
    shown = bench.models("status")
    assert (shown["generation"], shown["stage"], shown["champion"]) == (1, "stable", "2")
    bench.start("a")
    bench.send(DISTANCES)
    bench.drain()
    scores = bench.scores()
    assert {(score["model_version"], score["model_sha256"]) for score in scores} == {("2", champion.sha256)}
    assert {(score["arm"], score["served_by"]) for score in scores} == {("champion", "model")}
    assert [score["probability"] for score in scores] == pytest.approx([probability(d) for d in DISTANCES * 2])


def test_a_worker_without_the_champion_is_told_and_scores_nothing(bench: ScoringBench) -> None:
    first = write_model_version(bench.repository, bench.spec, 1, GOOD)
    with bench.rollout() as log:
        log.begin(lambda: ServedVersion(version="1", sha256="ab" * 32), now_us=1)
    bench.start("a")
    worker = bench.workers["a"]
    assert wait_until(lambda: not worker.is_alive(), timeout_s=TIMEOUT_S)
    assert exit_code(worker.pid) == 2
    told = " ".join(bench.log().split())
    assert f"has version 1 of model {bench.name} (SHA-256 {'ab' * 32}), expected that file in" in told
    assert f"which has one with SHA-256 {first.sha256}; get it from the model store" in told
    settings = Settings.from_environment({**os.environ, **bench.environment})
    with pytest.raises(ConfigError, match=r"has version 7 of model .*, expected it in .*, which holds versions \[1\];"):
        version_card(bench.spec, settings, ServedVersion(version="7", sha256="ab" * 32))


def trial(*, share: float = 0.5, **limits: str) -> list[str]:
    """Options of a canary whose steps end as soon as there are enough rows."""
    wanted = {"share": str(share), "window": "1ms", "min-rows": "50", "max-slowdown": "1000"} | limits
    return [part for name, value in wanted.items() for part in (f"--{name.replace('_', '-')}", value)]


def test_a_canary_scores_its_share_always_the_same_entities_and_by_whichever_worker(bench: ScoringBench) -> None:
    champion = write_model_version(bench.repository, bench.spec, 1, GOOD)
    bench.start("a", "b")
    bench.send(DISTANCES)
    bench.drain()
    candidate = write_model_version(bench.repository, bench.spec, 2, SIMILAR)
    bench.models("load", "2")
    begun = bench.models("canary", "2", *trial(share=0.3, window="1h"), "--hold")
    bench.until_followed(begun["generation"])
    entities = [f"e{number}" for number in range(len(DISTANCES))]
    for _ in range(3):
        bench.send(DISTANCES, entities=entities)
    bench.send(DISTANCES[::-1], entities=entities[::-1])
    bench.drain()
    before, *rounds = (bench.scores()[start : start + len(DISTANCES)] for start in range(0, bench.sent, len(DISTANCES)))
    assert {(score["arm"], score["model_version"]) for score in before} == {("champion", "1")}
    is_canary = belongs_to_candidate(bench.entry().state, entities)
    assert 0.15 < is_canary.mean() < 0.45
    shas = {"1": champion.sha256, "2": candidate.sha256}
    for scored in rounds:
        for score in scored:
            belongs = is_canary[int(score["entity"][1:])]
            assert (score["arm"], score["model_version"]) == (("canary", "2") if belongs else ("champion", "1"))
            assert score["model_sha256"] == shas[score["model_version"]]
            assert score["served_by"] == "model"
    bench.until(lambda: bench.seen("2") == 4 * int(is_canary.sum()), "both workers have told what they have seen")
    assert bench.seen("1") == 4 * int((~is_canary).sum())


@pytest.mark.parametrize(
    ("kind", "limits", "why"),
    [
        (FAILING, {}, r"rolled back: \d+\.\d+% of its rows failed, 0.00% of the champion's"),
        (SHIFTED, {}, "rolled back: its scores are distributed otherwise than the champion's, PSI"),
        (
            SLOW,
            {"max_slowdown": "1.5"},
            r"rolled back: its p99 is \d+\.\d ms in requests of up to \d+ rows, the champion's",
        ),
    ],
    ids=["failing", "shifted", "slow"],
)
@pytest.mark.parametrize("command", ["canary", "shadow"])
def test_a_bad_version_is_rolled_back_by_itself_and_costs_no_score(
    bench: ScoringBench, command: str, kind: dict[str, float], limits: dict[str, str], why: str
) -> None:
    write_model_version(bench.repository, bench.spec, 1, GOOD)
    bench.start("a")
    bench.send(DISTANCES)
    bench.drain()
    write_model_version(bench.repository, bench.spec, 2, kind)
    bench.models("load", "2")
    options = trial(window="1h", **limits)
    with bench.under_load(DISTANCES[::10]):
        begun = bench.models(command, "2", *(options if command == "canary" else options[2:]))
        ended = bench.until_stage(Stage.STABLE, after=begun["generation"])
        bench.until_followed(ended.generation)
    bench.send(DISTANCES)
    bench.drain()
    assert ended.state.champion.version == "1"
    assert re.match(why, ended.state.reason), ended.state.reason
    scores = bench.scores()
    assert {score["model_version"] for score in scores[-len(DISTANCES) :]} == {"1"}
    assert {score["served_by"] for score in scores} == {"model"}, "the champion is there for what the candidate fails"
    tried = {score["model_version"] for score in scores if score["arm"] == "canary"}
    assert ("2" in tried) == (command == "canary"), "what a shadow answers is not published"


def test_a_good_version_becomes_champion_under_load_and_no_row_is_lost_doubled_or_left_to_the_ladder(
    bench: ScoringBench,
) -> None:
    write_model_version(bench.repository, bench.spec, 1, GOOD)
    bench.start("a", "b")
    bench.send(DISTANCES)
    bench.drain()
    with bench.under_load(DISTANCES[::10]):
        write_model_version(bench.repository, bench.spec, 2, SIMILAR)
        bench.models("load", "2")
        begun = bench.models("canary", "2", *trial(share=0.2, window="1s"), "--share", "0.6")
        ended = bench.until_stage(Stage.STABLE, after=begun["generation"])
        bench.until_followed(ended.generation)
        # The other way, by hand.
        begun = bench.models("canary", "1", *trial(share=0.5, window="1h"))
        bench.until(lambda: bench.seen("1") > 50, "the canary is under way")
        bench.models("promote")
        back = bench.models("rollback")
        bench.until_followed(back["generation"])
    bench.send(DISTANCES)
    bench.drain()
    assert bench.reasons()[1 : ended.generation] == [
        "canary asked for",
        "canary goes on to 0.6",
        "promoted: no step of the canary showed a fault",
        "watched to the end",
    ]
    assert ended.state.champion.version == back["champion"] == "2"
    scores = bench.scores()
    assert {score["served_by"] for score in scores} == {"model"}
    assert {score["model_version"] for score in scores[: len(DISTANCES)]} == {"1"}
    assert {score["model_version"] for score in scores[-len(DISTANCES) :]} == {"2"}
    assert {(score["arm"], score["model_version"]) for score in scores} == {
        (arm, version) for arm in ("champion", "canary") for version in ("1", "2")
    }


def test_a_killed_worker_goes_on_where_the_rollout_stands(bench: ScoringBench) -> None:
    write_model_version(bench.repository, bench.spec, 1, GOOD)
    bench.start("a")
    bench.send(DISTANCES)
    bench.drain()
    write_model_version(bench.repository, bench.spec, 2, SIMILAR)
    bench.models("load", "2")
    begun = bench.models("canary", "2", *trial(window="1h"))
    bench.until_followed(begun["generation"])
    entities = [f"e{number}" for number in range(len(DISTANCES))]
    bench.send(DISTANCES, entities=entities)
    bench.drain()
    is_canary = belongs_to_candidate(bench.entry().state, entities)
    bench.until(lambda: bench.seen("2") == is_canary.sum(), "what was seen is posted")
    bench.kill("a")
    bench.start("a")
    bench.send(DISTANCES, entities=entities)
    bench.drain()
    bench.until(lambda: bench.seen("2") == 2 * is_canary.sum(), "it counts on from what it had posted")
    bench.send(DISTANCES * 20, entities=entities * 20)
    bench.kill("a")
    bench.start("a")
    bench.drain()
    assert bench.entry().generation == begun["generation"]
    for number, score in enumerate(bench.scores()[len(DISTANCES) :]):
        belongs = is_canary[number % len(DISTANCES)]
        assert (score["arm"], score["model_version"]) == (("canary", "2") if belongs else ("champion", "1"))
        assert score["served_by"] == "model"
