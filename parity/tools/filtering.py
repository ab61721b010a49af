"""How much gradient cut-cross-entropy's filter drops at real vocabularies, by its definition; on CUDA as run too.

    python -m parity.tools.filtering --plot docs/measured > docs/measured/filtering.md

Its default `filter_eps="high"` leaves out a block of BLOCK tokens and BLOCK vocabulary entries, these in the order of their mean
logit, where max |∂(-log p)/∂z| < eps/32 of the dtype (cce_backward.py, utils.py, 25.1.1). No GPU is needed for that.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from parity.case.inputs import Inputs
from parity.implementations.cce import BLOCK
from parity.implementations.implementation import Implementation
from parity.registry import load, loss_family
from parity.results.report import measured
from parity.running.provenance import resolve_device
from parity.running.shard import VOCABULARIES

PEAKS = (0.5, 1.0, 4.0, 12.0)
"""Standard deviations of the logits."""
WIDTH, HEIGHT, LEFT, TOP = 250, 170, 64, 60
COLOURS = ("#0b62a4", "#c2410c", "#15803d")
DASHES = ("none", "6 3", "2 3")


class DroppedShare(NamedTuple):
    """‖dropped‖ ÷ ‖all‖ of the gradients of hidden states and head, by definition, and of the head's as run, None if not."""

    dtype: str
    size: int
    peak: float
    hidden: float
    head: float
    ran: float | None


def by_definition(x: Inputs) -> tuple[float, float]:
    """‖dropped‖ ÷ ‖all‖ of the gradients of hidden states (B·T, H) and head (V, H) of Σ -log p, in float32."""
    h, w, ids = x.hidden.detach().flatten(0, 1).float(), x.weight.detach().float(), x.ids.flatten()
    z = h @ w.mT
    d = z.softmax(-1)
    d[torch.arange(len(ids), device=d.device), ids] -= 1
    order = z.mean(0).argsort()
    d, w = d[:, order], w[order]
    padded = torch.nn.functional.pad(d.abs(), (0, -d.shape[1] % BLOCK, 0, -d.shape[0] % BLOCK))
    top = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))
    below = (top < torch.finfo(x.hidden.dtype).eps / 32).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    gone = d * below[: d.shape[0], : d.shape[1]]
    return float((gone @ w).norm() / (d @ w).norm()), float((gone.mT @ h).norm() / (d.mT @ h).norm())


def as_run(x: Inputs, kinds: Iterable[Implementation]) -> float:
    """The head's share, from the gradients of the filtered and of the unfiltered kernel."""
    filtered, whole = (_gradient(kind, x) for kind in kinds)
    return float((whole - filtered).norm() / whole.norm())


def _gradient(kind: Implementation, x: Inputs) -> torch.Tensor:
    weight = x.weight.detach().requires_grad_()
    with kind.around():
        kind.call(x.replace(weight=weight))["logps"].sum().backward()
    assert weight.grad is not None
    return weight.grad.double()


def shares(
    device: str,
    sizes: Iterable[int],
    dtypes: Iterable[str],
    ran: bool,
    tokens: int = BLOCK,
    peaks: Iterable[float] = PEAKS,
) -> Iterator[DroppedShare]:
    """For each dtype, vocabulary and peak; targets are drawn from the model's own distribution."""
    fam = loss_family("logprobs")
    for dtype in dtypes:
        for size in sizes:
            for peak in peaks:
                settings = {"B": 1, "T": tokens, "V": size, "H": 64, "peak": peak, "targets": "likely"}
                x = fam.build(fam.case(1, dtype, settings)).to(device)
                found = as_run(x, [load()[f"cce.{name}"] for name in ("default", "unfiltered")]) if ran else None
                yield DroppedShare(dtype, size, peak, *by_definition(x), found)


def svg(found: list[DroppedShare]) -> str:
    """A panel for each dtype: the hidden states' share over the standard deviation of the logits, a line for each vocabulary."""
    dtypes, sizes = (list(dict.fromkeys(column)) for column in list(zip(*found, strict=True))[:2])
    wide, tall = LEFT + len(dtypes) * (WIDTH + 30), TOP + HEIGHT + 44
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">Share of the hidden states\' gradient that the filter drops</text>',
    ]
    most = max(one.hidden for one in found) or 1.0
    low, high = math.log(min(one.peak for one in found)), math.log(max(one.peak for one in found))
    for panel, dtype in enumerate(dtypes):
        x0 = LEFT + panel * (WIDTH + 30)
        out.append(f'<text x="{x0}" y="{TOP - 8}">{dtype}</text>')
        out.append(f'<rect x="{x0}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#9ca3af"/>')
        if not panel:
            out += [
                f'<text x="{x0 - 4}" y="{TOP + HEIGHT * (1 - share) + 4:.0f}" text-anchor="end">{share * most:.1%}</text>'
                for share in (0.0, 0.5, 1.0)
            ]
        for size, colour, dash in zip(sizes, COLOURS, DASHES, strict=False):
            of_size = [one for one in found if (one.dtype, one.size) == (dtype, size)]
            across = [x0 + WIDTH * (math.log(one.peak) - low) / ((high - low) or 1.0) for one in of_size]
            line = " ".join(
                f"{x:.1f},{TOP + HEIGHT * (1 - one.hidden / most):.1f}" for x, one in zip(across, of_size, strict=True)
            )
            out.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            )
        out += [
            f'<text x="{x0 + WIDTH * (math.log(peak) - low) / ((high - low) or 1.0):.1f}" y="{TOP + HEIGHT + 15}" '
            f'text-anchor="middle">{peak:g}</text>'
            for peak in dict.fromkeys(one.peak for one in found)
        ]
    for place, (size, colour) in enumerate(zip(sizes, COLOURS, strict=False)):
        out.append(f'<text x="{LEFT + 60 + place * 90}" y="{TOP - 22}" fill="{colour}">V = {size:,}</text>')
    return "\n".join([*out, f'<text x="{LEFT}" y="{tall - 8}">standard deviation of the logits</text></svg>\n'])


def page(found: list[DroppedShare], command: str) -> str:
    """The table, Markdown; what was computed and what was run."""
    ran = "and, in the last column, as run there" if any(one.ran is not None for one in found) else "not run on CUDA"
    lines = ["# What cut-cross-entropy's gradient filter drops", "", "Written by", "", f"    {command}", ""]
    lines += [f'Computed from the filter\'s definition (cut-cross-entropy 25.1.1, `filter_eps="high"`), {ran}.', ""]
    lines += [f"{BLOCK} tokens, hidden size 64, targets drawn from the model. Shares are ‖dropped‖ ÷ ‖all‖.", ""]
    lines += ["![Share by standard deviation of the logits](filtering.svg)", ""]
    heads = ["dtype", ">V", ">std of the logits", ">hidden states", ">head", ">head, as run"]
    rows = []
    for one in found:
        last = "" if one.ran is None else f"{one.ran:.2%}"
        rows.append([one.dtype, f"{one.size:,}", f"{one.peak:g}", f"{one.hidden:.2%}", f"{one.head:.2%}", last])
    return "\n".join([*lines, *measured.table(heads, rows)]) + "\n"


def main() -> int:
    """Command line: the page, and with --plot the picture beside it."""
    from parity.process import prepare

    parser = argparse.ArgumentParser(
        prog="python -m parity.tools.filtering", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", default="cpu", help="auto, cpu or cuda, where the kernels run too")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write filtering.svg there")
    options = parser.parse_args()
    device = resolve_device(options.device)
    prepare(device, threads=1)
    found = list(shares(device, VOCABULARIES, ("bf16", "fp16"), ran=device == "cuda"))
    if options.plot:
        (options.plot / "filtering.svg").write_text(svg(found), encoding="utf-8")
    options_given = (f" --device {device}" if device == "cuda" else "") + (
        f" --plot {options.plot}" if options.plot else ""
    )
    print(page(found, f"python -m parity.tools.filtering{options_given} > docs/measured/filtering.md"), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
