"""A use case: what one question of an application's users is answered with, under a path of their own words."""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Final

from schemas.errors import ConfigError
from schemas.model import ModelSpec
from schemas.time import parse_duration_us
from schemas.view import FeatureView

_PATH: Final = re.compile(r"/v[1-9][0-9]*(/([a-z0-9][a-z0-9-]*|\{[a-z][a-z0-9_]*\}))+")
_PARAMETER: Final = re.compile(r"\{([a-z0-9_]+)\}")
_RESERVED: Final = ("/v1/features", "/v1/views")


@dataclass(frozen=True)
class Lookup:
    """Features that a use case reads.

    Attributes:
        view: The view.
        parameter: Parameter of the path that holds the entity key.
        features: Names of the features; None for all.
    """

    view: FeatureView
    parameter: str
    features: tuple[str, ...] | None = None


@dataclass(frozen=True)
class UseCase:
    """A question, such as whether a flight will be late, and what answers it: the newest score, features, or both.

    Attributes:
        path: Path of the route, e.g. ``/v1/flights/{flight_id}/late-arrival``.
        model: Model whose newest score of the entity is the answer; the path names the entity as the model does.
        lookups: Features that are read beside it.
        score_ttl: Age of the scored event after which a score is stale; None means never.
        keep_score: How long after it was written a score stays in the online store.
        description: What it is about, for the API's documents.
    """

    path: str
    _: KW_ONLY
    model: ModelSpec | None = None
    lookups: Sequence[Lookup] = ()
    score_ttl: str | None = None
    keep_score: str = "7d"
    description: str = ""

    def __post_init__(self) -> None:
        where = f"use case {self.path}"
        if not isinstance(self.path, str) or not _PATH.fullmatch(self.path) or self.path.startswith(_RESERVED):
            msg = (
                f"`UseCase` path is {self.path!r}, expected one such as '/v1/flights/{{flight_id}}/late-arrival' that "
                f"is not below {' or '.join(_RESERVED)}"
            )
            raise ConfigError(msg)
        if self.model is None and not self.lookups:
            msg = f"{where}: there is neither `model` nor `lookups`, expected what the question is answered with"
            raise ConfigError(msg)
        if self.score_ttl is not None and parse_duration_us(self.score_ttl, field="score_ttl") == 0:
            msg = f"{where}: `score_ttl` is {self.score_ttl!r}, expected more than 0; leave it out for never"
            raise ConfigError(msg)
        if parse_duration_us(self.keep_score, field="keep_score") == 0:
            msg = f"{where}: `keep_score` is {self.keep_score!r}, expected more than 0"
            raise ConfigError(msg)
        used = [lookup.parameter for lookup in self.lookups] + ([self.model.entity] if self.model else [])
        if sorted(set(used)) != sorted(self.parameters):
            msg = f"{where}: its parameters are {self.parameters}, expected {sorted(set(used))}, which are read by"
            raise ConfigError(msg)
        for lookup in self.lookups:
            if unknown := sorted(set(lookup.features or ()) - lookup.view.definitions.keys()):
                known = sorted(lookup.view.definitions)
                msg = f"{where}: view {lookup.view.name} has no features {unknown}, expected some of {known}"
                raise ConfigError(msg)

    @cached_property
    def parameters(self) -> list[str]:
        """Parameters of the path, in their order."""
        return _PARAMETER.findall(self.path)

    @property
    def shape(self) -> str:
        """The path without the names of its parameters, which tell no two routes apart."""
        return _PARAMETER.sub("{}", self.path)

    @property
    def score_ttl_us(self) -> int | None:
        """Age after which a score is stale, in microseconds; None means never."""
        return None if self.score_ttl is None else parse_duration_us(self.score_ttl, field="score_ttl")

    @property
    def keep_score_us(self) -> int:
        """How long a score stays in the online store, in microseconds."""
        return parse_duration_us(self.keep_score, field="keep_score")
