"""Where an installed release reads a setting: file and line, found in the syntax tree of the code that runs."""

import ast
import dataclasses
import inspect
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from parity.process import packaged
from parity.tools.issue import sources as located

NOT_READ = "not read in "
DEPTH = 2
"""Calls that are followed from the function that an adapter names."""


@dataclasses.dataclass(frozen=True)
class Place:
    """`package/module.py:line`; `read` is whether the setting is read there, else it is where one would look for it."""

    text: str
    read: bool

    def __str__(self) -> str:
        return self.text if self.read else NOT_READ + self.text


def reads(sources: Sequence[str], names: Iterable[str]) -> Place:
    """Where code under the dotted names `sources` reads one of `names`.

    A method is followed into the methods and functions of its package that it calls; what an attribute of the trainer
    was made with counts as read (`self.liger_loss = Loss(temperature=…)`). For other code the whole module is looked at
    after the function itself. A source that the installed release does not have is passed over.
    """
    wanted = {n.lower() for n in names}
    roots = [found for found in map(_resolved, sources) if found is not None]
    for root in roots:
        for function, owner in _reached(root):
            for node, code in _parts(function, owner):
                line = _line(node, wanted)
                if line is not None:
                    return Place(f"{_file(code)}:{line}", True)
    for root in roots:
        module = inspect.getmodule(root)
        if module is not None and "trainer" not in module.__name__:
            line = _line(ast.parse(inspect.getsource(module)), wanted)
            if line is not None:
                return Place(f"{_file(module)}:{line}", True)
    known = [located.located(name) for name in sources]
    return Place(next((k for k in known if ":" in k), "no source in the installed release"), False)


def installed(sources: Sequence[str]) -> Any:
    """The first of the dotted names that the installed release has, resolved; None for none."""
    return next((found for found in map(_resolved, sources) if found is not None), None)


def parameter(sources: Sequence[str], names: Iterable[str]) -> str | None:
    """A callable under `sources`, its class or its module's public ones, with a parameter of one of `names`."""
    wanted = set(names)
    for name in sources:
        found = _resolved(name)
        if found is None:
            continue
        parameters = _parameters(found)
        if wanted & parameters:
            return f"{name}({', '.join(sorted(wanted & parameters))})"
    return None


def raised(error: BaseException) -> str:
    """`package/module.py:line` of the deepest frame of a library, or of our own fixes, from which an exception came."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        parts, inside = Path(frame.filename).parts, packaged(frame.filename)
        if inside and "torch" not in parts:
            return f"{inside}:{frame.lineno}"
        if parts[-3:-1] == ("parity", "fixes"):
            return f"{'/'.join(parts[-3:])}:{frame.lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _resolved(name: str) -> Any:
    try:
        found = located.function(located.resolved(name))
        inspect.getsource(found)
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return found


def _parameters(found: Any) -> set[str]:
    functions = [found] if not inspect.isclass(found) else [v for v in vars(found).values() if callable(v)]
    out: set[str] = set()
    for function in functions:
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            out |= set(inspect.signature(function).parameters)
    return out


def _reached(root: Any) -> Iterator[tuple[Any, type | None]]:
    """The function and those that it calls, nearest first, each with the class whose methods its `self` has."""
    owner = _owner(root)
    if inspect.isclass(root):
        owner = root
    level: list[tuple[Any, type | None]] = [(root, owner)]
    seen = {id(root)}
    for _ in range(DEPTH + 1):
        below: list[tuple[Any, type | None]] = []
        for function, of in level:
            yield function, of
            for called in _calls(function, of):
                if id(called[0]) not in seen:
                    seen.add(id(called[0]))
                    below.append(called)
        level = below


def _owner(function: Any) -> type | None:
    module = inspect.getmodule(function)
    parts = getattr(function, "__qualname__", "").split(".")[:-1]
    found: Any = module
    for part in parts:
        found = getattr(found, part, None)
    return found if inspect.isclass(found) else None


def _tree(code: Any) -> ast.AST:
    """The syntax tree of a function or class, with the line numbers of its file."""
    lines, first = inspect.getsourcelines(code)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    return ast.increment_lineno(tree, first - 1)


def _parts(function: Any, owner: type | None) -> Iterator[tuple[ast.AST, Any]]:
    """The tree of a function, and of the assignments that made what it calls on `self`."""
    tree = _tree(function)
    yield tree, function
    if owner is None or inspect.isclass(function):
        return
    called = {n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and _of_self(n.func)}  # type: ignore[attr-defined]
    made = {name for name in called if not hasattr(owner, name)}
    constructor = vars(owner).get("__init__")
    if not made or constructor is None:
        return
    for node in ast.walk(_tree(inspect.unwrap(constructor))):
        if isinstance(node, ast.Assign) and any(_of_self(t) and t.attr in made for t in node.targets):  # type: ignore[attr-defined]
            yield node, constructor


def _calls(function: Any, owner: type | None) -> Iterator[tuple[Any, type | None]]:
    """Functions of the same package that a function calls by name or on `self`."""
    if isinstance(function, ModuleType) or inspect.isclass(function):
        return
    package = function.__module__.partition(".")[0]
    for node in ast.walk(_tree(function)):
        if not isinstance(node, ast.Call):
            continue
        found: Any = None
        if _of_self(node.func) and owner is not None:
            found = getattr(owner, node.func.attr, None)  # type: ignore[attr-defined]
        elif isinstance(node.func, ast.Name):
            found = getattr(function, "__globals__", {}).get(node.func.id)
        found = inspect.unwrap(found) if callable(found) else None
        if isinstance(found, FunctionType) and found.__module__.partition(".")[0] == package:
            yield found, owner if _of_self(node.func) else None


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _line(tree: ast.AST, wanted: set[str]) -> int | None:
    """The first line that loads one of the names, compares or indexes with it, or passes it on by keyword."""
    lines = [node.lineno for node in ast.walk(tree) if _reads(node, wanted)]  # type: ignore[attr-defined]
    return min(lines, default=None)


def _reads(node: ast.AST, wanted: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Load) and node.id.lower() in wanted
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Load) and node.attr.lower() in wanted
    if isinstance(node, ast.keyword):
        return (node.arg or "").lower() in wanted
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() in wanted


def _file(code: Any) -> str:
    file = inspect.getsourcefile(code) or ""
    module = inspect.getmodule(code)
    package = (module.__name__ if module else "").partition(".")[0]
    return located.relative(file, package)
