"""Every small wrong edit of a module's functions, one at a time, on its syntax tree."""

import ast
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from parity.selftest.mutants.operators import alternatives

Place = tuple[str, int]
"""A function: its qualified name, and the line of its first decorator or of its `def`."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """A wrong version of a function: where, by which operator, what stood there, what stands there now."""

    module: str
    function: str
    first: int
    line: int
    operator: str
    before: str
    after: str
    number: int

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}:{self.line}: {self.before} → {self.after}"

    @property
    def place(self) -> Place:
        """The innermost function around it."""
        return self.function, self.first


def edits(module: ModuleType) -> Iterator[tuple[Edit, ast.Module]]:
    """Every edit of every function of a module's file, and the module's tree, which holds it until the next one."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    number = 0
    for holder, field, index, node, place in list(_slots(tree, (), None)):
        for operator, other in alternatives(node):
            _put(holder, field, index, other)
            ast.fix_missing_locations(other if hasattr(other, "lineno") else ast.copy_location(other, node))
            edit = Edit(module.__name__, *place, node.lineno, operator, _text(node), _text(other), number)
            yield edit, tree
            _put(holder, field, index, node)
            number += 1


def bodies(module: ModuleType, tree: ast.Module) -> dict[Place, CodeType]:
    """The code of every function of a tree."""
    return {_place(c): c for c in _codes(compile(tree, str(module.__file__), "exec", dont_inherit=True))}


def exchanged(module: ModuleType, new: dict[Place, CodeType]) -> list[tuple[FunctionType, CodeType]]:
    """The live functions of a module's file whose body is another now."""
    file = module.__file__
    live = [f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename == file]
    pairs = [(f, new.get(_place(f.__code__))) for f in live]
    return [(f, c) for f, c in pairs if c is not None and c != f.__code__ and c.co_freevars == f.__code__.co_freevars]


def _place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:70]


def _put(holder: Any, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(holder, field, node)
    else:
        getattr(holder, field)[index] = node


def _slots(holder: ast.AST, scope: tuple[str, ...], place: Place | None) -> Iterator[tuple[Any, str, Any, Any, Place]]:
    """Every expression and statement of a function below, what holds it, and the function.

    Not of annotations, defaults, decorators, assertions and refusals, nor of what is computed once and kept.
    """
    for field, value in ast.iter_fields(holder):
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or field in ("annotation", "returns", "decorator_list") or _refuses(node):
                continue
            inner, at = scope, place
            if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                name = getattr(node, "name", "<lambda>")
                inner = (*scope, name) if isinstance(node, ast.ClassDef) else (*scope, name, "<locals>")
                if not isinstance(node, ast.ClassDef):
                    above = getattr(node, "decorator_list", [])
                    at = ".".join((*scope, name)), above[0].lineno if above else node.lineno
            elif at and isinstance(node, ast.expr | ast.stmt) and not isinstance(getattr(node, "ctx", None), ast.Store):
                yield holder, field, index, node, at
            yield from _slots(node, inner, at)


def _refuses(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return getattr(node.value.func, "id", "") == "require"
    if isinstance(node, ast.FunctionDef):
        return any("cache" in ast.unparse(d) for d in node.decorator_list)
    raising = isinstance(node, ast.If) and all(isinstance(n, ast.Raise) for n in node.body)
    return raising or isinstance(node, ast.Assert | ast.Raise | ast.arguments | ast.JoinedStr)
