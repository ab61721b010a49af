"""The stand-alone script that reproduces a finding: torch and the library, at most 40 lines, no harness."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import pprint
import re
from collections.abc import Sequence

import torch

from parity.case.case import Case
from parity.case.inputs import Inputs
from parity.errors import Unsupported
from parity.implementations.implementation import Implementation
from parity.registry import loss_family
from parity.tools.issue import trainer_calls
from parity.tools.issue.calls import CALLS, Call, plain_log_softmax
from parity.tools.issue.definition import DEFINITIONS
from parity.tools.issue.tensors import STYLES, WIDTH, assigned, helpers, wrapped

LINES = 40

assert trainer_calls  # registers the trainers' calls


def script(case: Case, implementation: Implementation, device: str = "cpu", metrics: Sequence[str] = ()) -> str:
    """A script that prints, for each output and gradient, what the implementation and the float64 definition give.

    At most 40 lines of 120 columns that import torch and the library; where the implementation has no `Call`, does not
    take the case, or the case is too large to be written down, a script that goes through `parity replay` instead.

    Args:
        device: where the finding was made; "cpu" keeps a script there unless it needs Triton.
        metrics: optional outputs to print besides those that have an upstream gradient.
    """
    fam = loss_family(case.family)
    if implementation.id not in CALLS or case.family not in DEFINITIONS:
        return through_harness(case, implementation, "no stand-alone call is written for it")
    inputs = offered(fam.build(case), implementation)
    names = outputs(inputs, implementation, metrics)
    try:
        parties = _parties(inputs, implementation, names)
    except (Unsupported, ImportError) as error:
        return through_harness(case, implementation, str(error))
    alone = {implementation.role: parties[implementation.role]}
    for shown, style in itertools.product((parties, alone), STYLES):
        lines = _assembled(inputs, implementation, names, shown, device, style)
        text = "\n".join(lines) + "\n"
        if len(lines) <= LINES and all(len(line) <= WIDTH for line in lines) and _parses(text):
            return text
    return through_harness(case, implementation, f"its tensors do not fit in {LINES} lines")


def _parses(text: str) -> bool:
    """Whether every line was broken inside brackets."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def offered(inputs: Inputs, implementation: Implementation) -> Inputs:
    """The inputs without upstream gradients on optional outputs that the implementation does not offer."""
    optional = loss_family(inputs.case.family).optional
    kept = {n: g for n, g in inputs.cotangents.items() if n not in optional or n in implementation.outputs}
    return dataclasses.replace(inputs, cotangents=kept)


def outputs(inputs: Inputs, implementation: Implementation, metrics: Sequence[str]) -> list[str]:
    """The outputs to print: those with an upstream gradient, then the metrics asked for where they are offered."""
    known = loss_family(inputs.case.family).outputs
    more = [n for n in known if n in metrics and n in implementation.outputs and n not in inputs.cotangents]
    return [n for n in known if n in inputs.cotangents] + more


def _parties(x: Inputs, implementation: Implementation, names: Sequence[str]) -> dict[str, Call]:
    """Role -> call: the implementation and, for log-probs, the reference (TRL's own for TRL, else its arithmetic).

    The reference of a policy loss is the trainer itself, which another library's script cannot need.
    """
    parties = {implementation.role: CALLS[implementation.id](x, names)}
    if x.case.family == "logprobs" and implementation.role == "candidate" and x.settings.ignored == "none":
        plain = CALLS["trl.selective_log_softmax"] if implementation.library == "trl" else plain_log_softmax
        parties["reference"] = plain(x, names)
    return parties


def _assembled(
    x: Inputs, implementation: Implementation, names: Sequence[str], parties: dict[str, Call], device: str, style: str
) -> list[str]:
    present = [n for n in ("hidden", "weight", "bias", "lora_a", "lora_b") if x.tensors.get(n) is not None]
    signature = ", ".join(present)
    functions: list[str] = []
    definition = DEFINITIONS[x.case.family](x, names)
    for role, lines in [*((r, c.lines) for r, c in parties.items()), ("definition", definition)]:
        functions.append(f"def {role}({signature}):")
        for line in _returning(list(lines), names):
            functions += wrapped(f"    {line}")
    upstream, tensors = [], _tensors(x, present, functions, style)
    for name in (n for n in names if n in x.cotangents):
        lines = _cotangent(name, x, style)
        upstream.append(lines.pop() if len(lines) == 1 and " = " not in lines[0] else f"cotangent_{name}")
        tensors += lines
    leaves = f"[{', '.join(f'({n}, {n in x.leaves})' for n in present)}]"
    header = ", ".join(f'"{n}"' for n in ["metric", *names, *(f"grad_{leaf}" for leaf in x.leaves)])
    columns = ", ".join(f'["{role}", *measure({_in_context(x, role)})]' for role in parties)
    body = [
        *(line for c in parties.values() for line in c.setup),
        *helpers(tensors),
        *tensors,
        *functions,
        "def measure(call, dtype=None):",
        *wrapped(f"    inputs = [torch.nn.Parameter(t.to(dtype or t.dtype), grad) for t, grad in {leaves}]"),
        "    out = call(*inputs)",
        *wrapped(
            f"    pairs = [(o, g.to(o).expand_as(o)) for o, g in zip(out, [{', '.join(upstream)}]) if o.requires_grad]"
        ),
        "    torch.autograd.backward(*zip(*pairs))",
        "    values = [*out, *(t.grad for t in inputs if t.requires_grad)]",
        '    return ["none" if v is None else f"{v.double().norm() if v.dim() else v:.6g}" for v in values]',
        'exact = ["float64", *measure(definition, torch.float64)]',
        *wrapped(f"for row in zip([{header}], {columns}, exact):"),
        '    print("| " + " | ".join(row) + " |")',
    ]
    return [_comment(x, implementation), *_imports(implementation, parties, device, body), *body]


def _returning(body: list[str], names: Sequence[str]) -> list[str]:
    """The lines of a function's body with a return statement, trailing assignments of outputs folded into it."""
    values = {name: name for name in names}
    while body:
        name, _, value = body[-1].partition(" = ")
        folded = ", ".join((values | {name: value}).values())
        if values.get(name) != name:
            break
        if len(names) > 1 and (len(folded) > WIDTH - 16 or re.search(rf"\b({'|'.join(names)})\b", value)):
            break
        values[name] = value
        body = body[:-1]
    return [*body, f"return {', '.join(values.values())}{',' if len(values) == 1 else ''}"]


def _cotangent(name: str, x: Inputs, style: str) -> list[str]:
    """An upstream gradient: an expression where it is one number, which stays expanded as `.sum()` hands it out."""
    g = x.cotangents[name]
    if g.numel() == 1 or not any(g.stride()):
        return [f"torch.tensor({float(g.flatten()[0])!r})"]
    return assigned(f"cotangent_{name}", g.float() if torch.equal(g.float().double(), g) else g, x, style)


def _comment(x: Inputs, implementation: Implementation) -> str:
    library = f"{implementation.library} {implementation.version()}"
    return f"# {implementation.id}, {library}, {x.case.dtype}: against the definition in float64"[:WIDTH]


def _imports(implementation: Implementation, parties: dict[str, Call], device: str, body: list[str]) -> list[str]:
    text = "\n".join(body)
    numbers = [n for n in ("inf", "nan") if re.search(rf"(?<![\w.]){n}\b", text)]
    out = ["import os"] if implementation.interpreted else []
    out += [f"from math import {', '.join(numbers)}"] if numbers else []
    seen = list(dict.fromkeys(line for c in parties.values() for line in c.imports))
    out += [] if any(" torch," in line for line in seen) else ["import torch"]
    if "checkpoint(" in text:
        out.append("from torch.utils.checkpoint import checkpoint")
    if implementation.interpreted:
        out.append("if not torch.cuda.is_available():")
        out.append('    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported')
    out += seen
    if implementation.interpreted or device != "cpu":
        out.append('torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")')
    return out


def _tensors(x: Inputs, present: Sequence[str], functions: Sequence[str], style: str) -> list[str]:
    """The leaves, every tensor that the functions name, and the upstream gradients."""
    text = "\n".join(functions)
    out: list[str] = []
    for name, tensor in x.tensors.items():
        if tensor is not None and (name in present or re.search(rf"\b{name}\b(?!=)", text)):
            out += assigned(name, tensor, x, style)
    return out


def _in_context(x: Inputs, role: str) -> str:
    context = x.settings.context
    if context == "autocast":
        return f"torch.autocast(hidden.device.type, torch.bfloat16)({role})"
    if context == "checkpoint":
        return f"lambda *inputs: checkpoint({role}, *inputs, use_reentrant=True)"
    if context == "compile":
        return f'torch.compile({role}, backend="aot_eager")'
    return role


def through_harness(case: Case, implementation: Implementation, why: str) -> str:
    """A script that writes the case down and replays it."""
    lines = [
        f"# {implementation.id} through the harness (package parity): {why}".replace("\n", " ")[:WIDTH],
        "import json",
        "import subprocess",
        *f"case = {pprint.pformat(case.to_json(), width=WIDTH - 7)}".splitlines(),
        'with open("case.json", "w") as file:',
        "    json.dump(case, file)",
        f'subprocess.run(["parity", "replay", "case.json", "--implementation", {implementation.id!r}])',
    ]
    return "\n".join(lines) + "\n"
