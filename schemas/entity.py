"""What features are about: a user, an aircraft, an airport."""

from dataclasses import dataclass

from schemas.errors import ConfigError


@dataclass(frozen=True)
class Entity:
    """A kind of thing that features describe.

    Attributes:
        name: Name of the kind, e.g. ``"user"``.
        key: Event column that holds the entity key, e.g. ``"user_id"``. It must be text or an integer.
    """

    name: str
    key: str

    def __post_init__(self) -> None:
        for field in ("name", "key"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value.isidentifier():
                msg = f"`Entity.{field}` is {value!r}, expected a name of letters, digits and _ such as 'user_id'"
                raise ConfigError(msg)
