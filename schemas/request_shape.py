"""How a client asks a model server: measured by ``headrace models bench``, kept in the server's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from schemas.errors import ConfigError

ROWS: Final = "request_rows"
"""Name of the configuration parameter of ``RequestShape.rows``."""
IN_FLIGHT: Final = "requests_in_flight"
"""Name of the configuration parameter of ``RequestShape.in_flight``."""


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """How large requests are, and how many are on the way.

    Attributes:
        rows: Rows of a request at most.
        in_flight: Requests on the way at once.
    """

    rows: int
    in_flight: int

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "RequestShape | None":
        """Read it from the parameters of a model's configuration; None where they do not have it.

        Raises:
            ConfigError: There is only one of the two, or one is no number from 1 on.
        """
        texts = {name: parameters[name] for name in (ROWS, IN_FLIGHT) if name in parameters}
        if not texts:
            return None
        if len(texts) < 2 or not all(text.isdecimal() and int(text) >= 1 for text in texts.values()):
            msg = (
                f"the model's config.pbtxt has parameters {texts}, expected {ROWS} and {IN_FLIGHT}, both 1 or more, or "
                "neither; run `headrace models bench --write`, or take them out"
            )
            raise ConfigError(msg)
        return cls(rows=int(texts[ROWS]), in_flight=int(texts[IN_FLIGHT]))

    @property
    def parameters(self) -> dict[str, str]:
        """As parameters of a model's configuration."""
        return {ROWS: str(self.rows), IN_FLIGHT: str(self.in_flight)}
