"""What the settings of one case decide in a function, decided: branches that are not taken go, numbers stand in their place."""

import ast
from collections.abc import Mapping
from typing import Any

from parity.case.inputs import Inputs

_NOT_KNOWN: Any = object()
PLAIN = (bool, int, float, str, type(None))


class Fold(ast.NodeTransformer):
    """Decides what depends on `s.NAME`, `x.settings.NAME` and `x.TENSOR is None` alone.

    `of_case` says whether the function is called with the inputs of the case; else it is left as it is.
    """

    def __init__(self, x: Inputs, space: Mapping[str, Any], of_case: bool):
        self.x, self.space, self.of_case = x, space, of_case

    def value(self, node: ast.AST) -> Any:
        """The value of an expression, or `_NOT_KNOWN`."""
        if not self.of_case:
            return _NOT_KNOWN
        try:
            return self._value(node)
        except (KeyError, TypeError, AttributeError):
            return _NOT_KNOWN

    def _value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute):
            found = vars(self.x.settings).get(node.attr, _NOT_KNOWN) if _settings(node.value) else _NOT_KNOWN
            return found if isinstance(found, PLAIN) else _NOT_KNOWN
        if isinstance(node, ast.Name):
            found = self.space.get(node.id, _NOT_KNOWN)
            plain = isinstance(found, tuple | frozenset) and all(isinstance(v, PLAIN) for v in found)
            return found if plain else _NOT_KNOWN
        if isinstance(node, ast.Tuple):
            parts = [self.value(e) for e in node.elts]
            return _NOT_KNOWN if any(p is _NOT_KNOWN for p in parts) else tuple(parts)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = self.value(node.operand)
            return _NOT_KNOWN if found is _NOT_KNOWN else not found
        if isinstance(node, ast.BoolOp):
            return self._joined(node)
        if isinstance(node, ast.Call):
            return self._asked(node)
        return _NOT_KNOWN

    def _compared(self, node: ast.Compare) -> Any:
        op, right = node.ops[0], self.value(node.comparators[0])
        left = self._tensor(node.left) if isinstance(op, ast.Is | ast.IsNot) else _NOT_KNOWN
        left = self.value(node.left) if left is _NOT_KNOWN else left
        if left is _NOT_KNOWN or right is _NOT_KNOWN:
            return _NOT_KNOWN
        if isinstance(op, ast.Is | ast.IsNot):
            return (left is right) == isinstance(op, ast.Is)
        if isinstance(op, ast.In | ast.NotIn):
            return (left in right) == isinstance(op, ast.In)
        if isinstance(op, ast.Eq | ast.NotEq):
            return bool(left == right) == isinstance(op, ast.Eq)
        return _NOT_KNOWN

    def _tensor(self, node: ast.AST) -> Any:
        """The tensor that `x.NAME` is; the case's own, so that `is None` is decided."""
        named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "x"
        return self.x.tensors.get(node.attr, _NOT_KNOWN) if named else _NOT_KNOWN  # type: ignore[attr-defined]

    def _joined(self, node: ast.BoolOp) -> Any:
        parts = [self.value(v) for v in node.values]
        stops = isinstance(node.op, ast.Or)
        if any(p is not _NOT_KNOWN and bool(p) == stops for p in parts):
            return stops
        return _NOT_KNOWN if any(p is _NOT_KNOWN for p in parts) else not stops

    def _asked(self, node: ast.Call) -> Any:
        """`getattr(x.settings, "name", default)` and `s.__dict__.get("name")`."""
        arguments = [self.value(a) for a in node.args]
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and _settings(node.args[0]):
            return vars(self.x.settings).get(arguments[1], arguments[2] if len(arguments) > 2 else _NOT_KNOWN)
        if ast.unparse(node.func) in ("s.__dict__.get", "x.settings.__dict__.get"):
            return vars(self.x.settings).get(*arguments)
        return _NOT_KNOWN

    def visit_If(self, node: ast.If) -> Any:
        """The branch that is taken."""
        found = self.value(node.test)
        if found is _NOT_KNOWN:
            return self.generic_visit(node)
        taken = [self.visit(s) for s in (node.body if found else node.orelse)]
        return [s for part in taken for s in (part if isinstance(part, list) else [part]) if s is not None]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """The value that is taken."""
        found = self.value(node.test)
        if found is _NOT_KNOWN:
            return self.generic_visit(node)
        return self.visit(node.body if found else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """Without what does not decide."""
        if (found := self.value(node)) is not _NOT_KNOWN:
            return ast.copy_location(ast.Constant(found), node)
        stops = isinstance(node.op, ast.Or)
        left = [v for v in node.values if (p := self.value(v)) is _NOT_KNOWN or bool(p) == stops]
        if len(left) == 1 and self.value(left[0]) is _NOT_KNOWN:
            return self.visit(left[0])
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        """What is decided, as its truth."""
        found = self.value(node)
        return self.generic_visit(node) if found is _NOT_KNOWN else ast.copy_location(ast.Constant(found), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """A plain setting as its value."""
        found = self.value(node) if isinstance(node.ctx, ast.Load) else _NOT_KNOWN
        if found is _NOT_KNOWN or (isinstance(found, float) and found != found):
            return self.generic_visit(node)
        return ast.copy_location(ast.Constant(found), node)


def _settings(node: ast.AST) -> bool:
    return ast.unparse(node) in ("s", "x.settings")


def tidied(tree: ast.stmt) -> ast.stmt:
    """Without what stands behind a return, names that nobody reads, and inner functions that nobody calls."""
    for _ in range(4):
        read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        _Tidy(read).visit(tree)
    return ast.fix_missing_locations(tree)


def _idle(body: list[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Pass) for s in body)


class _Tidy(ast.NodeTransformer):
    def __init__(self, read: set[str]):
        self.read = read

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                ends = [i for i, s in enumerate(block) if isinstance(s, ast.Return | ast.Raise)]
                block = block[: ends[0] + 1] if ends else block
                setattr(node, field, block or ([ast.Pass()] if field == "body" else []))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.body = [s for s in node.body if not (isinstance(s, ast.FunctionDef) and s.name not in self.read)]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        found = self.generic_visit(node)
        return None if _idle(node.body) and not node.orelse else found

    def visit_For(self, node: ast.For) -> Any:
        found = self.generic_visit(node)
        return None if _idle(node.body) and not node.orelse else found

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Its attributes are read by others."""
        attributes = {n: t for n, t in enumerate(node.body) if isinstance(t, ast.Assign)}
        node.body = [s if n in attributes else self.visit(s) for n, s in enumerate(node.body)]
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        unread = all(isinstance(t, ast.Name) and t.id not in self.read for t in node.targets)
        plain = isinstance(node.value, ast.Name | ast.Attribute | ast.Constant | ast.Lambda)
        return None if unread and plain else self.generic_visit(node)
