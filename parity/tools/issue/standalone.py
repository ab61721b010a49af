"""The stand-alone script that shows a finding: torch and the library, nothing of this package.

Adapter and definition are the functions of this package, taken from their source for the settings of the case (`bundle`).
The script prints every quantity of the library beside the definition in float64 and exits with 1 while the library is wrong,
with 0 once it is right.
"""

import ast
import contextlib
import dataclasses
import pprint
import re
import textwrap
from collections.abc import Mapping, Sequence

import torch

from parity.case.case import Case
from parity.case.inputs import Inputs
from parity.case.layouts import elsewhere
from parity.errors import Unsupported
from parity.implementations.implementation import Implementation
from parity.registry import loss_family
from parity.results.row import Row
from parity.tools.issue.bundle import Bundle, bundled
from parity.tools.issue.tensors import STYLES, WIDTH, assigned, helpers

LITERALS = 60
"""Lines of tensors from which they are written by the hash that made them, where there is one."""
STRUCTURAL = 0.1
"""Relative distance from which a quantity counts as wrong that was NaN, infinite or missing."""


def script(
    case: Case,
    implementation: Implementation,
    limits: Mapping[str, float] | None = None,
    device: str = "cpu",
    why: str = "",
    twice: bool = False,
) -> str:
    """The script of a finding.

    Args:
        limits: quantity -> relative distance from the definition from which it is wrong; see `limits_of`. None: what has
            an upstream gradient, and every gradient, from `STRUCTURAL` on.
        device: where the finding was made; "cpu" keeps a script there.
        why: the reason, in one comment line.
        twice: the second backward pass of one graph is what is wrong.
    """
    fam = loss_family(case.family)
    inputs = offered(fam.build(case), implementation)
    if limits is None:
        limits = dict.fromkeys([*inputs.cotangents, *(f"grad_{leaf}" for leaf in inputs.leaves)], STRUCTURAL)
    head = [f"# {implementation.library or implementation.id} {implementation.version() or ''}".rstrip()]
    head += [f"# {why}"] if why else []
    try:
        around = [] if implementation.around is contextlib.nullcontext else [implementation.around]
        bundle, (library, oracle, *other) = bundled(inputs, implementation.call, fam.oracle, *around)
        text = _assembled(inputs, implementation, bundle, (library, oracle, *other), limits, device, twice)
    except Unsupported as error:
        return through_harness(case, implementation, str(error))
    return "\n".join([*head, *text]) + "\n"


def limits_of(rows: Sequence[Row]) -> dict[str, float]:
    """Quantity -> where the script draws the line: half way, on a logarithmic scale, from what rounding allows to the error."""
    out: dict[str, float] = {}
    for row in rows:
        if row.verdict not in ("disagree", "nondeterministic") or row.gate in ("protocol", "relation", None):
            continue
        limit = STRUCTURAL
        if row.headroom and row.dist and row.value_oracle:
            limit = float(row.dist / abs(row.value_oracle) / row.headroom**0.5)
        out[str(row.quantity)] = limit
    return out


def offered(inputs: Inputs, implementation: Implementation) -> Inputs:
    """The inputs without upstream gradients on optional outputs that the implementation does not offer."""
    optional = loss_family(inputs.case.family).optional
    kept = {n: g for n, g in inputs.cotangents.items() if n not in optional or n in implementation.outputs}
    return dataclasses.replace(inputs, cotangents=kept)


def _assembled(
    x: Inputs,
    implementation: Implementation,
    bundle: Bundle,
    names: Sequence[str],
    limits: Mapping[str, float],
    device: str,
    twice: bool,
) -> list[str]:
    functions = "\n\n\n".join(ast.unparse(f) for f in bundle.functions.values())
    functions = "\n".join(_broken(line) for line in functions.splitlines())
    constants = [f"{name} = {value}" for name, value in bundle.constants.items()]
    text = functions + "\n".join(constants)
    present = {n: t for n, t in x.tensors.items() if n in x.leaves or re.search(rf"\b{n}\b", text)}
    settings = {n: v for n, v in vars(x.settings).items() if re.search(rf"(settings|\bs)\.{n}\b|['\"]{n}['\"]", text)}
    if re.search(r"getattr\((s|x\.settings), name\)|__dict__", text):
        settings = vars(x.settings)
    library, oracle, *around = names
    lines, tensors = [], _tensors(x, present)
    lines += [f"SETTINGS = SimpleNamespace({', '.join(f'{n}={v!r}' for n, v in settings.items())})"]
    lines += [*constants, "", "", *functions.splitlines(), "", "", *helpers(tensors), *tensors, ""]
    lines += [f"TENSORS = {{{', '.join(f'{n!r}: {n if t is not None else None}' for n, t in present.items())}}}"]
    lines += [f"UPSTREAM = {{{', '.join(f'{n!r}: cotangent_{n}' for n in x.cotangents)}}}"]
    lines += [f"LEAVES, PARAMETERS = {x.leaves!r}, {sorted(x.parameters & present.keys())!r}"]
    lines += [f"LIMITS = {_rounded(limits)}  # relative distance that is more than rounding"]
    lines += ["", "", *_frame(x, around[0] if around else None)]
    lines += ["", "", f"found, exact = measure({library}), measure({oracle}, torch.float64)"]
    lines += _twice(library) if twice else COMPARED.splitlines()
    return [*_imports(bundle, implementation, device, "\n".join(lines)), "", *lines]


def _broken(line: str) -> str:
    if len(line) <= WIDTH:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
    wrapped = "\n".join(textwrap.wrap(line, WIDTH, **options))  # type: ignore[arg-type]
    try:
        ast.parse(textwrap.dedent(wrapped))
    except SyntaxError:
        return line
    return wrapped


def _rounded(limits: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name!r}: {value:.2g}" for name, value in limits.items()) + "}"


def _tensors(x: Inputs, present: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Every tensor and upstream gradient, in the first style that is short enough."""
    for style in STYLES:
        out: list[str] = []
        for name, tensor in present.items():
            out += [] if tensor is None else assigned(name, tensor, x, style)
        for name, g in x.cotangents.items():
            if g.numel() == 1 or not any(g.stride()):
                out.append(f"cotangent_{name} = torch.tensor({float(g.flatten()[0])!r}).expand({tuple(g.shape)})")
            else:
                out += assigned(
                    f"cotangent_{name}",
                    elsewhere(g, dtype=torch.float32) if torch.equal(g.float().double(), g) else g,
                    x,
                    style,
                )
        if len(out) <= LITERALS and all(len(line) <= WIDTH for line in out):
            return out
    if any("too large" in line for line in out):
        raise Unsupported("a tensor is too large to be written down")
    return out


FRAME = """\
def inputs(dtype=None):
    x = SimpleNamespace(settings=SETTINGS{extra})
    for name, tensor in TENSORS.items():
        if tensor is not None and tensor.is_floating_point():
            tensor = tensor.detach().to(dtype or tensor.dtype).requires_grad_(name in LEAVES)
            if name in PARAMETERS and dtype is None:
                tensor = torch.nn.Parameter(tensor.detach(), name in LEAVES)
        setattr(x, name, tensor)
    x.tensors = {{name: getattr(x, name) for name in TENSORS}}
    return x


def backward(x, out, **options):
    pairs = [(out[name], g.to(out[name]).expand_as(out[name])) for name, g in UPSTREAM.items() if name in out]
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    if pairs and LEAVES:
        torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs], **options)
    return {{f"grad_{{name}}": getattr(x, name).grad for name in LEAVES}}


def measure(call, dtype=None):
    x = inputs(dtype)
{calling}
"""

COMPARED = """\
wrong = []
print("| quantity | library | float64 definition | relative distance |")
print("|---|---|---|---|")
for name, right in exact.items():
    value = found.get(name)
    if name not in found:
        continue
    size = float(right.double().norm())
    off = float("nan") if value is None else float((value.double() - right.double()).norm()) / max(size, 1e-300)
    shown = "none" if value is None else f"{float(value) if value.dim() == 0 else float(value.double().norm()):.6g}"
    print(f"| {name} | {shown} | {float(right) if right.dim() == 0 else size:.6g} | {off:.2g} |")
    limit = LIMITS.get(name)
    if limit is not None and torch.isfinite(right).all() and not off <= limit:
        wrong.append(name)
print("wrong:" if wrong else "right", *wrong)
raise SystemExit(1 if wrong else 0)"""


def _twice(library: str) -> list[str]:
    """A second backward pass through one graph must add the gradient of the first."""
    return [
        "x = inputs()",
        f"out = {library}(x)",
        "first = {n: None if g is None else g.clone() for n, g in backward(x, out, retain_graph=True).items()}",
        "both = backward(x, out)",
        "ratios = {n: float(both[n].norm() / first[n].norm()) for n in both if both[n] is not None}",
        'print("gradient after two backward passes over that after one (2 is right):", ratios)',
        "raise SystemExit(int(any(abs(ratio - 2) > 1e-3 for ratio in ratios.values())))",
    ]


def _frame(x: Inputs, around: str | None) -> list[str]:
    """How inputs are made and a call is measured, in the call context of the case."""
    extra = ", cotangents=UPSTREAM, leaves=LEAVES"
    extra += f", context={x.context!r}, device=torch.device('cpu')"
    extra += f", case=SimpleNamespace(seed={x.case.seed}, dtype={x.case.dtype!r})"
    calls = {
        "autocast": [f"with torch.autocast({x.device.type!r}, torch.bfloat16):", "    out = call(x)"],
        "checkpoint": [
            "out = apart(call, x, lambda f, *of: torch.utils.checkpoint.checkpoint(f, *of, use_reentrant=True))"
        ],
        "compile": ["out = apart(call, x, lambda f, *of: torch.compile(f, backend='aot_eager')(*of))"],
    }
    special = [f"    {line}" for line in calls.get(x.context, ["out = call(x)"])]
    plain = ["if dtype is not None:", "    out = call(x, lambda name, value, *more: value)", "else:", *special]
    tail = ["grads = backward(x, out)"]
    last = ["return {n: v.detach() for n, v in out.items() if not n.startswith('_')} | grads"]
    body = [*plain, *tail]
    if around:
        body = [f"with contextlib.nullcontext() if dtype is not None else {around}():", *(f"    {b}" for b in body)]
    calling = "\n".join(f"    {line}" for line in [*body, *last])
    out = FRAME.format(extra=extra, calling=calling).splitlines()
    return [*APART.splitlines(), "", "", *out] if x.context in ("checkpoint", "compile") else out


APART = '''\
def apart(call, x, run):
    """The call as a function of its leaves alone."""
    names = []

    def on_leaves(*leaves):
        given = dict(zip(LEAVES, leaves))
        out = call(SimpleNamespace(**vars(x) | given | {"tensors": x.tensors | given}))
        names[:] = out
        return tuple(out.values())

    return dict(zip(names, run(on_leaves, *(getattr(x, name) for name in LEAVES))))'''


def _imports(bundle: Bundle, implementation: Implementation, device: str, text: str) -> list[str]:
    seen = dict.fromkeys(["import torch", "from types import SimpleNamespace", *bundle.imports])
    if re.search(r"(?<![\w.])(inf|nan)\b", text):
        seen["from math import inf, nan"] = None
    if "contextlib." in text:
        seen["import contextlib"] = None
    if "torch.utils.checkpoint" in text:
        seen["import torch.utils.checkpoint"] = None
    before = ["import os", "", "os.environ['HF_HUB_OFFLINE'] = '1'"] if implementation.library == "trl" else []
    if implementation.interpreted:
        before = ["import os", "import torch", "", "if not torch.cuda.is_available():"]
        before.append('    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported')
    out = sorted(line for line in seen if line.startswith("import")) + sorted(
        line for line in seen if line.startswith("from")
    )
    tail = ["", "torch.set_num_threads(1)"]
    if device != "cpu":
        tail.append('torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")')
    return [*before, *out, *tail]


def through_harness(case: Case, implementation: Implementation, why: str) -> str:
    """A script that writes the case down and replays it."""
    lines = [
        f"# {implementation.id} through the harness (package parity): {why}".replace("\n", " ")[:WIDTH],
        "import json",
        "import subprocess",
        "",
        *f"case = {pprint.pformat(case.to_json(), width=WIDTH - 7)}".splitlines(),
        'with open("case.json", "w") as file:',
        "    json.dump(case, file)",
        f'done = subprocess.run(["parity", "replay", "case.json", "--implementation", {implementation.id!r}])',
        "raise SystemExit(done.returncode)",
    ]
    return "\n".join(lines) + "\n"
