"""Evolution of contracts: what a new version may change of the one before it, and records of those that were.

A contract is recorded in ``schemas/recorded/shop_event@1.json``, looked for below the working directory first and then
beside this module. Under a recorded version its rules stay as they are; a new version has to fit the newest recorded
one before it, as its ``x-compatibility`` says:

- ``BACKWARD`` (the default): whatever passes the old one passes the new one, so that a topic can be read from its
  beginning;
- ``FORWARD``: whatever passes the new one passes the old one, so that readers of the old one may stay as they are;
- ``FULL``: both; ``NONE``: neither, for a topic of its own.

What is compared is the rules that payloads are held to, so that the words do not matter. An integer that grew upstream
from 32 bits to 64 is caught by its bounds: it passes a new version that has the wider ones, and none that has not.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from schemas.contract import Contract
from schemas.errors import ConfigError
from schemas.generated_contract import write_record

_PACKAGED: Final = Path(__file__).parent / "recorded"
_SHOWN: Final = 5
_INT64: Final = (-(2**63), 2**63 - 1)
_MAX_BYTES: Final = 2**20
_LISTED: Final = ("pattern", "format", "x-unit")
"""Rules of which it cannot be told whether one allows all that the other does: they have to be the same."""


def check_evolution(contracts: Iterable[Contract]) -> list[str]:
    """See whether contracts are as they were recorded, and fit the versions before them.

    Returns:
        References of those that are not recorded.

    Raises:
        ConfigError: One differs from its record, or does not fit the version before it.
    """
    missing = []
    for contract in contracts:
        name, version = contract.reference.rsplit("@", 1)
        records = _records(name)
        if (record := records.get(int(version))) is None:
            missing.append(contract.reference)
        elif record["rules"] != _as_json(contract.definition):
            changes = [
                *unreadable(record["rules"], contract.definition),
                *unreadable(contract.definition, record["rules"]),
            ]
            msg = (
                f"contract {contract.reference} differs from its record in schemas/recorded{_listed(changes)}. Add a "
                f"version {name}@{max([*records, int(version)]) + 1}, or restore the rules"
            )
            raise ConfigError(msg)
        earlier = max((number for number in records if number < int(version)), default=None)
        if earlier is not None:
            _check_fits(contract, records[earlier]["rules"], earlier=f"{name}@{earlier}")
    return missing


def record_contracts(contracts: Iterable[Contract]) -> list[Path]:
    """Record the contracts that are not yet, below the working directory; all are checked first.

    Raises:
        ConfigError: One differs from its record, does not fit the version before it, or a file cannot be written.
    """
    by_reference = {contract.reference: contract for contract in contracts}
    written = []
    for reference in check_evolution(by_reference.values()):
        path = Path.cwd() / "schemas" / "recorded" / f"{reference}.json"
        document = {"contract": reference, "rules": by_reference[reference].definition}
        write_record(path, json.dumps(document, indent=2) + "\n")
        written.append(path)
    return written


def _check_fits(contract: Contract, before: Mapping[str, Any], *, earlier: str) -> None:
    wanted = contract.compatibility
    failures: list[str] = []
    if wanted in ("BACKWARD", "FULL"):
        failures += [f"not BACKWARD: {why}" for why in unreadable(before, contract.definition)]
    if wanted in ("FORWARD", "FULL"):
        failures += [f"not FORWARD: {why}" for why in unreadable(contract.definition, before)]
    if failures:
        msg = (
            f"contract {contract.reference} does not fit {earlier}, expected {wanted}{_listed(failures)}. Change the "
            'rules, or, where the topic is another one, say "x-compatibility": "NONE"'
        )
        raise ConfigError(msg)


def unreadable(written: Mapping[str, Any], read: Mapping[str, Any]) -> list[str]:
    """Say why payloads that pass one contract's rules may not pass another's.

    Args:
        written: ``Contract.definition`` that they were written by.
        read: The one that they are read by.

    Returns:
        One reason for each rule that is in the way; none where every payload passes.
    """
    found = list(_misread(written, read))
    if found and found[0].startswith("payloads are "):
        return found
    if read.get("max_bytes", _MAX_BYTES) < written.get("max_bytes", _MAX_BYTES):
        found.append(f"payloads may have {written.get('max_bytes', _MAX_BYTES)} bytes")
    for name, rules in read["fields"].items():
        is_there = read.get("format") == "avro"  # the schemas tell, not the values
        if not is_there and name in read["required"] and name not in written["required"]:
            found.append(f"`{name}` may be absent")
        if name in written["fields"]:
            found += [f"`{name}` {why}" for why in _wider(written["fields"][name], rules)]
    return found


def _misread(written: Mapping[str, Any], read: Mapping[str, Any]) -> Iterator[str]:
    """Say why bytes of one contract may mean something else by another, whatever the rules."""
    formats = [f"{rules.get('format', 'json')}, {rules.get('framing', 'plain')}" for rules in (written, read)]
    if formats[0] != formats[1]:
        yield f"payloads are {formats[0]}, expected {formats[1]}"
    elif read.get("format") == "avro":
        from schemas.avro import expanded, unlike, unresolvable  # noqa: PLC0415 - loaded where it is used

        schemas = expanded(written["schema"]), expanded(read["schema"])
        if "framing" in read:
            yield from unresolvable(*schemas)
        else:
            plain = "in plain payloads, which do not say what wrote them"
            yield from (f"{why}, {plain}" for why in unlike(*schemas))
    elif read.get("format") == "protobuf":
        from schemas.protobuf import unreadable_numbers  # noqa: PLC0415 - loaded where it is used

        yield from unreadable_numbers(written, read)


def _wider(written: Mapping[str, Any], read: Mapping[str, Any]) -> Iterator[str]:
    """Say in what a field's rules allow values that others do not."""
    types, allowed = set(written["type"]), set(read["type"])
    # Every integer is a number, though not the other way round.
    if other := {kind for kind in types - allowed if not (kind == "integer" and "number" in allowed)}:
        yield f"may be {' or '.join(sorted(other))}, expected {' or '.join(sorted(allowed))}"
        return
    for rule in _LISTED:
        if read.get(rule) not in (None, written.get(rule)) or (
            rule == "x-unit" and read.get(rule) != written.get(rule)
        ):
            yield f"has {rule} {written.get(rule)!r}, expected {read.get(rule)!r}"
    if "enum" in read:
        more = [value for value in written.get("enum", ()) if value not in read["enum"]]
        is_whole = types <= {"boolean", "null"} and len(read["enum"]) > 1
        if more or ("enum" not in written and not is_whole):
            yield f"may be {'another value' if 'enum' not in written else more}, expected one of {read['enum']}"
    elif "enum" in written:
        values = [value for value in written["enum"] if value is not None]
        yield from (f"may be {value!r}" for value in values if not _is_in_bounds(value, read))
        return
    for low, high in (("minimum", "maximum"), ("minLength", "maxLength")):
        yield from _wider_range(written, read, low=low, high=high)
    if "items" in read:
        yield from (f"[] {why}" for why in _wider(written["items"], read["items"]))


def _wider_range(written: Mapping[str, Any], read: Mapping[str, Any], *, low: str, high: str) -> Iterator[str]:
    for rule, sign in ((low, -1), (high, 1)):
        bound, limit = _bound(written, rule, sign), _bound(read, rule, sign)
        if limit is not None and (bound is None or (bound[0] * sign, bound[1]) > (limit[0] * sign, limit[1])):
            is_integer = "integer" in written["type"] and rule in ("minimum", "maximum")
            shown = bound or ((_INT64[sign > 0], True) if is_integer else None)
            beyond = "" if limit[1] else "less than " if sign > 0 else "more than "
            yield f"has {rule} {'none' if shown is None else shown[0]}, expected {beyond}{limit[0]}"


def _bound(rules: Mapping[str, Any], rule: str, sign: int) -> tuple[float, bool] | None:
    """Find a bound, and whether it is itself allowed; the tighter one of two."""
    found = [(rules[rule], True)] if rule in rules else []
    exclusive = f"exclusive{rule[0].upper()}{rule[1:]}"
    found += [(rules[exclusive], False)] if exclusive in rules else []
    return min(found, key=lambda bound: (bound[0] * sign, bound[1]), default=None)


def _is_in_bounds(value: Any, rules: Mapping[str, Any]) -> bool:
    for (low, high), number in ((("minimum", "maximum"), value), (("minLength", "maxLength"), value)):
        if isinstance(value, str) != (low == "minLength") or isinstance(value, bool):
            continue
        size = len(number) if isinstance(number, str) else number
        for rule, sign in ((low, -1), (high, 1)):
            limit = _bound(rules, rule, sign)
            if limit is not None and (size * sign, True) > (limit[0] * sign, limit[1]):
                return False
    return True


def _records(name: str) -> dict[int, dict[str, Any]]:
    """Read the records of a contract, by version; those of the application go before those shipped."""
    found: dict[int, dict[str, Any]] = {}
    for directory in (_PACKAGED, Path.cwd() / "schemas" / "recorded"):
        for path in sorted(directory.glob(f"{name}@*.json")):
            version = path.stem.rpartition("@")[2]
            if version.isdigit():
                found[int(version)] = _read(path, f"{name}@{version}")
    return found


def _read(path: Path, reference: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        has_rules = {"fields", "required"} <= document["rules"].keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        msg = f"{path} is no record of a contract: {exc!r}; restore it"
        raise ConfigError(msg) from exc
    if document.get("contract") != reference or not has_rules:
        found = document.get("contract")
        msg = f"{path} is of {found!r}, expected {reference!r} and its rules: it was edited; restore it"
        raise ConfigError(msg)
    return document


def _as_json(definition: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(definition))


def _listed(reasons: list[str]) -> str:
    if not reasons:
        return ""
    more = "" if len(reasons) <= _SHOWN else f"; and {len(reasons) - _SHOWN} more"
    return f": {'; '.join(reasons[:_SHOWN])}{more}"
