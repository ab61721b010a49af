"""Scripts written by hand beside a ledger (`scripts/ID.py`), made whole: what they import from `setup_NAME.py` is put in."""

import ast
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

SETUP = "setup_"


def script(folder: Path, id: str) -> str | None:
    """The script of an entry, which needs nothing beside it; None where none was written."""
    file = folder / "scripts" / f"{id}.py"
    if not file.exists():
        return None
    text = file.read_text(encoding="utf-8")
    header = [line for line in text.splitlines() if line.startswith("#")][: _comments(text)]
    body = _with_setup(text, file.parent, set())
    body = _used(body)
    # Where the environment is set before an import, the order stays.
    lines = _hoisted(body) if "os.environ" not in body else body.splitlines()[len(header) :]
    return "\n".join([*header, *lines]).rstrip() + "\n"


def missing(code: str) -> list[str]:
    """Top-level modules that a script imports and that are not installed."""
    return [name for name in modules(code) if importlib.util.find_spec(name) is None]


EXTRAS = {"unsloth_zoo": "unsloth", "bitsandbytes": "kbit"}
"""Module that a script may import -> the extra of this package that brings it."""


def install(names: Sequence[str]) -> str:
    """The command that installs what a script lacks."""
    extras = sorted(EXTRAS[name] for name in names if name in EXTRAS)
    wanted = [f"'llm-parity[{','.join(extras)}]'"] if extras else []
    return " ".join(["pip install", *wanted, *(name.replace("_", "-") for name in names if name not in EXTRAS)])


def modules(code: str) -> list[str]:
    """The top-level modules that a script imports."""
    return list({name.partition(".")[0]: None for node in ast.walk(ast.parse(code)) for name in _imported(node)})


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [str(node.module)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _comments(text: str) -> int:
    lines = text.splitlines()
    return next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))


def _with_setup(text: str, folder: Path, done: set[str]) -> str:
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(SETUP):
            lines[node.lineno - 1 : node.end_lineno] = [f"\0{node.module}"]
    out: list[str] = []
    for line in lines:
        name = line.removeprefix("\0")
        if name == line:
            out.append(line)
        elif name not in done:
            done.add(name)
            out += [_with_setup((folder / f"{name}.py").read_text(encoding="utf-8"), folder, done), "", ""]
    return "\n".join(out)


def _used(text: str) -> str:
    """Without the functions, classes and names of the top level that nothing uses, and without double empty space."""
    while True:
        tree = ast.parse(text)
        named = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        idle = [node for node in tree.body if (names := _bound(node)) and not names & set(named)]
        lines = text.splitlines()
        for node in reversed(idle):
            del lines[node.lineno - 1 : node.end_lineno]
        text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines))
        if not idle:
            return text


def _bound(node: ast.stmt) -> set[str]:
    """What a statement of the top level names, where naming is all that it does."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
        return {node.name}
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.List | ast.Tuple):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return set()


def _hoisted(text: str) -> list[str]:
    """The lines with every import of the top level in front, each once."""
    lines = text.splitlines()
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in reversed(imports):
        del lines[node.lineno - 1 : node.end_lineno]
    known = sorted({ast.unparse(node) for node in imports}, key=lambda line: (line.startswith("from"), line))
    return [*known, "", *"\n".join(lines[_comments(text) :]).strip("\n").splitlines()]
