import json
from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from schemas.contract import Contract
from schemas.row import PRODUCED_TIME_HEADER, REQUEST_ID_HEADER
from streams.batch import Headers
from streams.decoded import DecodedBatch, arrival_times_us
from streams.decoding import decode
from tests.support.transport import make_batch

CONTRACT = Contract(
    "everything@1",
    {
        "type": "object",
        "properties": {
            "id": {"type": "string", "minLength": 2, "maxLength": 5},
            "code": {"type": ["string", "null"], "pattern": "^[A-Z]{2}$"},
            "kind": {"type": ["string", "null"], "enum": ["view", "click", None]},
            "n": {"type": "integer", "minimum": -5, "maximum": 2**63 - 1},
            "big": {"type": ["integer", "null"]},
            "x": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
            "free": {"type": ["number", "null"]},
            "flag": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["id", "n"],
    },
)
GOOD = {"id": "ab", "n": 1}


def decode_apart(values: Sequence[bytes | None], contract: Contract = CONTRACT) -> DecodedBatch:
    parts = [decode(make_batch([value], first_offset=at), contract) for at, value in enumerate(values)]
    return DecodedBatch(
        rows=pa.concat_tables([part.rows for part in parts]),
        rejected=pa.concat_tables([part.rejected for part in parts]),
    )


def reasons(decoded: DecodedBatch) -> list[tuple[int, str]]:
    return list(zip(decoded.rejected["_offset"].to_pylist(), decoded.rejected["reason"].to_pylist(), strict=True))


def content(decoded: DecodedBatch) -> list[dict[str, Any]]:
    return decoded.rows.select([*CONTRACT.fields, "_offset"]).to_pylist()


def payload(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


def test_a_good_row_comes_out_in_the_types_of_its_contract() -> None:
    decoded = decode(
        make_batch([payload(code="AB", kind="view", big=2**62, x=1, free=2, flag=True, tags=["a", ""])]), CONTRACT
    )
    assert reasons(decoded) == []
    assert content(decoded) == [
        {
            "id": "ab",
            "code": "AB",
            "kind": "view",
            "n": 1,
            "big": 2**62,
            "x": 1.0,
            "free": 2.0,
            "flag": True,
            "tags": ["a", ""],
            "_offset": 0,
        }
    ]
    assert decoded.rows.schema.field("x").type == pa.float64()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="tombstone"),
        pytest.param(b"", id="nothing"),
        pytest.param(b" ", id="blank"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(payload()[:-1], id="cut short"),
        pytest.param(payload() + b"}", id="one bracket more"),
        pytest.param(payload() + payload(), id="two objects"),
        pytest.param(payload() + b"\n" + payload(), id="two objects on two lines"),
        pytest.param(b'{"id": "a\xffb", "n": 1}', id="invalid UTF-8 in a text"),
        pytest.param(b'{"id": "ab", "n": 1, "free": NaN}', id="NaN"),
        pytest.param(b'{"id": "ab", "n": 1, "free": Infinity}', id="infinity"),
        pytest.param(b'{"id": "ab", "n": 1, "free": 1e999}', id="a number beyond float64"),
        pytest.param(b'{"id": "ab", "n": 01}', id="leading zero"),
        pytest.param(b'{"id": "ab", "n": 1,}', id="trailing comma"),
        pytest.param(b"{'id': 'ab', 'n': 1}", id="Python quotes"),
        pytest.param(b'{"id": "a\nb", "n": 1}', id="raw newline in a text"),
        pytest.param(b'{"id": "\\ud800x", "n": 1}', id="half a surrogate pair"),
        pytest.param(b'{"id": "\\udc00x", "n": 1}', id="the other half"),
        pytest.param(b'{"id": "ab", "n": 1, "z": "\\ud800"}', id="half a pair where nobody looks"),
        pytest.param(b'{"id": "ab", "n": 1, "z": "\\udc00"}', id="the other half where nobody looks"),
        pytest.param(b'{"id": "ab", "n": 1, "z\xff": 1}', id="invalid UTF-8 in a name"),
        pytest.param(b'{"id": "ab", "n": 1, "z": [-NaN]}', id="NaN where nobody looks"),
        pytest.param(b'{"id": "ab", "n": 1, "z": -Inf}', id="infinity where nobody looks"),
        pytest.param(b'{"id": "ab", "n": 1, "z": 01}', id="leading zero where nobody looks"),
        pytest.param(b'{"id": "ab", "n": 1, "z": +1}', id="plus sign where nobody looks"),
        pytest.param(b'{"id": "ab", "n": 1, "z": "\x01"}', id="control character where nobody looks"),
        pytest.param(b'{"id": "ab", "n": 1, "z": "\\x41"}', id="unknown escape where nobody looks"),
    ],
)
def test_what_is_no_json_is_a_decode_error(value: bytes | None) -> None:
    assert reasons(decode(make_batch([value]), CONTRACT)) == [(0, "decode_error")]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        pytest.param(b"[]", "object", id="a list"),
        pytest.param(b"null", "object", id="null"),
        pytest.param(b"5", "object", id="a number"),
        pytest.param(b'"{}"', "object", id="a text"),
        pytest.param(b'{"n": 1}', "id", id="a required field is missing"),
        pytest.param(payload(id=None), "id", id="a required field is null"),
        pytest.param(payload(flag=None), "flag", id="null where it is not allowed"),
        pytest.param(payload(id=5), "id", id="a number for a text"),
        pytest.param(payload(n="1"), "n", id="a text for a number"),
        pytest.param(payload(n=1.5), "n", id="a fraction for an integer"),
        pytest.param(payload(n=True), "n", id="a boolean for an integer"),
        pytest.param(payload(flag=1), "flag", id="a number for a boolean"),
        pytest.param(payload(x="1"), "x", id="a text for a float"),
        pytest.param(payload(tags="a"), "tags", id="a text for a list"),
        pytest.param(payload(tags=["a", 1]), "tags", id="a number in a list of texts"),
        pytest.param(payload(tags=["a", None]), "tags", id="null in a list of texts"),
        pytest.param(payload(tags=[["a"]]), "tags", id="a list in a list of texts"),
        pytest.param(payload(n=-6), "n", id="below the minimum"),
        pytest.param(payload(x=0), "x", id="at the exclusive minimum"),
        pytest.param(payload(x=10), "x", id="at the exclusive maximum"),
        pytest.param(payload(id="a"), "id", id="too short"),
        pytest.param(payload(id="abcdef"), "id", id="too long"),
        pytest.param(payload(id="äöüäöü"), "id", id="too many characters"),
        pytest.param(payload(code="ab"), "code", id="against the pattern"),
        pytest.param(payload(kind="order"), "kind", id="not in the enumeration"),
        pytest.param(payload(big=2**63), "big", id="an integer beyond 64 bits"),
        pytest.param(payload(big=-(2**63) - 1), "big", id="an integer below 64 bits"),
    ],
)
def test_what_breaks_the_contract_is_a_schema_violation_that_names_the_field(value: bytes, names: str) -> None:
    decoded = decode(make_batch([value]), CONTRACT)
    assert reasons(decoded) == [(0, "schema_violation")]
    assert names in decoded.rejected["detail"][0].as_py()


@pytest.mark.parametrize(
    ("value", "field", "expected"),
    [
        pytest.param(payload(n=5.0), "n", 5, id="5.0 is an integer"),
        pytest.param(payload(x=5), "x", 5.0, id="5 is a number"),
        pytest.param(payload(kind=None), "kind", None, id="null in an enumeration that has it"),
        pytest.param(payload(id="äöüäö"), "id", "äöüäö", id="characters are counted, not bytes"),
        pytest.param(payload(big=-(2**63)), "big", -(2**63), id="the smallest integer"),
        pytest.param(payload(big=2**63 - 1), "big", 2**63 - 1, id="the largest integer"),
        pytest.param(payload(unknown={"a": [1, {}]}), "id", "ab", id="unknown fields are ignored"),
        pytest.param(b" " + payload() + b" \n", "id", "ab", id="blanks around the object"),
        pytest.param(b'{"id": "xx", "n": 1, "id": "ab"}', "id", "ab", id="the last of two fields of a name"),
        pytest.param(b'{"id": "a\\u0000", "n": 1}', "id", "a\0", id="a zero character"),
        pytest.param(b'{"id": "\\ud83d\\ude00x", "n": 1}', "id", "\U0001f600x", id="a surrogate pair"),
        pytest.param(b'{"id": "ab", "n": 1, "free": -0.0}', "free", -0.0, id="minus zero"),
        pytest.param(b'{"id": "ab", "n": 1, "z": ' + b"[" * 511 + b"]" * 511 + b"}", "n", 1, id="deep nesting"),
    ],
)
def test_what_json_schema_lets_pass_passes(value: bytes, field: str, expected: Any) -> None:
    decoded = decode(make_batch([value]), CONTRACT)
    assert reasons(decoded) == []
    assert decoded.rows[field].to_pylist() == [expected]


@pytest.mark.parametrize("depth", [512, 200_000])
@pytest.mark.parametrize("field", ["z", "id"])
def test_nesting_without_end_is_a_dead_letter_and_no_crash(field: str, depth: int) -> None:
    value = b'{"n": 1, "' + field.encode() + b'": ' + b"[" * depth + b"]" * depth + b"}"
    decoded = decode(make_batch([value, payload()]), CONTRACT)
    assert reasons(decoded) == [(0, "decode_error")]
    assert "nests deeper than 512 levels" in decoded.rejected["detail"][0].as_py()


@pytest.mark.parametrize("neighbour", [b'{"a": "b"}', b"{", b' {"a": "b"}'])
def test_a_payload_of_more_bytes_than_the_contract_allows_is_a_dead_letter(neighbour: bytes) -> None:
    contract = Contract("short@1", {"type": "object", "properties": {"a": {"type": "string"}}, "x-max-bytes": 20})
    fits, beyond = b'{"a": "%b"}' % (b"x" * 11), b'{"a": "%b"}' % (b"x" * 12)
    decoded = decode(make_batch([neighbour, fits, beyond, b"[" * 21]), contract)

    assert 1 in decoded.rows["_offset"].to_pylist()
    assert reasons(decoded)[-2:] == [(2, "schema_violation"), (3, "schema_violation")]
    assert decoded.rejected["detail"].to_pylist()[-2] == "the payload has 21 bytes, expected at most 20 (short@1)"


def test_a_payload_may_have_a_mebibyte_unless_the_contract_says_otherwise() -> None:
    contract = Contract("free@1", {"type": "object", "properties": {"a": {"type": "string"}}})
    values = [b'{"a": "%b"}' % (b"x" * (2**20 - 9 + more)) for more in (0, 1)]

    assert reasons(decode(make_batch(values), contract)) == [(1, "schema_violation")]


def test_brackets_side_by_side_or_in_a_text_do_not_nest() -> None:
    lists, text = b"[" + b"[]," * 600 + b"[]]", b'"' + b'[\\"{' * 600 + b'"'
    decoded = decode(make_batch([b'{"id": "ab", "n": 1, "z": ' + odd + b"}" for odd in (lists, text)]), CONTRACT)
    assert reasons(decoded) == []


def test_each_zero_is_the_same_zero_however_it_is_written() -> None:
    rows = [b'{"free": %b, "ns": [%b, null]}' % (zero, zero) for zero in (b"-0", b"-0.0", b"-1e-400")]
    number = {"type": ["number", "null"]}
    fields = {"free": number, "ns": {"type": "array", "items": number}}
    contract = Contract("zeros@1", {"type": "object", "properties": fields})
    for values in (rows, [*rows, b"{"], [b" " + row for row in rows]):
        decoded = decode(make_batch(values), contract)
        assert repr(decoded.rows["free"].to_pylist()) == "[0.0, 0.0, 0.0]"
        assert repr(decoded.rows["ns"].to_pylist()) == "[[0.0, None], [0.0, None], [0.0, None]]"


LISTS = Contract(
    "lists@1",
    {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}},
            "floats": {"type": "array", "items": {"type": "number"}},
            "pairs": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            "word": {"type": "string", "pattern": r"^(?!no)\w+$"},
        },
    },
)


@pytest.mark.parametrize(
    ("value", "is_good"),
    [
        (b'{"numbers": [1, 2.0]}', True),
        (b'{"numbers": [1, -1]}', False),
        (b'{"numbers": [1, 2.5]}', False),
        (b'{"numbers": [9223372036854775808]}', False),
        (b'{"numbers": []}', True),
        (b'{"floats": [1, 2.5]}', True),
        (b'{"floats": [1, NaN]}', False),
        (b'{"pairs": [[1, 2], []]}', True),
        (b'{"pairs": [[1, null]]}', False),
        (b'{"pairs": [[1, 18446744073709551616]]}', False),
        ('{"word": "\u0663"}'.encode(), True),
        (b'{"word": "yes"}', True),
        (b'{"word": "none"}', False),
    ],
)
@pytest.mark.parametrize("neighbour", [None, b"{}", b'{"numbers": [0.0]}'])
def test_items_and_patterns_are_checked_as_the_validator_has_them(
    value: bytes, is_good: bool, neighbour: bytes | None
) -> None:
    decoded = decode(make_batch([value, neighbour]), LISTS)
    assert 0 in decoded.rows["_offset"].to_pylist() if is_good else 0 in decoded.rejected["_offset"].to_pylist()


@pytest.mark.parametrize(
    ("field", "value", "is_good"),
    [
        ({"type": "integer", "minimum": 0.5}, "9007199254740993", True),
        ({"type": "integer", "minimum": 0.5}, "0", False),
        ({"type": "integer", "exclusiveMinimum": 0.5}, "1", True),
        ({"type": "integer", "exclusiveMaximum": 1.5}, "1", True),
        ({"type": "integer", "exclusiveMaximum": 1.5}, "2", False),
        ({"type": "integer", "maximum": 1e18}, "1000000000000000001", False),
        ({"type": "integer", "enum": [2.0]}, "2", True),
        ({"type": "number", "enum": [2**60, 0.5]}, "1152921504606846976", True),
        ({"type": "number", "enum": [0]}, "-0.0", True),
        ({"type": ["string", "null"], "enum": ["x"]}, "null", False),
        ({"type": "string", "pattern": "^a++$"}, '"aa"', True),
        ({"type": "string", "pattern": "^a++$"}, '"b"', False),
        ({"type": "string", "pattern": "^a{,3}$"}, '"a{,3}"', False),
        ({"type": "string", "pattern": "^[A-Z]{2}$"}, '"AB"', True),
        ({"type": "string", "pattern": "^(x{90}){90}$"}, '"x"', False),
        ({"type": "boolean", "enum": [True]}, "false", False),
    ],
)
def test_a_rule_holds_for_a_field_and_for_what_is_in_a_list(field: dict[str, Any], value: str, is_good: bool) -> None:
    for rules, text in ((field, value), ({"type": "array", "items": field}, f"[{value}]")):
        contract = Contract("rule@1", {"type": "object", "properties": {"a": rules}})
        for values in ([f'{{"a":{text}}}'], [f' {{"a":{text}}}'], [f'{{"a":{text}}}', "{"]):
            decoded = decode(make_batch([value.encode() for value in values]), contract)
            assert 0 in decoded.rows["_offset"].to_pylist() if is_good else (0, "schema_violation") in reasons(decoded)


@pytest.mark.parametrize("value", [b'{"big": 9007199254740993.0}', b'{"big": 1e18}', b'{"big": -9223372036854775809}'])
def test_an_integer_that_would_be_rounded_is_refused(value: bytes) -> None:
    decoded = decode(make_batch([b'{"id": "ab", "n": 1, ' + value[1:]]), CONTRACT)
    assert reasons(decoded) == [(0, "schema_violation")]


@pytest.mark.parametrize(
    "bad", [None, b"{", payload(n="1"), payload(kind="order"), payload(tags=[None]), b'{"id": "a\xffb", "n": 1}']
)
def test_one_bad_row_costs_one_dead_letter(bad: bytes | None) -> None:
    values = [payload(n=n) for n in range(20)]
    values[7:7] = [bad]  # type: ignore[list-item]  # a tombstone is a value too
    decoded = decode(make_batch(values, first_offset=100), CONTRACT)
    assert [offset for offset, _ in reasons(decoded)] == [107]
    assert decoded.rows["n"].to_pylist() == list(range(20))
    assert decoded.rows["_offset"].to_pylist() == [*range(100, 107), *range(108, 121)]


def test_an_object_cannot_reach_over_into_the_next_record() -> None:
    values = [b'{"u":', b'{"id": "ab", "n": 1}}', payload() + payload()]
    decoded = decode(make_batch(values), CONTRACT)
    assert [offset for offset, _ in reasons(decoded)] == [0, 1, 2]


def test_input_columns_tell_offset_broker_time_and_request() -> None:
    headers: list[Headers] = [None, [(REQUEST_ID_HEADER, b"r-1"), ("other", b"x")], [(REQUEST_ID_HEADER, b"\xff")]]
    decoded = decode(make_batch([payload(), payload(), payload()], first_offset=9, headers=headers), CONTRACT)
    assert decoded.rows["_offset"].to_pylist() == [9, 10, 11]
    assert decoded.rows["_broker_time"].to_pylist() == [1_000_000_000] * 3
    assert decoded.rows["_request_id"].to_pylist() == [None, "r-1", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, 1_000_000_000),
        ([(PRODUCED_TIME_HEADER, b"77")], 77),
        ([("other", b"77")], 1_000_000_000),
        ([(PRODUCED_TIME_HEADER, b"soon")], 1_000_000_000),
        ([(PRODUCED_TIME_HEADER, b"-5")], 1_000_000_000),
        ([(PRODUCED_TIME_HEADER, b"9" * 30)], 1_000_000_000),
        ([(PRODUCED_TIME_HEADER, "٣".encode())], 1_000_000_000),
        ([(PRODUCED_TIME_HEADER, None)], 1_000_000_000),
    ],
)
def test_a_record_came_when_its_header_says_where_it_says_so(header: Any, expected: int) -> None:
    assert arrival_times_us(make_batch([payload()], headers=[header])).tolist() == [expected]


# -- whatever the bytes, and whatever comes together -------------------------------------------------------------------

WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**53 + 1, 10**40]),
    st.floats(width=64),
    st.sampled_from([5.0, 1e300, -0.0, 0.1, 9.223372036854775807e18]),
    st.text(max_size=7),
    st.sampled_from(["", "AB", "ab", "view", "order", "null", "é" * 5, "\0", "\U0001f600"]),
    st.lists(st.one_of(st.text(max_size=3), st.none(), st.integers(0, 3)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
FIELD_NAMES = st.sampled_from([*CONTRACT.fields, "unknown", ""])
GOOD_ROWS = st.fixed_dictionaries(
    {"id": st.sampled_from(["ab", "xyz", "äö"]), "n": st.integers(-5, 2**63 - 1)},
    optional={
        "code": st.sampled_from(["AB", None]),
        "kind": st.sampled_from(["view", "click", None]),
        "big": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "x": st.floats(0, 10, exclude_min=True, exclude_max=True),
        "free": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        "flag": st.booleans(),
        "tags": st.lists(st.text(max_size=3), max_size=3),
    },
)


DAMAGE = [b"", b"\n", b"}", b"{", b'"', b",", b"\xff", b"null", b" ", b"1", b"NaN", b"\\ud800", b"\\udc00", b"0", b"."]


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    row = draw(GOOD_ROWS) | draw(st.dictionaries(FIELD_NAMES, WEIRD, max_size=2))
    dumped = json.dumps(row, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([(",", ":"), None])))
    return dumped.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    value = draw(objects())
    at = draw(st.integers(0, len(value)))
    to = draw(st.integers(at, min(len(value), at + 3)))
    return (
        value[:at]
        + draw(st.sampled_from([b"", b"\n", b"}", b"{", b'"', b",", b"\xff", b"null", b" ", b"1"]))
        + value[to:]
    )


PAYLOADS = st.one_of(
    st.just(payload()),
    GOOD_ROWS.map(lambda row: json.dumps(row).encode()),
    objects(),
    damaged(),
    st.none(),
    st.binary(max_size=8),
    WEIRD.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
)


def judge(value: bytes | None) -> str | None:
    """Tell the reason by the JSON parser and the validator alone."""
    try:
        document = orjson.loads(value or b"")
    except orjson.JSONDecodeError:
        return "decode_error"
    if not CONTRACT.validator.is_valid(document):
        return "schema_violation"
    for number in (document.get(name) or 0 for name in ("n", "big")):
        if not -(2**63) <= number < 2**63 or (isinstance(number, float) and abs(number) > 2**53):
            return "schema_violation"
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PAYLOADS, min_size=1, max_size=12))
@example([payload(), b'{"u":', b"{}}", payload() + payload()])
def test_rows_decode_the_same_together_and_alone(values: list[bytes | None]) -> None:
    together, apart = decode(make_batch(values), CONTRACT), decode_apart(values)
    assert reasons(together) == reasons(apart)
    assert together.rejected["detail"].to_pylist() == apart.rejected["detail"].to_pylist()
    assert repr(content(together)) == repr(content(apart))  # by repr: -0.0 is not 0.0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PAYLOADS, min_size=1, max_size=12))
def test_the_validator_decides_each_row(values: list[bytes | None]) -> None:
    decoded = decode(make_batch(values), CONTRACT)
    expected = [(at, reason) for at, value in enumerate(values) if (reason := judge(value)) is not None]
    assert reasons(decoded) == expected
    for row in content(decoded):
        document = orjson.loads(values[row.pop("_offset")] or b"")
        for name in ("x", "free"):
            document[name] = None if document.get(name) is None else float(document[name])
        assert row == {name: document.get(name) for name in CONTRACT.fields}


PERSONAL = Contract(
    "personal@1",
    {
        "type": "object",
        "properties": {
            "email": {"type": "string", "pattern": "^[^@]+@[^@]+$", "maxLength": 40, "x-pii": True},
            "phone": {"type": ["integer", "null"], "x-pii": True},
            "names": {"type": "array", "items": {"type": "string", "minLength": 3, "x-pii": True}},
            "n": {"type": "integer"},
        },
        "required": ["email"],
    },
)
HIDDEN = "hidden"


@pytest.mark.parametrize(
    ("payload", "detail"),
    [
        ({"email": HIDDEN}, '$.email: *** breaks `pattern` "^[^@]+@[^@]+$" (contract personal@1)'),
        ({"email": [HIDDEN]}, '$.email: *** breaks `type` "string" (contract personal@1)'),
        ({"email": "a@b", "names": [HIDDEN, 7]}, '$.names[1]: *** breaks `type` "string" (contract personal@1)'),
        ({"email": "a@b", "phone": HIDDEN}, '$.phone: *** breaks `type` ["integer", "null"] (contract personal@1)'),
        ({"email": "a@b", "phone": 2**70}, f"$.phone: *** does not fit 64 bits, expected {-(2**63)} to {2**63 - 1}"),
        ([HIDDEN], '$: *** breaks `type` "object" (contract personal@1)'),
        ({"phone": HIDDEN}, None),
        ({"email": "a@b", "n": "five"}, "$.n: 'five' is not of type 'integer' (contract personal@1)"),
    ],
)
def test_a_personal_value_is_in_no_detail(payload: Any, detail: str | None) -> None:
    rejected = decode(make_batch([json.dumps(payload).encode()]), PERSONAL).rejected
    (told,) = rejected["detail"].to_pylist()
    assert HIDDEN not in told
    assert told == detail or (detail is None and told.startswith("$: 'email' is a required property"))


def test_what_does_not_parse_is_not_quoted() -> None:
    for payload in (HIDDEN.encode(), b'{"email": "' + HIDDEN.encode(), b"\xff" + HIDDEN.encode()):
        (told,) = decode(make_batch([payload]), PERSONAL).rejected["detail"].to_pylist()
        assert HIDDEN not in told
