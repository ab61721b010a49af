"""The Markdown report of a finding: what goes wrong in the user's terms, why, the numbers, a script or how to replay it."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from parity.case.case import Case
from parity.implementations.implementation import Implementation
from parity.process import installed
from parity.results.report import measured
from parity.results.row import Row
from parity.running import child

QUIET = frozenset("B T V H peak targets ids_dtype layout layouts grad cotangent chunk_size check".split())
"""Settings that describe the inputs rather than the option that goes wrong, left out of a title."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def issue_text(case: Case, implementation: Implementation, rows: Sequence[Row]) -> str:
    """What one pastes upstream of a finding that has no script by hand, in Markdown: its numbers, and how it is replayed.

    Args:
        rows: of this case and implementation, as `parity.registry.run_case` yields them.
    """
    its_rows = [r for r in rows if r.implementation == implementation.id]
    failing = [r for r in its_rows if r.verdict not in ("agree", "unsupported")]
    where = "CPU, kernels in Triton's interpreter" if implementation.interpreted else "CPU"
    if its_rows and its_rows[0].device != "cpu" and torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    cells = ((str(r.quantity), _shown(r.value), _shown(r.value_oracle)) for r in its_rows if r.quantity)
    printed = "\n".join(measured.table(("quantity", "library", "float64 definition"), cells)) if its_rows else ""
    known = json.dumps(case.to_json(), indent=1)
    replay = f"    parity replay case.json --implementation {implementation.id}"
    about = f"{_setting(case)}\n\n## Replay\n\nWith llm-parity installed, and this as `case.json`:"
    about += f"\n\n```json\n{known}\n```\n\n{replay}"
    sources = "\n".join(f"- `{name}`" for name in implementation.sources)
    names = ("torch", "triton", implementation.library or "", "transformers")
    return report(title(case, implementation, failing), about, printed, "", "", sources, versions(names, where))


def _shown(value: float | None) -> str:
    """A scalar's value, a tensor's norm."""
    return "none or not finite" if value is None else f"{value:.6g}"


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
    moved = [f"{n}={_short(v)}" for n, v in case.settings.items() if n not in QUIET]
    where = f", with {', '.join(moved[:4])}{', …' if len(moved) > 4 else ''}" if moved else ""
    library = (
        f"{implementation.library} {implementation.version() or '?'}" if implementation.library else "user function"
    )
    name = implementation.id.partition(".")[2] or implementation.id
    return f"{library}: `{name}`: {effect(failing)}{where} ({DTYPES.get(case.dtype, case.dtype)})"


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


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


def _setting(case: Case) -> str:
    settings = ", ".join(f"{n}={v!r}" for n, v in case.settings.items() if n not in ("grad", "cotangent", "check"))
    return f"With {DTYPES.get(case.dtype, case.dtype)} and {settings or 'every setting at its default'}."


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


SECONDS = 300.0
"""CPU seconds of a script: a busy machine makes none of them wrong."""
FAULT = 70
"""Stands for the 1 with which Python ends on an exception: a script that crashes shows nothing."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a script came to: 1 while the defect is there, 0 when it is gone, anything else is a fault of the script."""

    code: int
    output: str
    error: str = ""


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
            return Ran(124, "", str(error))
    failed = done.returncode == 1 and "Traceback (most recent call last)" in done.stderr
    return Ran(FAULT if failed else done.returncode, done.stdout, done.stderr)
