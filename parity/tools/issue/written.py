"""What was written by hand beside a ledger: scripts (`scripts/ID.py`), and what mends a finding, where that is known: edits of
released files (`patches.toml`).

A script is made whole: the lines of `setup_NAME.py` stand where it is imported.
"""

import ast
import contextlib
import difflib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from parity.decoding import convert, text_of, toml_of
from parity.errors import UsageError

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


def modules(code: str) -> list[str]:
    """The top-level modules that a script imports."""
    return list({name.partition(".")[0]: None for node in ast.walk(ast.parse(code)) for name in _imported(node)})


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [str(node.module)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`old`, which stands in `file` (package/module.py) once or `times` times, becomes `new`, for some entries of the ledger."""

    entries: tuple[str, ...]
    file: str
    old: str
    new: str
    times: int = 1


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    patch: tuple[Edit, ...] = ()


def edits(folder: Path, id: str) -> list[Edit]:
    """The edits of an entry, in the file's order."""
    path = folder / "patches.toml"
    if not path.exists():
        return []
    file = convert(_File, toml_of(text_of(path, "patches"), str(path), "patches"), str(path))
    return [edit for edit in file.patch if id in edit.entries]


def patched(wanted: Sequence[Edit]) -> dict[str, tuple[str, str]]:
    """File -> its released and its mended text, of the installed packages.

    Raises:
        UsageError: where the installed release does not have the text that an edit replaces.
    """
    out: dict[str, tuple[str, str]] = {}
    for edit in wanted:
        released = _installed(edit.file).read_text(encoding="utf-8")
        before, after = out.get(edit.file, (released, released))
        if after.count(edit.old) != edit.times:
            found = after.count(edit.old)
            raise UsageError(f"{edit.file}: {edit.old.strip()[:60]!r} stands there {found} times, not {edit.times}")
        out[edit.file] = before, after.replace(edit.old, edit.new)
    return out


def diff(files: dict[str, tuple[str, str]]) -> str:
    """A unified diff against the released files, for `patch -p1`."""
    parts: list[str] = []
    for name, (before, after) in files.items():
        lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
        parts += difflib.unified_diff(*lines, f"a/{name}", f"b/{name}")
    return "".join(parts)


@contextlib.contextmanager
def applied(files: dict[str, tuple[str, str]]) -> Iterator[Path]:
    """A folder with copies of the packages that has the mended files; first on the path it stands for the installed ones."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for package in {name.partition("/")[0] for name in files}:
            shutil.copytree(_installed(package), folder / package, copy_function=os.symlink)
        for name, (_, after) in files.items():
            file = folder / name
            file.unlink()
            file.write_text(after, encoding="utf-8")
            for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                compiled.unlink()
        yield folder


def _installed(name: str) -> Path:
    package = name.partition("/")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]).parent / name
