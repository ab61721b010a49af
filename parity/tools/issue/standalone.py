"""The stand-alone script that shows a finding: torch and the library, nothing of this package.

It holds the tensors of the case, the call of the library as the adapter makes it (`call_recorder`), and the float64 definition:
each quantity as its numbers or, beyond `WHOLE` of them, as products with random vectors. It exits with 1 while the library is
wrong, with 0 once it is right.
"""

import contextlib
from collections.abc import Mapping, Sequence

import torch

from parity.case.case import Case
from parity.errors import Unsupported
from parity.implementations.implementation import Implementation
from parity.protocol.call import differentiated, fresh
from parity.registry import oracle_of
from parity.results.row import Row
from parity.tools.issue.call_recorder import Recorder
from parity.tools.issue.tensors import assigned, wrapped

STRUCTURAL = 0.1
"""Relative distance from which a quantity counts as wrong that was NaN, infinite or missing."""
WHOLE = 64
LONGEST = 60_000
"""Characters of a script; an issue takes 65,536."""
SKETCHED = f"""\
def sketch(tensor):  # the numbers of a small tensor, 16 random products of a large one
    flat = tensor.detach().cpu().double().flatten()
    if flat.numel() <= {WHOLE}:
        return flat
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(16, flat.numel(), generator=generator, dtype=torch.float64, device="cpu") @ flat / 4
"""
COMPARED = """\
wrong = []
print("| quantity | library | float64 definition | relative distance |")
print("|---|---|---|---|")
for name, (size, numbers) in EXACT.items():
    value, right = found[name], torch.tensor(numbers, dtype=torch.float64, device="cpu")
    off = float("nan") if value is None else float((sketch(value) - right).norm() / right.norm().clamp(min=1e-300))
    shown = "none" if value is None else f"{float(value if value.dim() == 0 else value.double().norm()):.6g}"
    print(f"| {name} | {shown} | {size:.6g} | {off:.2g} |")
    if name in LIMITS and not off <= LIMITS[name]:
        wrong.append(name)
print("wrong:" if wrong else "right", *wrong)
raise SystemExit(1 if wrong else 0)
"""


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


def script(case: Case, implementation: Implementation, limits: Mapping[str, float], device: str = "cpu") -> str:
    """The script of a finding; `limits` as `limits_of` gives them.

    Raises:
        Unsupported: where no script can stand alone, with the reason.
    """
    if implementation.around is not contextlib.nullcontext:
        raise Unsupported("the harness changes the library's process around the call")
    whole = oracle_of(case).offered(implementation)
    x = fresh(whole.inputs)
    if x.context not in ("plain", "autocast"):
        raise Unsupported(f"the call is made under {x.context}")
    tensors = {name: tensor for name, tensor in x.tensors.items() if tensor is not None}
    autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=x.context == "autocast")
    with autocast, Recorder(tensors) as seen:
        outputs = implementation.call(x)
    found = {name: seen.text(value) for name, value in outputs.items() if name in whole.exact}
    given = {name: found[name] for name in differentiated(x, outputs)}
    if not seen.called:
        raise Unsupported("the adapter calls no function of a library by name")
    body = "\n".join([*seen.lines, *found.values()])
    used = [name for name in tensors if name in x.leaves or name in body]
    lines = [line for name in used for line in assigned(name, tensors[name].detach())]
    for name in used:
        if name in x.parameters:
            lines.append(f"{name} = torch.nn.Parameter({name}, {name in x.leaves})")
        elif name in x.leaves:
            lines.append(f"{name}.requires_grad_()")
    for name in given:
        lines += assigned(f"cotangent_{name}", x.cotangents[name])
    inner = [part for line in seen.lines for part in wrapped(line)]
    if x.context == "autocast":
        inner = ["with torch.autocast(hidden.device.type, torch.bfloat16):", *(f"    {line}" for line in inner)]
    lines += ["", *inner, ""]
    if given and x.leaves:
        upstream = ", ".join(f"cotangent_{name}.to({text})" for name, text in given.items())
        lines += wrapped(f"torch.autograd.backward([{', '.join(given.values())}], [{upstream}])")
        found |= {f"grad_{name}": f"{name}.grad" for name in x.leaves}
    exact = {name: value for name, value in whole.exact.items() if name in found and value.isfinite().all()}
    lines += wrapped(f"found = {{{', '.join(f'{name!r}: {text}' for name, text in found.items())}}}")
    lines += ["EXACT = {", *(part for name, value in exact.items() for part in _told(name, value)), "}"]
    kept = ", ".join(f"{name!r}: {value:.2g}" for name, value in limits.items() if name in exact)
    lines += [f"LIMITS = {{{kept}}}  # a relative distance beyond is no rounding", "", ""]
    lines += [*SKETCHED.splitlines(), "", "", *COMPARED.splitlines()]
    head = f"# {implementation.library or implementation.id} {implementation.version() or ''}".rstrip()
    out = "\n".join([head, *_imports(seen, implementation, device, "\n".join(lines)), "", *lines]) + "\n"
    if len(out) > LONGEST:
        raise Unsupported(f"its tensors make a script of {len(out):,} characters")
    return out


def _told(name: str, value: torch.Tensor) -> list[str]:
    size = float(value) if value.dim() == 0 else float(value.double().norm())
    space: dict[str, object] = {"torch": torch}
    exec(SKETCHED, space)
    numbers = ", ".join(f"{v:.10g}" for v in space["sketch"](value).tolist())  # type: ignore[operator]
    return wrapped(f"    {name!r}: ({size:.10g}, [{numbers}]),")


def _imports(seen: Recorder, implementation: Implementation, device: str, text: str) -> list[str]:
    out = ["import torch", *sorted(seen.imports), "", "torch.set_num_threads(1)"]
    if " inf" in text or "-inf" in text or " nan" in text:
        out.insert(0, "from math import inf, nan")
    if implementation.library == "trl":
        out = ["import os", "", "os.environ['HF_HUB_OFFLINE'] = '1'", *out]
    if implementation.interpreted:
        switch = '    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported'
        out = ["import os", "import torch", "", "if not torch.cuda.is_available():", switch, *out]
    if device != "cpu":
        out.append('torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")')
    return out
