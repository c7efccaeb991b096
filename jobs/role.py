"""The roles of a worker."""

from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What a worker does."""

    FEATURES = "features"
    """Raw events to feature rows."""
    ONLINE = "online"
    """Feature rows, and the scores that use cases want, to Redis."""
    OFFLINE = "offline"
    """Feature rows, and raw events as they came, to Delta Lake."""
    SCORING = "scoring"
    """As-of rows to scores."""
    SERVE = "serve"
    """Redis to whoever asks over HTTP."""


CONSUMERS: Final = (Role.FEATURES, Role.OFFLINE, Role.SCORING, Role.ONLINE)
"""Roles that read topics, each after those whose rows it reads: in this order they run dry."""
