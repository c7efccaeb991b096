"""How a topic is kept, where an application wants it otherwise than Headrace does by itself."""

from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.time import parse_duration_us

FOREVER = "forever"


@dataclass(frozen=True, kw_only=True)
class TopicSettings:
    """What an application says of a topic, in ``TOPICS``; what is None stays as Headrace or the broker has it.

    Attributes:
        partitions: How many partitions a topic of raw events has; all others have as many as their source.
        retention: For how long records are kept, such as ``"30d"``, or ``"forever"``.
        min_insync_replicas: How many replicas must have a record before it counts as written.
    """

    partitions: int | None = None
    retention: str | None = None
    min_insync_replicas: int | None = None

    def __post_init__(self) -> None:
        for name in ("partitions", "min_insync_replicas"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                msg = f"`{name}` of a topic is {number!r}, expected a whole number of 1 or more"
                raise ConfigError(msg)
        if self.retention not in (None, FOREVER) and self.retention_ms < 1:
            msg = f"`retention` of a topic is {self.retention!r}, expected 1ms or more, or {FOREVER!r}"
            raise ConfigError(msg)

    @property
    def retention_ms(self) -> int:
        """Milliseconds for which records are kept, -1 for good."""
        if self.retention in (None, FOREVER):
            return -1
        return parse_duration_us(str(self.retention), field="retention") // 1_000

    @property
    def config(self) -> dict[str, str]:
        """The same as configuration of a Kafka topic."""
        config = {}
        if self.retention is not None:
            config["retention.ms"] = str(self.retention_ms)
        if self.min_insync_replicas is not None:
            config["min.insync.replicas"] = str(self.min_insync_replicas)
        return config
