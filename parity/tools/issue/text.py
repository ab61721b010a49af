"""The Markdown issue of a finding."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import torch

from parity.case.case import Case
from parity.implementations.implementation import Implementation
from parity.registry import load, loss_family
from parity.results.row import Row
from parity.tools.issue.definition import described
from parity.tools.issue.sources import located
from parity.tools.issue.standalone import outputs, script

QUIET = frozenset({"B", "T", "V", "H", "peak", "targets", "ids_dtype", "layout", "grad", "cotangent", "chunk_size"})
"""Settings that describe the inputs rather than the option that goes wrong, left out of a title."""


def issue_text(case: Case, implementation: Implementation, rows: Sequence[Row]) -> str:
    """What one pastes upstream, in Markdown: title, numbers, both code paths, script and versions.

    Args:
        rows: rows of this case as `parity.judging.compare.run_case` yields them, at least those of the implementation; those of
            the reference fill its column.
    """
    own = [r for r in rows if r.implementation == implementation.id]
    reference = next((r.implementation for r in rows if r.role == "reference"), None)
    theirs = [r for r in rows if r.implementation == reference and reference != implementation.id]
    failing = [r for r in own if r.verdict not in ("agree", "unsupported")]
    known = loss_family(case.family)
    metrics = [r.quantity for r in failing if r.quantity in known.optional]
    device = own[0].device if own else "cpu"
    inputs = known.build(case)
    names = [*outputs(inputs, implementation, metrics), *(f"grad_{leaf}" for leaf in inputs.leaves)]
    code = script(case, implementation, device, metrics)
    parts = [
        f"# {title(case, implementation, failing)}",
        _summary(case, implementation, failing, described(inputs)),
        table(implementation, names, own, theirs),
        _paths([implementation, *([load()[reference]] if theirs and reference in load() else [])]),
        f"## Reproduction\n\n```python\n{code}```",
        _note(code, theirs),
        _versions(implementation, device),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def title(case: Case, implementation: Implementation, failing: Sequence[Row]) -> str:
    """`library version: function: effect, with setting=value`."""
    version = implementation.version() or "?"
    name = implementation.id.partition(".")[2] or implementation.id
    moved = [f"{n}={_short(v)}" for n, v in case.settings.items() if n not in QUIET]
    where = f", with {', '.join(moved[:4])}{', …' if len(moved) > 4 else ''}" if moved else ""
    library = implementation.library or "user function"
    return f"{library} {version}: `{name}`: {effect(failing)}{where} ({case.dtype})"


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


def effect(failing: Sequence[Row]) -> str:
    """What goes wrong, in a few words: NaN, a missing gradient, a factor, a relative error, or the exception."""
    if not failing:
        return "disagrees with its definition"
    first = failing[0]
    if first.quantity is None:
        return f"{first.verdict}: {first.message}"[:90]
    for word, cell in (("NaN", "nan"), ("no", "none"), ("infinite", "inf")):
        found = [r.subject for r in failing if r.value_oracle is not None and _cell(r) == cell]
        if found:
            return f"{word} {_words(found)}"
    value, truth = first.value, first.value_oracle
    if first.quantity == "loss" and value is not None and truth and not 0.99 < value / truth < 1.01:
        return f"loss is {value / truth:.3g} times its definition"
    errors = [(r.dist / abs(r.value_oracle), r.subject) for r in failing if r.dist and r.value_oracle]
    if errors:
        error, quantity = max(errors)
        return f"{_words([quantity])} off by {100 * error:.2g} %"
    return f"{first.quantity}: {first.message}"[:90]


def _words(quantities: Sequence[str]) -> str:
    """`gradient of hidden and weight`, `entropy`."""
    plain = [{"logps": "log-probs"}.get(q, q) for q in quantities if not q.startswith("grad_")]
    leaves = [q.removeprefix("grad_") for q in quantities if q.startswith("grad_")]
    gradients = [f"gradient of {', '.join(leaves)}"] if leaves else []
    return " and ".join([*([", ".join(plain)] if plain else []), *gradients])


def _summary(case: Case, implementation: Implementation, failing: Sequence[Row], definition: str) -> str:
    library = f"{implementation.library} {implementation.version()}" if implementation.library else "its own file"
    settings = ", ".join(f"{n}={v!r}" for n, v in case.settings.items()) or "all settings at their defaults"
    lines = [f"On the inputs below, `{implementation.id}` of {library} does not give {definition}, in float64.", ""]
    for row in failing:
        kind = {"logic": "rounding does not explain it", "precision": "a loss of precision"}.get(row.cls or "")
        used = f"{row.headroom:.3g} times what rounding allows" if row.headroom else ""
        facts = "; ".join(filter(None, [kind or row.verdict, used, row.message]))
        lines.append(f"- {row.quantity or 'the call'}: {facts}")
    return "\n".join([*lines, "", f"Settings: {case.dtype}, {settings}."])


def table(implementation: Implementation, names: Sequence[str], own: Sequence[Row], theirs: Sequence[Row]) -> str:
    """metric | candidate | reference | float64: a scalar's value, a tensor's norm."""
    mine, other = ({r.quantity: r for r in rows} for rows in (own, theirs))
    header = ["metric", f"{implementation.role} `{implementation.id}`"]
    header += [f"reference `{theirs[0].implementation}`"] if theirs else []
    lines = [[*header, "float64"], ["---"] * (len(header) + 1)]
    for name in names:
        both = [mine.get(name), *([other.get(name)] if theirs else [])]
        truth = next((r.value_oracle for r in both if r and r.value_oracle is not None), None)
        lines.append([name, *map(_cell, both), "-" if truth is None else f"{truth:.6g}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n\nA scalar's value, a tensor's norm."


def _cell(row: Row | None) -> str:
    """The value as the script prints it: a row has no number where the value is not finite or not there."""
    if row is None:
        return "-"
    if row.value is not None:
        return f"{row.value:.6g}"
    message = row.message
    if message.startswith(("no gradient", "missing")):
        return "none"
    return "nan" if "NaN" in message and not message.startswith("0 NaN") else "inf"


def _paths(implementations: Sequence[Implementation]) -> str:
    lines = ["## Code", ""]
    for implementation in implementations:
        version = f"{implementation.library} {implementation.version()}"
        cited = [f"- {implementation.role}: `{located(n)}` (`{n}`, {version})" for n in implementation.sources]
        lines += cited or [f"- {implementation.role}: `{implementation.id}`, {version}"]
    return "\n".join(lines)


def _note(text: str, theirs: Sequence[Row]) -> str:
    """What the script leaves out of the table."""
    if theirs and "def reference(" not in text and "parity replay" not in text and "def candidate(" in text:
        return f"The script leaves `{theirs[0].implementation}` out: it needs another library or more lines."
    return ""


def _versions(implementation: Implementation, device: str) -> str:
    names = dict.fromkeys(["torch", "triton", implementation.library, "transformers"])
    found = [f"- python {platform.python_version()}"]
    for name in filter(None, names):
        try:
            found.append(f"- {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"- {name} not installed")
    where = "CPU"
    if device != "cpu" and torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    elif implementation.interpreted:
        where = "CPU, kernels in Triton's interpreter"
    return "\n".join(["## Versions", "", *found, f"- device: {where}"])
