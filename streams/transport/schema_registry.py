"""Asks a Confluent-compatible schema registry for the schemas that wrote payloads."""

import logging
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import httpx2
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from schemas.errors import ConfigError, RegistryUnavailableError
from streams.writer_schema import WriterSchema

_TIMEOUT_S: Final = 5.0
_OPTIONS: Final = {
    "ssl_ca_certs": "ssl.ca.location",
    "ssl_certfile": "ssl.certificate.location",
    "ssl_keyfile": "ssl.key.location",
}
_NOT_FOUND: Final = 404
_REFUSED: Final = (401, 403)
_MAX_REFERENCES: Final = 100


def registry_config(url: str) -> dict[str, Any]:
    """Read an address: ``https://user:password@host:port/path``, with files for TLS as options after ``?``.

    Returns:
        What the client library makes a connection of.

    Raises:
        ConfigError: It is none of that kind; the message leaves user and password out.
    """
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        has_place = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_place, options = False, {}
    if not has_place or (unknown := sorted(set(options) - set(_OPTIONS))):
        why = f"has options {unknown}" if has_place else "is no URL"
        msg = (
            f"schema registry address {why}, expected http://host:port or https://user:password@host:port/path, with "
            f"options among {sorted(_OPTIONS)} after '?'"
        )
        raise ConfigError(msg)
    files = {_OPTIONS[name]: value for name, value in options.items()}
    place = parts.netloc.rpartition("@")[2]
    config = {"url": urlunsplit((parts.scheme, place, parts.path, "", "")), **files}
    if parts.username is not None:
        # Not in the URL: the HTTP client tells its log what it asks.
        config["basic.auth.user.info"] = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return config


class SchemaRegistry:
    """A registry.

    Args:
        url: Its address, see :func:`registry_config`.

    Raises:
        ConfigError: It cannot be used: a file for TLS is not there, for example.
    """

    def __init__(self, url: str) -> None:
        config = registry_config(url)
        self._place = urlsplit(config["url"]).netloc
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each question
        try:
            # Who calls waits and tries again; ids that are known are kept there, too.
            self._client = SchemaRegistryClient({**config, "timeout": _TIMEOUT_S, "max.retries": 0})
        except (ValueError, TypeError, OSError) as exc:
            msg = f"schema registry at {self._place} cannot be used: {exc}; correct HEADRACE_SCHEMA_REGISTRY"
            raise ConfigError(msg) from exc

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def find(self, schema_id: int) -> WriterSchema | None:
        """Give the schema of an id, with all that it refers to; None where the registry knows none.

        Raises:
            ConfigError: It refuses the login.
            RegistryUnavailableError: It does not answer; may be tried again.
        """
        found = self._ask(lambda: self._client.get_schema(schema_id), what=f"schema {schema_id}")
        if found is None:
            return None
        references: dict[str, str] = {}
        self._follow(found, references)
        return WriterSchema(
            id=schema_id,
            kind=found.schema_type or "AVRO",
            text=found.schema_str or "",
            references=tuple(references.items()),
        )

    def _follow(self, schema: Any, references: dict[str, str]) -> None:
        for reference in schema.references or ():
            if reference.name in references or len(references) >= _MAX_REFERENCES:
                continue
            subject, version = reference.subject, reference.version
            found = self._ask(
                lambda subject=subject, version=version: self._client.get_version(subject, version),
                what=f"{subject} version {version}",
            )
            if found is None:
                continue  # what needs it cannot be read, and tells so by its name
            references[reference.name] = ""
            self._follow(found.schema, references)
            del references[reference.name]  # after those that it refers to
            references[reference.name] = found.schema.schema_str or ""

    def _ask(self, ask: Any, *, what: str) -> Any:
        try:
            return ask()
        except SchemaRegistryError as exc:
            if exc.http_status_code == _NOT_FOUND and exc.error_code > 0:
                return None
            if exc.http_status_code in _REFUSED:
                msg = (
                    f"schema registry at {self._place} refuses the login ({exc.http_status_code}), expected a user and "
                    "password that may read; correct HEADRACE_SCHEMA_REGISTRY"
                )
                raise ConfigError(msg) from exc
            msg = f"schema registry at {self._place} gives no {what}: {exc.http_status_code} {exc.error_message}"
            raise RegistryUnavailableError(msg) from exc
        except (httpx2.HTTPError, OSError, ValueError, TypeError) as exc:
            msg = f"schema registry at {self._place} does not answer when asked for {what}: {exc!r}"
            raise RegistryUnavailableError(msg) from exc
