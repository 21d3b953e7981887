"""Expressions for patterns: names, whole numbers, lists of them, `|` and `&`. The text is parsed and never executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from spanformer.attention.pattern.base import Pattern

LONGEST = 10_000  # characters


def read(text: str, kinds: Mapping[str, type[Pattern]]) -> Pattern:
    if len(text) > LONGEST:
        raise ValueError(f"a pattern has {len(text):,} characters; expected at most {LONGEST:,}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not a pattern; expected one such as 'Window(256) | Global([0])'") from None
    try:
        return _pattern(tree, kinds, text)
    except RecursionError:
        raise ValueError(f"the pattern {text[:40]!r}… has too many parts; combine fewer by | and &") from None


def _pattern(node: ast.expr, kinds: Mapping[str, type[Pattern]], text: str) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd):
        left, right = _pattern(node.left, kinds, text), _pattern(node.right, kinds, text)
        return left | right if isinstance(node.op, ast.BitOr) else left & right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
        named = {word.arg: _value(word.value, text) for word in node.keywords if word.arg}
        if len(named) == len(node.keywords):
            try:
                return kinds[node.func.id](*(_value(a, text) for a in node.args), **named)
            except TypeError as error:
                raise ValueError(f"{ast.unparse(node)} in {text!r}: {str(error).split('__init__() ')[-1]}") from None
    raise ValueError(
        f"{ast.unparse(node)!r} in {text!r} is not a pattern; expected one of {', '.join(kinds)} with whole numbers, "
        "combined by | and &"
    )


def _value(node: ast.expr, text: str) -> int | bool | tuple[int, ...] | None:
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) in (int, bool)):
        return node.value  # pyright: ignore[reportReturnType]
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_whole(part, text) for part in node.elts)
    return _whole(node, text)


def _whole(node: ast.expr, text: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand, text)  # the pattern checks the range
    raise ValueError(f"{ast.unparse(node)} in {text!r} is neither a whole number nor a list of them")
