import pyarrow as pa
import pytest

from schemas.errors import ConfigError
from schemas.expression import FUNCTION_NAMES, parse_derivation, parse_expression

COLUMNS = pa.schema(
    [
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("kind", pa.string()),
        ("flag", pa.bool_()),
        ("tags", pa.list_(pa.string())),
    ]
)
ROWS = pa.table(
    {
        "n": [1, 2, None, -4],
        "x": [1.5, 0.0, 2.0, None],
        "kind": ["click", "View", None, "zz"],
        "flag": [True, None, False, True],
        "tags": [["a"], [], None, ["b"]],
    },
    schema=COLUMNS,
)


def passing(text: str) -> list[int]:
    """Rows that pass a filter."""
    mask = parse_expression(text, columns=COLUMNS, where="here").mask(ROWS)
    return [row for row, passes in enumerate(mask.tolist()) if passes]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("n == 1", [0]),
        ("n != 1", [1, 3]),
        ("n > 1.5", [1]),
        ("0 < n <= 2", [0, 1]),
        ("-4 <= n < x", [0]),
        ("kind == 'click'", [0]),
        ("kind in ('click', 'zz')", [0, 3]),
        ("kind not in ('click',)", [1, 3]),
        ("n in [1, -4]", [0, 3]),
        ("n is null", [2]),
        ("n is not null and not flag", []),
        ("n is None", [2]),
        ("flag", [0, 3]),
        ("not flag", [2]),
        ("flag == true", [0, 3]),
        ("flag or n == 2", [0, 1, 3]),
        ("tags is null", [2]),
        ("true", [0, 1, 2, 3]),
        ("null", []),
        ("n + 1 == 2", [0]),
        ("n * 2 - 1 > 0", [0, 1]),
        ("n / x > 0", [0]),
        ("n % 3 == 2", [1, 3]),
        ("-n < -1", [1]),
        ("+n == 2", [1]),
        ("abs(n) == 4", [3]),
        ("floor(x) == 1 and ceil(x) == 2", [0]),
        ("lower(kind) == 'view'", [1]),
        ("upper(kind) == 'ZZ'", [3]),
        ("length(kind) == 2", [3]),
        ("starts_with(kind, 'V') or ends_with(kind, 'k')", [0, 1]),
        ("contains(kind, 'ie')", [1]),
        ("(n == 1 or n == 2) and x > 1", [0]),
    ],
)
def test_rows_that_pass(text: str, rows: list[int]) -> None:
    assert passing(text) == rows


def test_a_null_makes_a_comparison_null_and_logic_is_three_valued() -> None:
    assert passing("n > 0 or kind is null") == [0, 1, 2]
    assert passing("not (n > 0)") == [3]


def test_division_by_zero_is_null() -> None:
    assert passing("n / x is null") == [1, 2, 3]
    assert passing("n % x is null") == [1, 2, 3]


def test_whole_numbers_are_compared_exactly_and_calculated_in_float64() -> None:
    big = pa.table({"n": [2**63 - 1, 2**53 + 1]}, schema=pa.schema([("n", pa.int64())]))
    exact = parse_expression("n == 9007199254740993", columns=big.schema, where="here")
    added = parse_expression("n + 1 > 0", columns=big.schema, where="here")

    assert exact.mask(big).tolist() == [False, True]
    assert added.mask(big).tolist() == [True, True]


def test_it_names_the_columns_that_it_reads() -> None:
    assert parse_expression("x > 1 and n > x", columns=COLUMNS, where="here").columns == ("n", "x")


def test_it_reads_record_batches_and_chunked_tables() -> None:
    expression = parse_expression("n == 1", columns=COLUMNS, where="here")
    chunked = pa.concat_tables([ROWS, ROWS])

    assert expression.mask(ROWS.to_batches()[0]).tolist() == [True, False, False, False]
    assert expression.mask(chunked).tolist() == [True, False, False, False] * 2
    assert expression.mask(ROWS.slice(0, 0)).tolist() == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        (None, "is empty"),
        ("n ==", "can't be parsed"),
        ("n = 1", "can't be parsed"),
        ("(" * 300 + "n" + ")" * 300, "can't be parsed"),
        ("not " * 60 + "flag", "nested deeper than"),
        ("missing == 1", "reads 'missing', expected one of the columns \\['n', 'x', 'kind', 'flag', 'tags'\\]"),
        ("n", "is a number, expected a condition"),
        ("kind", "is a text, expected a condition"),
        ("tags", "is a other, expected a condition"),
        ("n and flag", "uses 'n' \\(a number\\) as a condition"),
        ("n == 'a'", "compares a number with a text"),
        ("tags == tags", "compares a other with a other"),
        ("n == null", "compares with null"),
        ("n is 1", "uses `is` with '1'"),
        ("kind + 1 > 0", "calculates with 'kind' \\(a text\\)"),
        ("n // 2 == 1", "uses 'n // 2', which is not part of the language"),
        ("n ** 2 == 1", "not part of the language"),
        ("~n == 1", "not part of the language"),
        ("n in kind", "uses `in` with 'kind'"),
        ("n in ()", "uses `in` with '\\(\\)'"),
        ("n in ('a',)", "has 'a' among its choices|has \"'a'\" among its choices"),
        ("n in (x,)", "among its choices"),
        ("tags in ('a',)", "uses `in` with 'tags' \\(a other\\)"),
        ("n == 99999999999999999999", "uses the literal 99999999999999999999"),
        ("x == 1e999", "uses the literal inf"),
        ("kind == b'a'", "uses the literal b'a'"),
        ("exp(n) > 1", "calls 'exp', expected one of the functions"),
        ("kind.upper() == 'A'", "calls 'kind.upper'"),
        ("__import__('os').system('true') == 0", "calls"),
        ("lower(n) == 'a'", "expected lower\\(text\\)"),
        ("lower(kind, kind) == 'a'", "expected lower\\(text\\)"),
        ("starts_with(kind, kind)", "expected starts_with\\(text, text literal\\)"),
        ("abs(x=n) > 1", "expected abs\\(number\\)"),
        ("n if flag else x", "not part of the language"),
        ("(lambda: flag)()", "calls"),
        ("[n for n in tags] == 1", "not part of the language"),
        ("kind[0] == 'a'", "not part of the language"),
        ("(n := 1) == 1", "not part of the language"),
    ],
)
def test_what_is_not_part_of_the_language_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: `where` .*({says})"):
        parse_expression(text, columns=COLUMNS, where="here")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a / b", [2.0, None, None]),
        ("log1p(a)", [0.69314718056, 2.397895272798, None]),
        ("log1p(-1)", [None, None, None]),
        ("sqrt(b - 1)", [None, None, None]),
        ("sqrt(a) + 1", [2.0, 4.16227766016838, None]),
        ("coalesce(a, b, 0)", [1.0, 10.0, 0.0]),
        ("bucketize(a, 1, 10.5)", [1.0, 1.0, None]),
        ("a > 1", [False, True, None]),
        ("upper('x')", ["X", "X", "X"]),
        ("1", [1.0, 1.0, 1.0]),
    ],
)
def test_a_derivation_gives_a_column(text: str, values: list[object]) -> None:
    table = pa.table({"a": pa.array([1, 10, None], pa.int64()), "b": pa.array([0.5, 0.0, None])})
    column = parse_derivation(text, columns=table.schema, where="here").column(table)

    assert column.to_pylist() == pytest.approx(values, abs=1e-14)


def test_every_function_is_known_by_name() -> None:
    assert FUNCTION_NAMES == (
        "abs",
        "bucketize",
        "ceil",
        "coalesce",
        "contains",
        "ends_with",
        "floor",
        "length",
        "log1p",
        "lower",
        "sqrt",
        "starts_with",
        "upper",
    )
