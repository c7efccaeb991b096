"""The four roles of a worker."""

from enum import StrEnum


class Role(StrEnum):
    """What a worker does."""

    FEATURES = "features"
    """Raw events to feature rows."""
    ONLINE = "online"
    """Feature rows to Redis."""
    OFFLINE = "offline"
    """Feature rows to Delta Lake."""
    SCORING = "scoring"
    """As-of rows to scores."""
