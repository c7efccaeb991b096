"""What becomes of raw bytes does not depend on the batch that they come in: any split gives the same columns."""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from schemas.contract import Contract
from streams.batch import PayloadColumn
from streams.decoded import DecodedBatch
from streams.decoding import decode
from tests.support.transport import make_batch

CONTRACT = Contract(
    "raw@1",
    {
        "type": "object",
        "properties": {
            "n": {"type": ["integer", "null"], "minimum": -1.5, "maximum": 2**63 - 1},
            "i": {"type": "integer", "enum": [0, 1, 2.0, 2**60 + 1]},
            "x": {"type": ["number", "null"], "exclusiveMinimum": -1e300, "maximum": 2**60},
            "y": {"type": "number"},
            "s": {"type": ["string", "null"], "pattern": "^[a-z]{0,3}$", "maxLength": 2},
            "t": {"type": "string", "pattern": r"^\w*$"},
            "k": {"type": ["string", "null"], "enum": ["a", "b"]},
            "f": {"type": "boolean", "enum": [True]},
            "l": {"type": "array", "items": {"type": ["number", "null"], "minimum": -3}},
            "ll": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "maximum": 9}}},
        },
        "required": ["n"],
    },
)
NUMBERS = st.sampled_from(
    [
        *("0", "-0", "0.0", "-0.0", "1", "1.0", "1e3", "1E+3", "10e-1", "-1", "-2", "2.5", "0.1", "-0e0", "-1e-400"),
        *("1e18", "1e19", "1e308", "1e400", "1e-400", "4.9e-324", "0.30000000000000004", "9007199254740993"),
        *("9007199254740993.0", "1152921504606846976", "1152921504606846977", "9223372036854775807"),
        *("9223372036854775808", "-9223372036854775808", "-9223372036854775809", "18446744073709551615"),
        *("18446744073709551616", "123456789012345678901234567890"),
        *("00", "01", "+1", "1.", ".5", "-", "1e", "NaN", "-NaN", "Infinity", "-Infinity", "Inf", "nan", "0x1", "1_0"),
    ]
)
TEXTS = st.one_of(
    st.sampled_from(
        [
            *('""', '"a"', '"ab"', '"abc"', '"b"', '"a\\n"', '"\\u0061"', '"\\u0000"', '"\\ud83d\\ude00"', '"\\ud800"'),
            *('"\\udc00\\ud800"', '"\\/"', '"\\x"', '"\\u12"', '"a\tb"', '"a\nb"', '"NaN"', '":NaN"', '"[Infinity"'),
            *('"null"', '"{}"', '"}\\n{"', '"', '"\\"', "'a'", '"\u00e9"', '"\u0663"', '"\u2028"', '"\U0001f600"'),
        ]
    ),
    st.text(max_size=3).map(lambda text: f'"{text}"'),
)
WORDS = st.sampled_from(["null", "true", "false", "nul", "True", "None", "{}", "[]", "", "/**/1", "undefined"])
SCALARS = st.one_of(NUMBERS, TEXTS, WORDS)
SPACE = st.sampled_from(["", "", "", "", " ", "\t", "\n", "\r\n", "\u00a0", "\f", "\0"])


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(st.tuples(st.sampled_from(["n", "a", "l"]), inner), max_size=2).map(written),
        st.builds(
            lambda item, depth: "[" * depth + item + "]" * depth,
            inner,
            st.sampled_from([1, 2, 509, 510, 511, 512, 900]),
        ),
    )


def written(members: Sequence[tuple[str, str]]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in members) + "}"


VALUES = st.one_of(SCALARS, SCALARS, st.recursive(SCALARS, nested, max_leaves=4))
FITTING = st.one_of(
    st.tuples(
        st.sampled_from(["n", "x", "y"]), st.sampled_from(["0", "-0", "-0.0", "1", "null", "7", "1.5", "-1e-400"])
    ),
    st.tuples(st.sampled_from(["s", "t", "k"]), st.sampled_from(['"a"', '"b"', '""', "null", '"\\u0061"'])),
    st.tuples(st.just("l"), st.sampled_from(["[]", "[-0]", "[-0.0,1]", "[null,2.5]", "[null]", "null", "[1e3,-4]"])),
    st.tuples(st.just("ll"), st.sampled_from(["[]", "[[]]", "[[1],[]]", "[[1.0]]", "[null]", "[[null]]", "[[10]]"])),
)
NAMES = st.sampled_from([*CONTRACT.fields, "other", "", "N", "\\u006e"])


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    members = [("n", draw(st.sampled_from(["1", "1", "1", "0", "-0", "1.0"])))]
    members += draw(st.lists(FITTING, max_size=3))
    members += draw(st.lists(st.tuples(NAMES, VALUES), max_size=2))
    text = written(draw(st.permutations(members)) if draw(st.booleans()) else list(dict(members).items()))
    odd = draw(st.integers(0, 9))
    if odd == 0:
        text = draw(SPACE) + text + draw(SPACE)
    elif odd == 1:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", *'{}[]",:\n\\0'])) + text[at + 1 :]
    elif odd == 2:
        whole = ["\ufeff" + text, text + "x", text + text, text + "\n" + text, f"[{text}]", text[1:]]
        text = draw(st.sampled_from(whole))
    value = text.encode("utf-8", "surrogatepass")
    if odd == 3:
        at = draw(st.integers(0, len(value)))
        no_utf8 = st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"])
        value = value[:at] + draw(no_utf8) + value[at:]
    return value


OTHERS = st.sampled_from([None, b"", b"{}", b'{"n":1}', b"null", b"1", b'"n"'])
ALL = st.one_of(payloads(), payloads(), payloads(), OTHERS)


def content(parts: Sequence[DecodedBatch]) -> str:
    """All that was decoded, to the bit: in text, -0.0 is not 0.0, and NaN is NaN."""
    rows = pa.concat_tables([part.rows for part in parts])
    rejected = pa.concat_tables([part.rejected for part in parts])
    rows.validate(full=True)
    return "\n".join(map(repr, [rows.schema, *rows.to_pylist(), *rejected.to_pylist()]))


def decode_split(values: Sequence[bytes | None], edges: Sequence[int]) -> str:
    parts = [
        decode(make_batch(list(values[start:stop]), first_offset=start), CONTRACT)
        for start, stop in zip([0, *edges], [*edges, len(values)], strict=True)
        if start < stop
    ]
    return content(parts)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(ALL, min_size=2, max_size=10), st.data())
@example([b'{"n":1,"x":-0}', b"{"], None)
@example([b'{"n":1,"l":[-0,null]}', b'{"n":-0}', b'{"n":1.0,"x":-0.0}'], None)
@example([b'{"n":1,"other":[{"a":1,"a":2}],"other":3}', b'{"n":1,"n":2}'], None)
@example([b'{"n":18446744073709551615}', b'{"n":1,"x":1152921504606846977}'], None)
def test_any_split_of_raw_bytes_into_batches_gives_the_same_columns(
    values: list[bytes | None], data: st.DataObject | None
) -> None:
    alone = decode_split(values, range(1, len(values)))
    assert decode_split(values, []) == alone
    archived = pa.array([b"before", *values, None], pa.binary())[1 : len(values) + 1]
    assert content([decode(replace(make_batch(values), values=PayloadColumn(archived)), CONTRACT)]) == alone
    if data is not None:
        edges = sorted(data.draw(st.sets(st.integers(1, len(values) - 1)), label="edges"))
        assert decode_split(values, edges) == alone
