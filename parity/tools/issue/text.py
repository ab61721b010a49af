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
from parity.errors import Unsupported
from parity.implementations.implementation import Implementation
from parity.process import installed
from parity.results.row import Row
from parity.running import child
from parity.tools.issue.standalone import limits_of, script
from parity.trainers.catalogue import is_trainer

QUIET = frozenset("B T V H peak targets ids_dtype layout layouts grad cotangent chunk_size check".split())
"""Settings that describe the inputs rather than the option that goes wrong, left out of a title."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def issue_text(case: Case, implementation: Implementation, rows: Sequence[Row]) -> str:
    """What one pastes upstream of a new finding, in Markdown: its script and what that prints, or how the case is replayed.

    Args:
        rows: of this case and implementation, as `parity.registry.run_case` yields them.
    """
    its_rows = [r for r in rows if r.implementation == implementation.id]
    failing = [r for r in its_rows if r.verdict not in ("agree", "unsupported")]
    where = "CPU, kernels in Triton's interpreter" if implementation.interpreted else "CPU"
    if its_rows and its_rows[0].device != "cpu" and torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    about, code, printed = _setting(case), "", ""
    try:
        code = script_of(case, implementation, its_rows)
        own = Path(implementation.id.rpartition(":")[0]).resolve().parent if implementation.is_function else None
        done = ran(code, first=own)
        if done.code != 1:
            raise Unsupported("a script of its tensors and the call alone does not show it")
        printed = f"{numbers(done.output)}\n\nA scalar's value, a tensor's norm."
    except Unsupported as error:
        why = f"There is no stand-alone script: {error}. With llm-parity installed, and this as `case.json`:"
        known = json.dumps(case.to_json(), indent=1)
        replay = f"    parity replay case.json --implementation {implementation.id}"
        about, code = f"{about}\n\n## Replay\n\n{why}\n\n```json\n{known}\n```\n\n{replay}", ""
    sources = "\n".join(f"- `{name}`" for name in implementation.sources)
    names = ("torch", "triton", implementation.library or "", "transformers")
    return report(title(case, implementation, failing), about, printed, code, "", sources, versions(names, where))


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


def script_of(case: Case, implementation: Implementation, its_rows: Sequence[Row]) -> str:
    """The stand-alone script of a finding that has none by hand.

    Raises:
        Unsupported: where none can stand alone, with the reason.
    """
    if is_trainer(case.family):
        raise Unsupported("it needs a whole trainer")
    limits = limits_of(its_rows)
    if not limits:
        raise Unsupported("no number is wrong: what fails is how the call behaves")
    return script(case, implementation, limits, its_rows[0].device)


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
