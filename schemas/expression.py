"""Row filters and derived features: a small safe expression language, compiled to Arrow compute calls.

``event_type == 'click' and (amount > 10 or country in ('CH', 'AT'))`` is parsed by Python's own parser and then checked
node by node against a list of what is allowed; nothing is ever evaluated as Python.

- Comparisons ``== != < <= > >=`` (chains too), ``in``, ``not in``, ``is null``, ``is not null``. Whole numbers are
  compared exactly; with a float they are compared in float64, which rounds those beyond 2**53.
- ``and``, ``or``, ``not`` in three-valued logic; a comparison with null is null. A row passes where the filter is true.
- Arithmetic ``+ - * / %`` in float64; division by zero is null; ``%`` takes the sign of its divisor.
- Functions: see :data:`FUNCTION_NAMES`.
- Literals: numbers, text, ``true``, ``false``, ``null``.
"""

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ConfigError

Evaluate = Callable[[Any], Any]
"""Computes a column (or a scalar) from a record batch or table."""


@dataclass(frozen=True)
class _Node:
    kind: str
    evaluate: Evaluate


@dataclass(frozen=True)
class Expression:
    """A checked expression, ready to run over columns.

    Attributes:
        text: As the user wrote it.
        columns: Names of the columns it reads, sorted.
        kind: ``"boolean"``, ``"number"``, ``"text"`` or ``"other"``.
    """

    text: str
    columns: tuple[str, ...]
    kind: str
    _evaluate: Evaluate

    def mask(self, batch: pa.RecordBatch | pa.Table) -> npt.NDArray[np.bool_]:
        """Tell which rows pass, ``(n_rows,)``; null is false."""
        result = self._evaluate(batch)
        if isinstance(result, pa.Scalar):
            return np.full(batch.num_rows, bool(result.as_py()), dtype=np.bool_)
        if isinstance(result, pa.ChunkedArray):
            result = result.combine_chunks()
        mask: npt.NDArray[np.bool_] = pc.fill_null(result, fill_value=False).to_numpy(zero_copy_only=False)
        return mask

    @property
    def arrow_type(self) -> pa.DataType:
        """Type of :meth:`column`: every number is a float64."""
        return _TYPES[self.kind]

    def column(self, batch: pa.RecordBatch | pa.Table) -> pa.Array:
        """Value for each row."""
        result = self._evaluate(batch)
        if isinstance(result, pa.Scalar):
            return pa.repeat(result.cast(self.arrow_type), batch.num_rows)
        if isinstance(result, pa.ChunkedArray):
            result = result.combine_chunks()
        return _as_float(result) if self.kind == "number" else result.cast(self.arrow_type)


_TYPES: Final = {"number": pa.float64(), "boolean": pa.bool_(), "text": pa.string()}


_COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, Callable[..., Any]]]] = {
    ast.Eq: ("==", pc.equal),
    ast.NotEq: ("!=", pc.not_equal),
    ast.Lt: ("<", pc.less),
    ast.LtE: ("<=", pc.less_equal),
    ast.Gt: (">", pc.greater),
    ast.GtE: (">=", pc.greater_equal),
}


def _divide(left: Any, right: Any) -> Any:
    return pc.divide(left, pc.if_else(pc.equal(right, 0.0), pa.scalar(None, pa.float64()), right))


def _modulo(left: Any, right: Any) -> Any:
    return pc.subtract(left, pc.multiply(right, pc.floor(_divide(left, right))))


_ARITHMETIC: Final[dict[type[ast.operator], tuple[str, Callable[..., Any]]]] = {
    ast.Add: ("+", pc.add),
    ast.Sub: ("-", pc.subtract),
    ast.Mult: ("*", pc.multiply),
    ast.Div: ("/", _divide),
    ast.Mod: ("%", _modulo),
}


@dataclass(frozen=True)
class _Signature:
    arguments: tuple[str, ...]
    result: str
    compute: Callable[..., Any]
    is_variadic: bool = False

    def wanted(self, n_arguments: int) -> tuple[str, ...]:
        """Kinds of this many arguments; the last one is repeated where that is allowed."""
        return self.arguments + self.arguments[-1:] * (n_arguments - len(self.arguments) if self.is_variadic else 0)

    def __str__(self) -> str:
        return ", ".join(self.arguments) + (", …" if self.is_variadic else "")


def _literal_pattern(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda values, pattern: function(values, pattern=pattern.as_py())


def _log1p(value: Any) -> Any:
    number = _as_float(value)
    logarithm = pc.log1p(_where(pc.greater(number, -1.0), number))
    # Rounded, so that the last bit of a machine's logarithm does not show; pc.round is off by up to 1e-12 itself.
    return pc.divide(pc.floor(pc.add(pc.multiply(logarithm, 1e12), 0.5)), 1e12)


def _sqrt(value: Any) -> Any:
    number = _as_float(value)
    return pc.sqrt(_where(pc.greater_equal(number, 0.0), number))


def _where(is_defined: Any, value: Any) -> Any:
    return pc.if_else(is_defined, value, pa.scalar(None, pa.float64()))


def _bucketize(value: Any, *edges: Any) -> Any:
    number = _as_float(value)
    buckets = pc.multiply(pc.equal(number, number).cast(pa.float64()), 0.0)
    for edge in edges:
        buckets = pc.add(buckets, pc.greater_equal(number, _as_float(edge)).cast(pa.float64()))
    return buckets


_FUNCTIONS: Final[dict[str, _Signature]] = {
    "abs": _Signature(("number",), "number", lambda x: pc.abs(_as_float(x))),
    "floor": _Signature(("number",), "number", lambda x: pc.floor(_as_float(x))),
    "ceil": _Signature(("number",), "number", lambda x: pc.ceil(_as_float(x))),
    "log1p": _Signature(("number",), "number", _log1p),
    "sqrt": _Signature(("number",), "number", _sqrt),
    "coalesce": _Signature(
        ("number", "number"), "number", lambda *xs: pc.coalesce(*map(_as_float, xs)), is_variadic=True
    ),
    "bucketize": _Signature(("number", "number literal"), "number", _bucketize, is_variadic=True),
    "lower": _Signature(("text",), "text", pc.utf8_lower),
    "upper": _Signature(("text",), "text", pc.utf8_upper),
    "length": _Signature(("text",), "number", pc.utf8_length),
    "starts_with": _Signature(("text", "text literal"), "boolean", _literal_pattern(pc.starts_with)),
    "ends_with": _Signature(("text", "text literal"), "boolean", _literal_pattern(pc.ends_with)),
    "contains": _Signature(("text", "text literal"), "boolean", _literal_pattern(pc.match_substring)),
}
FUNCTION_NAMES: Final = tuple(sorted(_FUNCTIONS))
"""Functions of the language: ``abs floor ceil log1p sqrt`` of a number, ``coalesce`` of numbers (the first that is not
null), ``bucketize`` of a number and rising edges (how many of them it reaches), ``lower upper length`` of text, and
``starts_with``, ``ends_with`` and ``contains`` of text and a text literal. ``log1p`` and ``sqrt`` are null where they
are not defined; ``log1p`` is rounded to 12 decimals."""

_ALLOWED: Final = (
    "comparisons, and/or/not, in, is null, + - * / %, parentheses, literals, columns and the functions "
    + ", ".join(FUNCTION_NAMES)
)
_WORDS: Final[dict[str, Any]] = {"null": None, "true": True, "false": False}
_MAX_DEPTH: Final = 50


def parse_expression(text: str, *, columns: pa.Schema, where: str) -> Expression:
    """Parse and check a row filter.

    Args:
        text: The filter, e.g. ``"event_type == 'click'"``.
        columns: Columns it may read.
        where: Place it stands in, e.g. ``"view user_activity, feature 'clicks_5m'"``, for error messages.

    Raises:
        ConfigError: It is no expression of the language, reads an unknown column, mixes kinds, or is no condition.
    """
    compiler = _Compiler(text=text, columns=columns, where=where)
    node = compiler.compile()
    if node.kind not in {"boolean", "null"}:
        compiler.fail(f"is a {node.kind}", "a condition that is true or false, such as \"event_type == 'click'\"")
    return Expression(text=text, columns=tuple(sorted(compiler.used)), kind=node.kind, _evaluate=node.evaluate)


def parse_derivation(text: str, *, columns: pa.Schema, where: str) -> Expression:
    """Parse and check the expression of a derived feature: a number (float64), a condition or a text.

    Args:
        text: The expression, e.g. ``"clicks_5m / clicks_1h"``.
        columns: The features it may read.
        where: Place it stands in, for error messages.

    Raises:
        ConfigError: It is no expression of the language, reads an unknown feature, mixes kinds, or has no kind.
    """
    compiler = _Compiler(text=text, columns=columns, where=where, field="derived")
    node = compiler.compile()
    if node.kind not in _TYPES:
        compiler.fail(f"is a {node.kind}", 'a number, a condition or a text, such as "clicks_5m / clicks_1h"')
    return Expression(text=text, columns=tuple(sorted(compiler.used)), kind=node.kind, _evaluate=node.evaluate)


def names_read(text: object) -> frozenset[str]:
    """Names in an expression that may be columns; none where it can't be parsed."""
    try:
        tree = ast.parse(text.strip(), mode="eval") if isinstance(text, str) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    return frozenset() if tree is None else frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))


class _Compiler:
    """Turns one expression's syntax tree into nodes, refusing whatever is not listed."""

    def __init__(self, *, text: str, columns: pa.Schema, where: str, field: str = "where") -> None:
        self.text = text
        self.field = field
        self.columns = columns
        self.where = where
        self.used: set[str] = set()

    def fail(self, got: str, expected: str) -> NoReturn:
        msg = f"{self.where}: `{self.field}` {self.text!r} {got}, expected {expected}"
        raise ConfigError(msg)

    def compile(self) -> _Node:
        if not isinstance(self.text, str) or not self.text.strip():
            remedies = {
                "where": "a condition; leave `where` out for all rows",
                "derived": "an expression over features",
            }
            self.fail("is empty", remedies[self.field])
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            self.fail(f"can't be parsed ({getattr(exc, 'msg', exc)})", _ALLOWED)
        return self.node(tree.body, depth=0)

    def node(self, tree: ast.expr, *, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            self.fail(f"is nested deeper than {_MAX_DEPTH} levels", "a flatter condition")
        if isinstance(tree, ast.Constant):
            return self.literal(tree.value)
        if isinstance(tree, ast.Name):
            return self.name(tree.id)
        compile_part: dict[type[ast.expr], Callable[..., _Node]] = {
            ast.BoolOp: self.logic,
            ast.UnaryOp: self.unary,
            ast.BinOp: self.arithmetic,
            ast.Compare: self.comparison,
            ast.Call: self.call,
        }
        if (part := compile_part.get(type(tree))) is None:
            self.fail(f"uses {ast.unparse(tree)!r}, which is not part of the language", _ALLOWED)
        return part(tree, depth=depth)

    def literal(self, value: object) -> _Node:
        if value is None:
            return _Node("null", lambda _: pa.scalar(None, pa.bool_()))
        arrow: pa.DataType
        if isinstance(value, bool):
            kind, arrow = "boolean", pa.bool_()
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            kind, arrow = "number", pa.int64()
        elif isinstance(value, float) and math.isfinite(value):
            kind, arrow = "number", pa.float64()
        elif isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value):
            kind, arrow = "text", pa.string()
        else:
            self.fail(f"uses the literal {value!r}", "64-bit numbers, text in Unicode, true, false or null")
        scalar = cache(lambda: pa.scalar(value, arrow))  # made once it is used: for a number Arrow loads pandas
        return _Node(kind, lambda _: scalar())

    def name(self, name: str) -> _Node:
        if name in self.columns.names:
            self.used.add(name)
            return _Node(_kind(self.columns.field(name).type), lambda batch: batch.column(name))
        if name in _WORDS:
            return self.literal(_WORDS[name])
        return self.fail(f"reads {name!r}", f"one of the columns {self.columns.names}")

    def logic(self, tree: ast.BoolOp, *, depth: int) -> _Node:
        operands = [self.condition(value, depth=depth) for value in tree.values]
        combine = pc.and_kleene if isinstance(tree.op, ast.And) else pc.or_kleene
        first, *rest = operands

        def evaluate(batch: Any) -> Any:
            result = first(batch)
            for operand in rest:
                result = combine(result, operand(batch))
            return result

        return _Node("boolean", evaluate)

    def condition(self, tree: ast.expr, *, depth: int) -> Evaluate:
        node = self.node(tree, depth=depth + 1)
        if node.kind not in {"boolean", "null"}:
            self.fail(f"uses {ast.unparse(tree)!r} (a {node.kind}) as a condition", "something that is true or false")
        return node.evaluate

    def unary(self, tree: ast.UnaryOp, *, depth: int) -> _Node:
        if isinstance(tree.op, ast.Not):
            operand = self.condition(tree.operand, depth=depth)
            return _Node("boolean", lambda batch: pc.invert(operand(batch)))
        if isinstance(tree.op, ast.USub | ast.UAdd):
            sign = -1 if isinstance(tree.op, ast.USub) else 1
            if isinstance(tree.operand, ast.Constant) and type(tree.operand.value) in {int, float}:
                return self.literal(sign * tree.operand.value)  # type: ignore[operator]  # checked to be a number above
            inner = self.number(tree.operand, depth=depth)
            return _Node("number", (lambda batch: pc.negate(inner(batch))) if sign < 0 else inner)
        return self.fail(f"uses {ast.unparse(tree)!r}, which is not part of the language", _ALLOWED)

    def number(self, tree: ast.expr, *, depth: int) -> Evaluate:
        node = self.node(tree, depth=depth + 1)
        if node.kind not in {"number", "null"}:
            self.fail(f"calculates with {ast.unparse(tree)!r} (a {node.kind})", "a number there")
        return lambda batch: _as_float(node.evaluate(batch))

    def arithmetic(self, tree: ast.BinOp, *, depth: int) -> _Node:
        if type(tree.op) not in _ARITHMETIC:
            self.fail(f"uses {ast.unparse(tree)!r}, which is not part of the language", _ALLOWED)
        _, compute = _ARITHMETIC[type(tree.op)]
        left, right = self.number(tree.left, depth=depth), self.number(tree.right, depth=depth)
        return _Node("number", lambda batch: compute(left(batch), right(batch)))

    def comparison(self, tree: ast.Compare, *, depth: int) -> _Node:
        parts: list[Evaluate] = []
        left = tree.left
        for operator, right in zip(tree.ops, tree.comparators, strict=True):
            parts.append(self.compare(left, operator, right, depth=depth))
            left = right
        if len(parts) == 1:
            return _Node("boolean", parts[0])

        def evaluate(batch: Any) -> Any:
            result = parts[0](batch)
            for part in parts[1:]:
                result = pc.and_kleene(result, part(batch))
            return result

        return _Node("boolean", evaluate)

    def compare(self, left: ast.expr, operator: ast.cmpop, right: ast.expr, *, depth: int) -> Evaluate:
        shown = f"{ast.unparse(left)} … {ast.unparse(right)}"
        if isinstance(operator, ast.Is | ast.IsNot):
            is_null = (isinstance(right, ast.Constant) and right.value is None) or (
                isinstance(right, ast.Name) and right.id == "null" and "null" not in self.columns.names
            )
            if not is_null:
                self.fail(
                    f"uses `is` with {ast.unparse(right)!r}", "`is null` or `is not null`; compare values with =="
                )
            inner = self.node(left, depth=depth + 1).evaluate
            check = pc.is_null if isinstance(operator, ast.Is) else pc.is_valid
            return lambda batch: check(inner(batch))
        if isinstance(operator, ast.In | ast.NotIn):
            return self.membership(left, right, is_negated=isinstance(operator, ast.NotIn), depth=depth)
        _, compute = _COMPARISONS[type(operator)]
        a, b = self.node(left, depth=depth + 1), self.node(right, depth=depth + 1)
        if "null" in {a.kind, b.kind}:
            self.fail(f"compares with null in {shown!r}, which is never true", "`is null` or `is not null`")
        if a.kind != b.kind or a.kind == "other":
            self.fail(f"compares a {a.kind} with a {b.kind} in {shown!r}", "two numbers, two texts or two booleans")
        if a.kind == "number":
            return lambda batch: compute(*_same_width(a.evaluate(batch), b.evaluate(batch)))
        return lambda batch: compute(a.evaluate(batch), b.evaluate(batch))

    def membership(self, left: ast.expr, right: ast.expr, *, is_negated: bool, depth: int) -> Evaluate:
        if not isinstance(right, ast.Tuple | ast.List | ast.Set) or not right.elts:
            self.fail(f"uses `in` with {ast.unparse(right)!r}", "a list of literals such as ('CH', 'AT')")
        node = self.node(left, depth=depth + 1)
        if node.kind not in {"number", "text", "boolean"}:
            self.fail(f"uses `in` with {ast.unparse(left)!r} (a {node.kind})", "a number, text or boolean there")
        candidates = []
        for element in right.elts:
            item = self.node(element, depth=depth + 1)
            if not self.is_literal(element) or item.kind != node.kind:
                self.fail(f"has {ast.unparse(element)!r} among its choices", f"literals that are {node.kind}s")
            candidates.append(item.evaluate)

        def evaluate(batch: Any) -> Any:
            value = node.evaluate(batch)
            result = pa.scalar(False, pa.bool_())
            for candidate in candidates:
                other = candidate(batch)
                pair = _same_width(value, other) if node.kind == "number" else (value, other)
                result = pc.or_kleene(result, pc.equal(*pair))
            return pc.invert(result) if is_negated else result

        return evaluate

    def is_literal(self, tree: ast.expr) -> bool:
        if isinstance(tree, ast.UnaryOp):
            return isinstance(tree.operand, ast.Constant)
        is_word = isinstance(tree, ast.Name) and tree.id in _WORDS and tree.id not in self.columns.names
        return is_word or isinstance(tree, ast.Constant)

    def call(self, tree: ast.Call, *, depth: int) -> _Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ast.unparse(tree.func)
        signature = _FUNCTIONS.get(name)
        if signature is None or not isinstance(tree.func, ast.Name):
            self.fail(f"calls {name!r}", f"one of the functions {list(FUNCTION_NAMES)}")
        wanted_kinds = signature.wanted(len(tree.args))
        if tree.keywords or len(tree.args) != len(wanted_kinds):
            self.fail(f"calls {ast.unparse(tree)!r}", f"{name}({signature})")
        arguments = []
        for argument, wanted in zip(tree.args, wanted_kinds, strict=True):
            node = self.node(argument, depth=depth + 1)
            is_wrong = wanted.endswith(" literal") and not self.is_literal(argument)
            if is_wrong or node.kind != wanted.removesuffix(" literal"):
                self.fail(f"calls {ast.unparse(tree)!r}", f"{name}({signature})")
            arguments.append(node.evaluate)
        if name == "bucketize":
            edges = [float(ast.literal_eval(argument)) for argument in tree.args[1:]]
            if sorted(set(edges)) != edges:
                self.fail(f"calls {ast.unparse(tree)!r}", "edges that rise, such as bucketize(n, 1, 10, 100)")
        return _Node(signature.result, lambda batch: signature.compute(*(value(batch) for value in arguments)))


def _kind(arrow: pa.DataType) -> str:
    if pa.types.is_boolean(arrow):
        return "boolean"
    if pa.types.is_integer(arrow) or pa.types.is_floating(arrow):
        return "number"
    return "text" if pa.types.is_string(arrow) or pa.types.is_large_string(arrow) else "other"


def _as_float(value: Any) -> Any:
    # Unsafe only in name: integers beyond 2**53 are rounded, which is what float64 arithmetic means.
    return value if pa.types.is_float64(value.type) else pc.cast(value, pa.float64(), safe=False)


def _same_width(left: Any, right: Any) -> tuple[Any, Any]:
    if pa.types.is_integer(left.type) and pa.types.is_integer(right.type):
        return left, right
    return _as_float(left), _as_float(right)
