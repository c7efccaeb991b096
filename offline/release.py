"""The semantic version of a trained model: decided by what changed since the one before it, not by who trains it.

MAJOR where its structure changed: what it reads, by definition, what it answers, or what it is told to predict. MINOR
where it was trained on other rows. PATCH where only the way of training changed: parameters, seed or framework.
"""

from dataclasses import dataclass

from offline.card import SEMVER, ModelCard

FIRST = "1.0.0"


@dataclass(frozen=True, kw_only=True)
class Release:
    """A version, and why it is that one.

    Attributes:
        semver: The semantic version.
        changed: What changed since the model before it; empty for the first, and where nothing did.
    """

    semver: str
    changed: tuple[str, ...]


def next_release(card: ModelCard, before: ModelCard | None) -> Release:
    """Decide the semantic version of a model that was just trained.

    Args:
        card: Its card; the semantic version in it does not count.
        before: The card of the version before it; None for the first.

    Returns:
        The version of ``before`` itself where nothing changed.
    """
    if before is None:
        return Release(semver=FIRST, changed=())
    found = SEMVER.fullmatch(before.semver)
    assert found is not None  # noqa: S101  # read_card refuses any other
    major, minor, patch = map(int, found.groups())
    structure = [
        name
        for name, got, was in (
            ("contract", card.contract, before.contract),
            ("inputs", card.inputs, before.inputs),
            ("outputs", card.outputs, before.outputs),
            ("label", card.training.get("label"), before.training.get("label")),
        )
        if got != was
    ]
    if structure:
        return Release(semver=f"{major + 1}.0.0", changed=tuple(structure))
    if card.training_set.get("sha256") != before.training_set.get("sha256"):
        return Release(semver=f"{major}.{minor + 1}.0", changed=("training set",))
    way = [name for name in ("parameters", "framework") if card.training.get(name) != before.training.get(name)]
    if way or card.sha256 != before.sha256:
        return Release(semver=f"{major}.{minor}.{patch + 1}", changed=tuple(way or ["file"]))
    return Release(semver=before.semver, changed=())
