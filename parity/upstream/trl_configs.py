"""The fields of TRL's configs, read from its files: a report must not import what it reports on."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def own_fields(config: str) -> tuple[str, ...]:
    """The fields that a config of the installed TRL adds to transformers' `TrainingArguments`; none where there is none."""
    ours = _classes("trl", "*config*.py")
    theirs = set(_fields("TrainingArguments", _classes("transformers", "training_args.py")))
    return tuple(dict.fromkeys(name for name in _fields(config, ours) if name not in theirs))


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """The annotated names of a class and of its bases among `classes`, the bases' first."""
    if name not in classes:
        return
    for base in classes[name].bases:
        yield from _fields(base.id if isinstance(base, ast.Name) else "", classes)
    for line in classes[name].body:
        if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
            yield ast.unparse(line.target)


@functools.cache
def _classes(package: str, files: str) -> dict[str, ast.ClassDef]:
    """Name -> definition of every class in the files of a package that match, without importing any."""
    spec = importlib.util.find_spec(package)
    roots = spec.submodule_search_locations if spec else None
    out: dict[str, ast.ClassDef] = {}
    for path in sorted(Path(next(iter(roots))).rglob(files)) if roots else ():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                out.setdefault(node.name, node)
    return out
