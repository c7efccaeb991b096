"""Names the schema registry of a command: it is asked when the first framed payload is met, and not before."""

import os
from typing import Final

from jobs.settings import Settings
from schemas.contract import Contract
from schemas.errors import ConfigError
from streams.writer_schema import Registry, use_registry

_REMEDY: Final = (
    "expected the address of a schema registry; set HEADRACE_SCHEMA_REGISTRY, such as http://127.0.0.1:8081"
)


def name_registry() -> None:
    """Let framed payloads be read by the registry of the settings."""
    use_registry(_connect)


def check_registry(settings: Settings, contracts: list[Contract]) -> None:
    """See that framed contracts have a registry, before anything is read.

    Raises:
        ConfigError: They have none.
    """
    framed = [contract.reference for contract in contracts if contract.is_framed]
    if framed and settings.schema_registry is None:
        msg = f'payloads of {", ".join(framed)} name the schemas that wrote them ("x-framing"), {_REMEDY}'
        raise ConfigError(msg)


def _connect() -> Registry:
    url = Settings.from_environment(os.environ).schema_registry
    if url is None:
        msg = f"a payload names the schema that wrote it, {_REMEDY}"
        raise ConfigError(msg)
    from streams.transport.schema_registry import SchemaRegistry  # noqa: PLC0415 - loaded where it is used

    return SchemaRegistry(url)
