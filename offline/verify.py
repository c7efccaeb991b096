"""Whether the models of a repository are what their cards say, and what today's definitions can feed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offline.card import ModelCard, load_card, read_card, versions
from schemas.errors import ConfigError
from schemas.model import ModelSpec
from schemas.view import FeatureView

_NEEDED = ("license", "description", "created", "inputs", "outputs", "training", "training_set", "evaluation", "golden")
_OF_A_TRAINING_SET = ("sha256", "rows", "views")


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One version of a model, and what is wrong with it.

    Attributes:
        model: The model.
        version: Its version on the server.
        semver: Its semantic version; None where the card cannot be read.
        faults: What was got, what was expected, and what to do; empty where nothing is wrong.
    """

    model: str
    version: int
    semver: str | None
    faults: tuple[str, ...]


def verify_models(
    repository: Path, *, models: Mapping[str, ModelSpec], views: Mapping[str, FeatureView], needs_files: bool = True
) -> list[Verified]:
    """Check each version of each model of the application that the repository holds.

    The newest version must fit the contract and the definitions of today; older ones may be of older ones.

    Args:
        repository: The model repository.
        models: The application's models.
        views: Its views.
        needs_files: Whether the model files must be there, and not only in the model store.

    Raises:
        ConfigError: A model is not in the repository at all.
    """
    found = []
    for name, spec in models.items():
        held = versions(repository, name)
        if not held:
            msg = f"{repository} has no model {name}, expected {name}/1/model.yaml in it; train it (`headrace train`)"
            raise ConfigError(msg)
        for version in held:
            semver, faults = None, []
            try:
                card = read_card(repository, name, version)
                semver = card.semver
                faults += _lacking(card)
                if version == held[-1]:
                    faults += _without_view(card, views)
                    card.check(spec)
                if needs_files:
                    load_card(repository, name, version)
            except ConfigError as exc:
                faults.append(str(exc))
            found.append(Verified(model=name, version=version, semver=semver, faults=tuple(faults)))
    return found


def _lacking(card: ModelCard) -> list[str]:
    lacking = [name for name in _NEEDED if not getattr(card, name)]
    if card.training_set:
        lacking += [f"training_set.{name}" for name in _OF_A_TRAINING_SET if name not in card.training_set]
    if not lacking:
        return []
    where = f"card of {card.name} version {card.version}"
    return [f"{where} has nothing in {lacking}, expected what `headrace train` writes there; train it anew"]


def _without_view(card: ModelCard, views: Mapping[str, FeatureView]) -> list[str]:
    """Say which inputs no view makes under the definition that the model was trained on."""
    faults = []
    for item in card.inputs:
        view_name, _, feature = str(item.get("feature")).partition(".")
        view = views.get(view_name)
        made = view is not None and feature in view.definitions
        if view is not None and made:
            made = (view.version, view.definition_hash) == (item.get("view_version"), item.get("definition_hash"))
        if not made:
            got = "no such view" if view is None else f"v{view.version} {view.definition_hash}"
            faults.append(
                f"{card.name} version {card.version} reads {item.get('feature')} of v{item.get('view_version')} "
                f"{item.get('definition_hash')}, which no view makes (got {got}, with features "
                f"{sorted(view.definitions) if view is not None else []}); restore it, or train the model anew"
            )
    return faults
