"""Mutation operators: what may wrongly stand in place of an expression or a statement."""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

EXCHANGED = {"sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax", "max": "min", "min": "max", "any": "all"}
EXCHANGED |= {"all": "any", "maximum": "minimum", "minimum": "maximum", "logsumexp": "amax", "argsort": "argmin"}
EXCHANGED |= {"exp": "expm1", "log": "log1p", "log_softmax": "softmax", "zeros_like": "ones_like", "expm1": "exp"}
EXCHANGED |= {"masked_fill": "clamp_min", "sigmoid": "tanh"}
CASTS = "float double bfloat16 half to type_as long".split()
DROPPED = (
    "clamp clamp_min masked_fill nan_to_num abs neg exp log bool flip add_ mul_ sub_ div_ contiguous clone".split()
)
STOPPED = "exp log sum mean logsumexp log_softmax gather softmax tanh sigmoid linear matmul".split()
NARROWED = "float linear exp logsumexp sum matmul log_softmax".split()
LIMITS = "clamp sum mean where pad linear quantile".split()
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.FloorDiv: ast.Mult,
}
EDGES: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
Found = Iterator[tuple[str, ast.AST]]
"""(operator, what stands there now)."""


def alternatives(node: Any) -> Found:
    """Every wrong version of a node."""
    for kind, found in _OPERATORS:
        if isinstance(node, kind):
            yield from found(node)


def _constant(node: ast.Constant) -> Found:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield from (("constant", ast.Constant(value + step)) for step in (1, -1))
    elif isinstance(value, float):
        yield from (("constant", ast.Constant(value * factor if value else factor - 1)) for factor in (1.05, -1.0))


def _unary(node: ast.UnaryOp) -> Found:
    if isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield "sign", node.operand
    if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant) and node.operand.value == 1:
        yield "axis", ast.Constant(0)


def _binary(node: ast.BinOp) -> Found:
    if other := ARITHMETIC.get(type(node.op)):
        yield "arithmetic", ast.BinOp(node.left, other(), node.right)
        yield "term dropped", node.left
        yield "term dropped", node.right
    if isinstance(node.op, ast.Sub | ast.Div):
        yield "operands exchanged", ast.BinOp(node.right, node.op, node.left)


def _compare(node: ast.Compare) -> Found:
    for n, other in enumerate(EDGES.get(type(node.ops[0]), ())):
        name = "comparison" if n or isinstance(node.ops[0], ast.Eq | ast.NotEq) else "edge of a comparison"
        yield name, ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)


def _branch(node: ast.If | ast.IfExp | ast.BoolOp) -> Found:
    if isinstance(node, ast.If):
        yield from (("branch", ast.If(ast.Constant(v), node.body, node.orelse)) for v in (True, False))
    elif isinstance(node, ast.IfExp):
        yield from (("branch", v) for v in (node.body, node.orelse))
    else:
        for left_out in node.values:
            kept = [v for v in node.values if v is not left_out]
            yield "branch", kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)


def _call(node: ast.Call) -> Found:
    name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
    method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in ("torch", "math", "F")
    if name in EXCHANGED and isinstance(node.func, ast.Attribute | ast.Name):
        other = copy.copy(node.func)
        setattr(other, "attr" if isinstance(other, ast.Attribute) else "id", EXCHANGED[name])
        yield "function", ast.Call(other, node.args, node.keywords)
    for dropped, names in (("detach removed", ["detach"]), ("cast removed", CASTS), ("call dropped", DROPPED)):
        if method and name in names:
            yield dropped, node.func.value  # type: ignore[attr-defined]
    if name in STOPPED:
        yield "detach added", _then(node, "detach")
    if name in NARROWED:
        yield "rounded to bf16", _then(_then(node, "bfloat16"), "float")
    if name == "where" and len(node.args) == 3:
        condition, yes, no = node.args
        yield "where", ast.Call(node.func, [condition, no, yes], node.keywords)
        yield from (("where", v) for v in (yes, no))
    if name in LIMITS:
        for keyword in node.keywords:
            yield "keyword dropped", ast.Call(node.func, node.args, [k for k in node.keywords if k is not keyword])
    inner = node.args[-1] if node.args else None
    if (
        isinstance(inner, ast.Call)
        and inner.args
        and isinstance(node.func, ast.Name)
        and isinstance(inner.func, ast.Name)
    ):
        within = ast.Call(node.func, [*node.args[:-1], inner.args[-1]], node.keywords)
        yield "order", ast.Call(inner.func, [*inner.args[:-1], within], inner.keywords)
    for n in range(len(node.args) - 1):
        if all(isinstance(a, ast.Name) for a in node.args[n : n + 2]):
            swapped = [*node.args[:n], node.args[n + 1], node.args[n], *node.args[n + 2 :]]
            yield "arguments exchanged", ast.Call(node.func, swapped, node.keywords)


def _then(value: ast.expr, method: str) -> ast.Call:
    return ast.Call(ast.Attribute(value, method, ast.Load()), [], [])


def _assignment(node: ast.Assign | ast.AugAssign) -> Found:
    target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
    read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    if isinstance(node, ast.AugAssign) or (isinstance(target, ast.Name) and target.id in read):
        yield "statement dropped", ast.Pass()
    if isinstance(node, ast.AugAssign) and (other := ARITHMETIC.get(type(node.op))):
        yield "arithmetic", ast.AugAssign(node.target, other(), node.value)


_OPERATORS: tuple[tuple[Any, Callable[[Any], Found]], ...] = (
    (ast.Constant, _constant),
    (ast.UnaryOp, _unary),
    (ast.BinOp, _binary),
    (ast.Compare, _compare),
    (ast.If | ast.IfExp | ast.BoolOp, _branch),
    (ast.Call, _call),
    (ast.Assign | ast.AugAssign, _assignment),
)
