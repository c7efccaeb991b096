"""The scoring role, put together: the versions of the rollout, the ladder below, and what they read."""

import time
from functools import partial

import faust
import numpy as np
from numpy.typing import NDArray

from jobs.application import Application
from jobs.settings import Settings
from offline.card import ModelCard, load_card
from offline.card import versions as versions_held
from schemas.errors import ConfigError
from schemas.model import ModelSpec, ServedVersion
from streams.agents.scoring import ScoringWorker
from streams.inference.calibrated import CalibratedModel
from streams.inference.follower import RolloutFollower
from streams.inference.guard import GuardedModel
from streams.inference.linear import LinearModel
from streams.inference.rollout_log import RolloutLog
from streams.inference.scorer import Scorer
from streams.inference.served_model import LightRung
from streams.inference.triton import TritonModel
from streams.inference.vector import VectorReader
from streams.inference.versions import OpenVersion, Versions
from streams.lineage.openlineage import LineageEmitter
from streams.observability.metrics import Metrics
from streams.ports import ModelServer
from streams.sinks.online import OnlineReader


def compose_scoring(
    model: ModelSpec,
    application: Application,
    settings: Settings,
    *,
    worker_id: str,
    metrics: Metrics,
    lineage: LineageEmitter,
) -> faust.App:
    """Put the scoring role together.

    Raises:
        ConfigError: The repository lacks the champion or has another file in its place, or a card is of another
            contract.
        ServiceError: The topic of the rollout cannot be read.
    """
    brokers, triton = settings.address("kafka"), settings.address("triton")
    with RolloutLog(brokers, model) as log:
        entry = log.begin(lambda: _newest(model, settings), now_us=time.time_ns() // 1_000)
        seen = log.view.seen_by(worker_id)

    def open_version(served: ServedVersion) -> OpenVersion:
        card = version_card(model, settings, served)
        server = TritonModel(model, served, url=triton, golden=card.golden_rows)
        name, timeout_s = f"{model.name} version {served.version}", model.rungs.timeout_us / 1e6
        told = {"model": model.name, "version": served.version}
        guard = GuardedModel(
            name,
            _calibrated(server, model, card),
            probe=_probe(card),
            timeout_s=timeout_s,
            probe_failed=partial(metrics.model_probe_failed, **told),
            healed=partial(metrics.model_healed, **told),
        )
        return OpenVersion(model=guard, connect=server.connect, close=server.close)

    versions = Versions(model, open_version=open_version, light=_light_model(model, settings, metrics))
    pseudonyms = settings.pseudonyms(application.views.values())
    reader = OnlineReader(settings.address("redis"), pseudonyms=pseudonyms)
    scorer = Scorer(
        versions.arms(entry, seen=seen), vectors=VectorReader(model, views=application.views, reader=reader)
    )
    follower = RolloutFollower(RolloutLog(brokers, model), scorer=scorer, versions=versions, worker=worker_id)
    return ScoringWorker(
        model,
        view=application.views[model.trigger.name],
        scorer=scorer,
        connect=follower.connect,
        follow=follower.run,
        watch=partial(versions.watch, settings.probe_every_s),
        application=application.name,
        brokers=brokers,
        worker_id=worker_id,
        metrics=metrics,
        lineage=lineage,
        delivery=settings.delivery,
    ).app


def version_card(model: ModelSpec, settings: Settings, wanted: ServedVersion) -> ModelCard:
    """Read the card of a version that the rollout names.

    Raises:
        ConfigError: The repository has no such version or another file under its number, or the card is of another
            contract.
    """
    repository, number = settings.model_repository, int(wanted.version)
    where = f"topic {model.rollout_topic} has version {number} of model {model.name} (SHA-256 {wanted.sha256})"
    remedy = (
        "get it from the model store (`headrace models fetch`) or from where it was trained; where it is gone for "
        f"good, stop the scoring workers and delete topic {model.rollout_topic}: the next one begins with the newest "
        "version"
    )
    if number not in (held := versions_held(repository, model.name)):
        msg = f"{where}, expected it in {repository}, which holds versions {held}; {remedy}"
        raise ConfigError(msg)
    card = load_card(repository, model.name, number)
    if card.served_version != wanted:
        msg = f"{where}, expected that file in {repository}, which has one with SHA-256 {card.sha256}; {remedy}"
        raise ConfigError(msg)
    card.check(model)
    return card


def _newest(model: ModelSpec, settings: Settings) -> ServedVersion:
    card = load_card(settings.model_repository, model.name)
    card.check(model)
    return card.served_version


def _light_model(model: ModelSpec, settings: Settings, metrics: Metrics) -> list[LightRung]:
    """Make the places of a model's light model: the server, and the worker itself where it is linear."""
    light, rung = model.light, model.rungs.light_model
    if light is None or rung is None:
        return []
    card = load_card(settings.model_repository, light.name)
    card.check(light)
    server = TritonModel(light, card.served_version, url=settings.address("triton"), golden=card.golden_rows)
    probe, timeout_s = _probe(card), rung.timeout_us / 1e6
    healed = partial(metrics.model_healed, model=light.name, version=card.served_version.version)
    calibrated = _calibrated(server, light, card)
    there = GuardedModel(light.name, calibrated, probe=probe, timeout_s=timeout_s, failures=1, healed=healed)
    rungs = [LightRung(model=there, is_local=False)]
    if card.linear is not None:
        linear = _calibrated(LinearModel(light, card.linear), light, card)
        rungs.append(LightRung(model=GuardedModel(light.name, linear, probe=probe, timeout_s=timeout_s), is_local=True))
    return rungs


def _calibrated(server: ModelServer, spec: ModelSpec, card: ModelCard) -> ModelServer:
    calibrations = card.calibrations(spec)
    return CalibratedModel(server, spec=spec, calibrations=calibrations) if calibrations else server


def _probe(card: ModelCard) -> NDArray[np.float32]:
    """A row that the model answers while it works, ``(1, n_features)``."""
    return card.golden_rows.features[:1] if card.golden else np.zeros((1, len(card.inputs)), dtype=np.float32)
