"""The Markdown report of a finding: what goes wrong in the user's terms, why, the numbers, a script or how to replay it. What was
written by hand beside a ledger: scripts, and edits of released files that mend a finding (`patches.toml`)."""

import ast
import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from parity.case.case import Case
from parity.decoding import convert, short, text_of, toml_of
from parity.errors import FAULT, UsageError
from parity.implementations.implementation import Implementation
from parity.process import installed
from parity.results.report import measured
from parity.results.row import Row
from parity.running import child

QUIET = frozenset("B T V H peak targets ids_dtype layout layouts grad cotangent chunk_size check".split())
"""Settings that describe the inputs rather than the option that goes wrong, left out of a title."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def issue_text(case: Case, implementation: Implementation, rows: Sequence[Row]) -> str:
    """What one pastes upstream of a finding that has no script by hand, in Markdown: its numbers, and how it is
    replayed. `rows`: of this case and implementation, as `parity.registry.run_case` yields them."""
    its_rows = [r for r in rows if r.implementation == implementation.id]
    failing = [r for r in its_rows if r.verdict not in ("agree", "unsupported")]
    where = "CPU, kernels in Triton's interpreter" if implementation.interpreted else "CPU"
    if its_rows[0].device != "cpu" and torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    cells = (
        (r.quantity, *("none or not finite" if v is None else f"{v:.6g}" for v in (r.value, r.value_oracle)))
        for r in failing
        if r.quantity and (r.value, r.value_oracle) != (None, None)
    )
    printed = "\n".join(measured.table(("quantity", "library", "float64 definition"), cells))
    settings = ", ".join(f"{n}={v!r}" for n, v in case.settings.items() if n not in ("grad", "cotangent", "check"))
    about = f"With {DTYPES[case.dtype]} and {settings or 'every setting at its default'}."
    about += "\n\n## Replay\n\nWith llm-parity installed, and this as `case.json`:"
    about += f"\n\n```json\n{json.dumps(case.to_json(), indent=1)}\n```"
    about += f"\n\n    parity replay case.json --implementation {implementation.id}"
    sources = "\n".join(f"- `{name}`" for name in implementation.sources)
    names = ("torch", "triton", implementation.library or "", "transformers")
    return report(title(case, implementation, failing), about, printed, "", "", sources, versions(names, where))


def report(title: str, about: str, printed: str, code: str, patch: str, sources: str, versions: str) -> str:
    """A bug report; what is empty has no section."""
    sections = {
        "What it gives": printed,
        "Script": code and f"Exits with 1 while this is so, with 0 once it is mended.\n\n```python\n{code}```",
        "Patch": patch and f"With it the script exits with 0.\n\n```diff\n{patch}```",
        "Code": sources,
        "Versions": versions,
    }
    parts = [f"# {title}", about, *(f"## {name}\n\n{text}" for name, text in sections.items() if text)]
    return "\n\n".join(parts) + "\n"


def title(case: Case, implementation: Implementation, failing: Sequence[Row]) -> str:
    """`library version: function: effect, with setting=value (dtype)`."""
    values = {n: f"{v:g}" if isinstance(v, float) else str(v) for n, v in case.settings.items() if n not in QUIET}
    moved = [f"{n}={short(v, 24)}" for n, v in values.items()]
    where = f", with {', '.join(moved[:4])}{', …' if len(moved) > 4 else ''}" if moved else ""
    known, name = implementation.library, implementation.id
    name = (known and name.partition(".")[2]) or name
    library = f"{known} {implementation.version() or '?'}" if known else "user function"
    return f"{library}: `{name}`: {effect(failing)}{where} ({DTYPES[case.dtype]})"


def effect(failing: Sequence[Row]) -> str:
    """What goes wrong, in a few words: what is not finite, a relative error, else the message."""
    if not failing:
        return "differs from its definition"
    worst = next((r for r in failing if r.gate == "structure"), failing[0])
    if worst.gate != "structure" and (
        errors := [(r.dist / abs(r.value_oracle), str(r.quantity)) for r in failing if r.dist and r.value_oracle]
    ):
        error, quantity = max(errors)
        return f"{quantity} off by {100 * error:.2g} %"
    return f"{worst.subject}: {worst.message}"[:90]


def numbers(output: str) -> str:
    """What a script printed: a table as it is, anything else as code."""
    shown = output.strip()
    return shown if shown.startswith("|") else f"```\n{shown}\n```"


def versions(names: Iterable[str], where: str = "CPU") -> str:
    """The installed releases of some distributions or modules, and the device."""
    known = importlib.metadata.packages_distributions()
    wanted = dict.fromkeys(known.get(n, [n])[0] for n in names if n and n not in sys.stdlib_module_names)
    found = [f"- {name} {installed(name) or 'not installed'}" for name in wanted]
    return "\n".join([f"- python {platform.python_version()}", *found, f"- device: {where}"])


SECONDS = 300.0  # CPU seconds of a script: a busy machine makes none of them wrong


Ran: TypeAlias = subprocess.CompletedProcess[str]
"""What a script came to: 1 while the defect is there, 0 when it is gone, anything else is a fault of the script."""


def ran(text: str, seconds: float = SECONDS, first: Path | None = None) -> Ran:
    """Run a script with this interpreter, outside this package; `first` is a folder whose packages stand for the installed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"} | ({"PYTHONPATH": str(first)} if first else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, file.name]
        try:
            done = child.run(command, cpu=seconds, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except child.LimitExceeded as error:
            return Ran(command, 124, "", str(error))
    # Python ends with 1 on an exception, and a script that crashes shows nothing.
    if done.returncode == 1 and "Traceback (most recent call last)" in done.stderr:
        done.returncode = FAULT
    return done


SETUP = "setup_"


def script(folder: Path, id: str) -> str | None:
    """The script of an entry, which needs nothing beside it: the lines of `setup_NAME.py` stand where it is imported. None where
    none was written (`scripts/ID.py` beside a ledger)."""
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
    found: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return list(dict.fromkeys(name.partition(".")[0] for name in found))


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
    path = folder / "patches.toml"
    if not path.exists():
        return []
    file = convert(_File, toml_of(text_of(path, "patches"), str(path), "patches"), str(path))
    return [edit for edit in file.patch if id in edit.entries]


def patched(wanted: Sequence[Edit]) -> dict[str, tuple[str, str]]:
    """File -> its released and its mended text, of the installed packages. Raises UsageError where the installed
    release does not have the text that an edit replaces."""
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
