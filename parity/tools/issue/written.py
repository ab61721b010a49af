"""Scripts by hand beside a ledger (`scripts/ID.py`), made whole: the lines of `setup_NAME.py` stand where it is imported."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

SETUP = "setup_"


def script(folder: Path, id: str) -> str | None:
    """The script of an entry, which needs nothing beside it; None where none was written."""
    file = folder / "scripts" / f"{id}.py"
    return "\n".join(_whole(file, set())) + "\n" if file.exists() else None


def _whole(file: Path, done: set[str]) -> Iterator[str]:
    for line in file.read_text(encoding="utf-8").splitlines():
        name = line.split()[1] if line.startswith(f"from {SETUP}") else ""
        if not name:
            yield line
        elif name not in done:
            done.add(name)
            yield from _whole(file.with_name(f"{name}.py"), done)


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
