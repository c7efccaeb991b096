"""Pseudonyms: keyed hashes that stand in the online store in place of personal values.

A hash without a key would be no secret: whoever has a list of e-mail addresses could hash each and compare. HMAC-SHA256
(RFC 2104), the first 128 bits of it, is the same for a value wherever it stands, so that values can be compared and
looked up, and tells nothing to whoever has not the key.
"""

import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from schemas.errors import ConfigError
from schemas.serving import is_text
from schemas.view import FeatureView

MIN_KEY_BYTES: Final = 16
_HASH_BYTES: Final = 16


class Pseudonyms:
    """Puts pseudonyms in the place of what is personal in views that ask for it; leaves others as they are.

    Args:
        key: The secret, of at least :data:`MIN_KEY_BYTES`; None where no view needs it.

    Raises:
        ConfigError: The key is too short.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) < MIN_KEY_BYTES:
            msg = f"the key of pseudonyms has {len(key)} bytes, expected {MIN_KEY_BYTES} or more, drawn at random"
            raise ConfigError(msg)
        self._key = key

    def check(self, views: Iterable[FeatureView]) -> None:
        """Make sure that there is a key where a view needs one.

        Raises:
            ConfigError: There is none.
        """
        for view in views:
            if self._key is None and _hashed(view):
                msg = (
                    f"view {view.name} keeps hashes of {sorted(_hashed(view))} online, expected their key in "
                    "HEADRACE_PSEUDONYM_KEY (in code: `pseudonyms=Pseudonyms(key)`)"
                )
                raise ConfigError(msg)

    def entities(self, view: FeatureView, keys: Sequence[str | int]) -> Sequence[str | int]:
        """Give what stands in the store for entity keys."""
        return [self._of(key) for key in keys] if view.entity.key in _hashed(view) else keys

    def features(self, view: FeatureView, features: Mapping[str, Any]) -> dict[str, Any]:
        """Give what stands in the store for feature values by name, be they all of the view's or some."""
        hashed = _hashed(view)
        return {name: self._of(value) if name in hashed else value for name, value in features.items()}

    def rows(self, view: FeatureView, rows: pa.Table) -> pa.Table:
        """Put pseudonyms into the feature columns of rows; the entity key stays, see :meth:`entities`."""
        for name in _hashed(view) - {view.entity.key}:
            position = rows.schema.get_field_index(name)
            field = rows.schema.field(position)
            values = rows.column(position).combine_chunks()
            if pa.types.is_string(field.type):  # the same few values over and over, mostly
                encoded = values.dictionary_encode()
                known = [self._of(value) for value in encoded.dictionary.to_pylist()]
                hashes = pa.array(known, field.type).take(encoded.indices)
            else:
                hashes = pa.array([self._of(value) for value in values.to_pylist()], field.type)
            rows = rows.set_column(position, field, hashes)
        return rows

    def _of(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return [self._of(item) for item in value]
        if self._key is None:
            msg = "a personal value is to be hashed, expected a key: `check` tells before it comes to this"
            raise ConfigError(msg)
        return hmac.digest(self._key, str(value).encode(), "sha256")[:_HASH_BYTES].hex()


NO_PSEUDONYMS: Final = Pseudonyms()
"""Where no view asks for any."""


def _hashed(view: FeatureView) -> frozenset[str]:
    """Name the columns of a view, the entity key among them, that have pseudonyms online."""
    if view.serving.personal != "hash":
        return frozenset()
    types = view.feature_schema
    return frozenset(name for name in view.personal if name == view.entity.key or is_text(types.field(name).type))
