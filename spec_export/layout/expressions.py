"""The small expression language of the templates: ``2 * H if i == 0 else H``.

Templates are data that people send us, so an expression is parsed into Python's
syntax tree and only what is listed here is evaluated: numbers, strings, booleans,
names, arithmetic, comparisons, and/or/not and the conditional. No call, attribute
or subscript exists.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from string import Formatter
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class ExpressionError(ValueError):
    """An expression that is not part of the language, or a name that is unknown."""


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as exc:
        raise ExpressionError(f"{text!r} is not an expression") from exc


def evaluate(text: str | int | bool, values: Mapping[str, Any]) -> Any:
    """Compute an expression.

    Args:
        text: The expression; a number or boolean of the YAML file is itself.
        values: The names that it may use.

    Returns:
        Its value: a number, string, boolean or list.

    Raises:
        ExpressionError: on anything outside the language, an unknown name or an
            operation that its operands do not have.
    """
    if not isinstance(text, str):
        return text
    try:
        return _value(_parse(text), values)
    except ExpressionError as exc:
        raise ExpressionError(f"{text!r}: {exc}") from exc
    except (TypeError, ZeroDivisionError) as exc:
        raise ExpressionError(f"{text!r}: {exc}") from exc


def names(text: str | int | bool) -> set[str]:
    """The names that an expression uses."""
    if not isinstance(text, str):
        return set()
    return {n.id for n in ast.walk(_parse(text)) if isinstance(n, ast.Name)}


def fields(text: str) -> set[str]:
    """The names between braces in a sentence: ``"is {W}, not {P}"``.

    Raises:
        ExpressionError: on anything but a plain name between the braces.
    """
    try:
        found = {
            field for _, field, _, _ in Formatter().parse(text) if field is not None
        }
    except ValueError as exc:
        raise ExpressionError(f"{text!r}: {exc}") from exc
    odd = sorted(field for field in found if not field.isidentifier())
    if odd:
        raise ExpressionError(f"{text!r}: {{{odd[0]}}} is not a name")
    return found


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if name not in values:
                raise ExpressionError(f"unknown name {name}")
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            return any(_value(part, values) for part in parts)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, values) else orelse, values)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return [_value(e, values) for e in elts]
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return _comparison(left, ops, comparators, values)
    raise ExpressionError(f"{ast.unparse(node)} is not allowed here")


def _comparison(
    left: ast.expr,
    ops: list[ast.cmpop],
    comparators: list[ast.expr],
    values: Mapping[str, Any],
) -> bool:
    a = _value(left, values)
    for op, right in zip(ops, comparators, strict=True):
        b = _value(right, values)
        if type(op) not in _COMPARE:
            raise ExpressionError("is / is not are not part of the language")
        if not _COMPARE[type(op)](a, b):
            return False
        a = b
    return True
