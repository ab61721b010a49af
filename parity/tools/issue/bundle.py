"""Source of this package as a script of its own: a function with every helper that it calls, for the settings of one case.

`Bundle.add(function)` reads the source (`inspect`), leaves out what the case does not need (branches that its settings
decide, what only declares or refuses: `require`, annotations, docstrings), and follows every name into this package. What a
function takes from other packages is imported. Nothing is written down twice: the script says what the adapter and the
oracle say.
"""

import ast
import builtins
import copy
import inspect
import textwrap
import types
from collections.abc import Mapping
from typing import Any

from parity.case.inputs import Inputs, Setting
from parity.errors import Unsupported
from parity.judge.stages import of_teacher
from parity.tools.issue.fold import Fold, tidied

OWN = "parity."
FRAME = frozenset(
    "SETTINGS TENSORS UPSTREAM LEAVES PARAMETERS LIMITS inputs backward measure apart found exact wrong torch".split()
)
"""Names of the script around the functions."""
KEPT = frozenset(
    {"cache", "lru_cache", "contextmanager", "staticmethod", "classmethod", "property", "dataclass", "jit"}
)
"""Decorators that make what they decorate; others of this package register it."""


class Bundle:
    """Functions and what they need, in the order in which a module can define them.

    Attributes:
        functions: name -> definition.
        constants: name -> source of the value.
        imports: import lines.
    """

    def __init__(self, x: Inputs, foreign: frozenset[str] | None = None, avoid: frozenset[str] = frozenset()):
        """`foreign`: qualified names of functions that are called with other inputs than the case's; None folds nothing.
        `avoid`: names of locals, which no function of the script may have.
        """
        self.x, self.foreign, self.avoid = x, foreign, avoid
        self.bound: set[str] = set()
        self.functions: dict[str, ast.stmt] = {}
        self.constants: dict[str, str] = {}
        self.imports: dict[str, None] = {}
        self.outside: set[str] = set()
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []

    def add(self, function: Any) -> str:
        """Take in a function or class of this package; its name in the script.

        Raises:
            Unsupported: when there is no source, or it needs something that cannot be written down.
        """
        found: Any = _bare(function)
        if id(found) in self._names:
            return self._names[id(found)]
        name = self._free(found.__name__)
        self._names[id(found)] = name
        self._kept.append(found)
        tree = _parsed(found)
        tree.name = name
        space = dict(vars(inspect.getmodule(found))) | _closure(found)
        if self.foreign is not None and isinstance(found, types.FunctionType):
            tree = Fold(self.x, space, _qualified(found) not in self.foreign).visit(tree)
        tree = _Rewrite(self, space, tree).visit(tree)
        self.functions[name] = tidied(tree)
        return name

    def _free(self, name: str) -> str:
        taken = {
            *FRAME,
            *self.x.tensors,
            *self.functions,
            *self.constants,
            *self._names.values(),
            *dir(builtins),
            *self.avoid,
        }
        return next(n for n in (name, *(f"{name}_{k}" for k in range(2, 99))) if n not in taken)

    def reference(self, value: Any, name: str) -> ast.expr:
        """How the script calls a global value that the package calls `name`."""
        if isinstance(value, types.ModuleType):
            line = f"import {value.__name__}"
            self.imports[line if value.__name__ == name else f"{line} as {name}"] = None
            return ast.Name(name, ast.Load())
        bare = _bare(value)
        module = getattr(bare, "__module__", None)
        if isinstance(bare, types.FunctionType | type):
            if str(module).startswith((OWN, "parity_user_")):
                return ast.Name(self.add(bare), ast.Load())
            if module != "builtins":
                root = bare.__qualname__.partition(".")[0]
                self.imports[f"from {module} import {root}" + (f" as {name}" if root != name else "")] = None
            return ast.Name(name, ast.Load())
        if callable(value) and module and not str(module).startswith(OWN):
            self.imports[f"from {module} import {name}"] = None
            return ast.Name(name, ast.Load())
        if id(value) not in self._names:
            self._names[id(value)] = self._free(name)
            self._kept.append(value)
            self.constants[self._names[id(value)]] = self._written(value, name)
        return ast.Name(self._names[id(value)], ast.Load())

    def _written(self, value: Any, name: str) -> str:
        if isinstance(value, Mapping) and value and all(isinstance(v, Setting) for v in value.values()):
            self.imports["from types import SimpleNamespace"] = None
            return f"{{{', '.join(f'{k!r}: SimpleNamespace(default={v.default!r})' for k, v in value.items())}}}"
        text = repr(value)
        if "torch." in text:
            self.imports["import torch"] = None
        try:
            compile(text, name, "eval")
        except SyntaxError:
            raise Unsupported(f"{name} is a {type(value).__name__}, which no line of source makes") from None
        return text


def bundled(x: Inputs, *functions: Any) -> tuple[Bundle, list[str]]:
    """A bundle of functions of `x`, folded for its settings, and their names in it."""
    whole = Bundle(x)
    for function in functions:
        whole.add(function)
    folded = Bundle(x, frozenset(whole.outside), frozenset(whole.bound))
    names = [folded.add(function) for function in functions]
    _without_empty(folded)
    return folded, names


def _without_empty(bundle: Bundle) -> None:
    """Functions that only refused, and their calls, are left out."""
    while empty := {n for n, f in bundle.functions.items() if isinstance(f, ast.FunctionDef) and _idle(f)}:
        for name in empty:
            del bundle.functions[name]
        for name, tree in bundle.functions.items():
            bundle.functions[name] = tidied(_Without(empty).visit(tree))


def _idle(tree: ast.FunctionDef) -> bool:
    return all(isinstance(s, ast.Assign | ast.Pass) for s in tree.body)


class _Without(ast.NodeTransformer):
    def __init__(self, names: set[str]):
        self.names = names

    def visit_Expr(self, node: ast.Expr) -> Any:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        return None if isinstance(called, ast.Name) and called.id in self.names else node


def _bare(value: Any) -> Any:
    """The function under decorators, Triton's included."""
    if not callable(value) or isinstance(value, type):
        return value
    found = inspect.unwrap(value)
    return found.fn if isinstance(getattr(found, "fn", None), types.FunctionType) else found


def _parsed(found: Any) -> Any:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    except (OSError, TypeError, SyntaxError):
        raise Unsupported(f"{found.__qualname__} has no source of its own") from None
    if not isinstance(tree, ast.FunctionDef | ast.ClassDef):
        raise Unsupported(f"{found.__qualname__} is no function or class of its own")
    tree.decorator_list = [d for d in tree.decorator_list if _last(d) in KEPT]
    return tree


def _last(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _qualified(found: Any) -> str:
    return f"{found.__module__}.{found.__qualname__}"


def _closure(found: Any) -> dict[str, Any]:
    if not isinstance(found, types.FunctionType) or found.__closure__ is None:
        return {}
    return dict(zip(found.__code__.co_freevars, (c.cell_contents for c in found.__closure__), strict=True))


class _Rewrite(ast.NodeTransformer):
    """Global names of a function as the script calls them; what a reader of the script does not need left out."""

    def __init__(self, bundle: Bundle, space: Mapping[str, Any], tree: Any):
        self.bundle, self.space = bundle, dict(space)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("parity"):
                module = __import__(str(node.module), fromlist=["_"])
                for alias in node.names:
                    value = getattr(module, alias.name, None) or __import__(
                        f"{node.module}.{alias.name}", fromlist=["_"]
                    )
                    self.space[alias.asname or alias.name] = value
            elif isinstance(node, ast.Import) and any(a.name.startswith("parity") for a in node.names):
                raise Unsupported("imports a module of the package by its full name")
        self.bound = _bound(tree) - {tree.name}
        bundle.bound |= self.bound

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """What comes from this package is taken in, not imported."""
        return None if str(node.module).startswith("parity") else node

    def visit_Name(self, node: ast.Name) -> Any:
        """A global by its name in the script."""
        if node.id in self.bound or node.id not in self.space or not isinstance(node.ctx, ast.Load):
            return node
        return self.bundle.reference(self.space[node.id], node.id)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """A member of a module of this package becomes a name of the script."""
        module = self._module(node.value)
        if module is not None and hasattr(module, node.attr):
            return self.bundle.reference(getattr(module, node.attr), node.attr)
        return self.generic_visit(node)

    def _module(self, node: ast.expr) -> Any:
        found = self.space.get(node.id) if isinstance(node, ast.Name) and node.id not in self.bound else None
        return found if isinstance(found, types.ModuleType) and found.__name__.startswith("parity") else None

    def _called(self, node: ast.Call) -> Any:
        module = self._module(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if module is not None:
            return getattr(module, node.func.attr, None)  # type: ignore[attr-defined]
        known = isinstance(node.func, ast.Name) and node.func.id not in self.bound
        return self.space.get(node.func.id) if known else None  # type: ignore[attr-defined]

    def visit_Expr(self, node: ast.Expr) -> Any:
        """No docstrings, and no `require`: the case was run."""
        if isinstance(node.value, ast.Constant) or (
            isinstance(node.value, ast.Call) and getattr(self._called(node.value), "__name__", "") == "require"
        ):
            return None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        """`accepted(module, "name")` is `module.name`; `stored(value, …)` is the value."""
        called = self._called(node)
        if getattr(called, "__name__", "") == "accepted" and isinstance(node.args[1], ast.Constant):
            return self.visit(ast.Attribute(node.args[0], str(node.args[1].value), ast.Load()))
        if isinstance(node.func, ast.Name) and node.func.id == "stored":
            return self.visit(node.args[0])
        if isinstance(called, types.FunctionType) and called.__module__.startswith("parity"):
            names = list(inspect.signature(called).parameters)
            given = zip(names, node.args, strict=False)
            if any(n in ("x", "s") and ast.unparse(a) not in (n, "x.settings") for n, a in given):
                self.bundle.outside.add(_qualified(called))
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> Any:
        """What rounds a teacher's part of a replica is nothing to an exact run."""
        first = node.items[0].context_expr
        if isinstance(first, ast.Call) and self._called(first) is of_teacher:
            return [self.visit(statement) for statement in node.body]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """`name = value`, or nothing."""
        if node.value is None:
            return None
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_arg(self, node: ast.arg) -> Any:
        """Without its annotation."""
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """Without the annotation of what it returns."""
        node.returns = None
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> Any:
        """A refusal of an adapter as a plain error."""
        if isinstance(node.exc, ast.Call) and self._called(node.exc) is Unsupported:
            arguments = node.exc.args
            node = copy.copy(node)
            node.exc = ast.Call(ast.Name("RuntimeError", ast.Load()), arguments, [])
        return self.generic_visit(node)


def _bound(tree: ast.AST) -> set[str]:
    """Every name that is given a value somewhere in a function, imports from this package aside."""
    out: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            out.add(node.id)
        elif isinstance(node, ast.arg):
            out.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            out.add(node.name)
        elif (isinstance(node, ast.ImportFrom) and not str(node.module).startswith("parity")) or isinstance(
            node, ast.Import
        ):
            out |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    return out
