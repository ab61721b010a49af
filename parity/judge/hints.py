"""Where an error sits and what it looks like, from the tensors alone."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from parity.judge.recipe import HALF_SUBNORMAL, NAMES

PLACE = "nearly all at index"
"""How a sentence on few indices begins."""
FEW = 6
"""Indices that a hint names."""
NEARLY_ALL, FAR = 0.9, 10.0
"""Share of the squared error at some indices, and how many times that of any other each of them has, for a hint to name them."""
ROUNDED = 2.0**-7
"""A single number is a factor of any other: one so near to 1 may be a rounding to bf16."""
CANCELLED = 2.0**24
"""Where a value is more times the definition, the latter is zero but for its own rounding: no factor is said."""
SMALL = 2.0**-5
"""Entries below this share of the root mean square have cancelled; their relative error says little."""

ROUNDING = 2.0**-20
"""An error below this share of the largest entry, 16 units of float32, may be the rounding of another formula."""


def hints(
    value: torch.Tensor | None,
    exact: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    inputs: Mapping[str, Any],
    worst: Sequence[int] = (),
    in_float64: bool | None = None,
) -> list[str]:
    """Short sentences on value - exact: `patterns`, and whether it is of rounding's size, or is known to be by `in_float64`;
    nothing where shapes differ."""
    if value is None or value.shape != exact.shape or not exact.numel() or not exact.is_floating_point():
        return []
    v, o = value.detach().to(exact), exact
    if not bool(torch.isfinite(v).all()):
        return ["not finite"]
    found = [*patterns(value.detach(), exact, _sizes(tensors, inputs), worst), *_masked(v - o, {**tensors, **inputs})]
    share = float((v - o).abs().amax() / o.abs().amax().clamp(min=1e-300))
    if 0 < share < ROUNDING and in_float64 is not False:
        found.append(f"at most {share:.1g} of the largest entry: is it another correct formula? also=(…) takes one")
    short = o.abs() - v.abs()  # a truncation takes up to a unit, and never adds
    cut = value.dtype == torch.bfloat16 and float(((short >= 0) & (short <= ROUNDED * o.abs())).double().mean())
    if cut > NEARLY_ALL and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        found.append("Triton's interpreter truncates to bfloat16 where hardware rounds: judge bfloat16 on a GPU")
    return found


def patterns(
    value: torch.Tensor, exact: torch.Tensor, named: Mapping[str, float], worst: Sequence[int] = ()
) -> list[str]:
    """Sentences on a finite value: zero everywhere, a factor with all of `named` that it may be, or few indices, where the
    entry `worst` of the judgement, if told, has one of them."""
    v, o = value.to(exact), exact
    if not bool(o.any()):
        return ["the definition is exactly zero here"] if bool(v.any()) else []
    if not bool(v.any()):
        return ["all zero where the definition is not"]
    spacing = HALF_SUBNORMAL[NAMES.get(value.dtype, "fp64")]  # the value may be of a dtype that none should have
    units = o.abs() + float(o.norm()) / o.numel() ** 0.5 * SMALL + spacing
    return [*_factor(v, o, named), *_places((v - o) / units, o, worst)]


def _masked(e: torch.Tensor, inputs: Mapping[str, Any]) -> Iterator[str]:
    """The masks, of the value's shape or of its first dimensions, on whose one side there is no error."""
    for name, mask in inputs.items():
        if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.shape == e.shape[: mask.dim()]:
            each = e.abs().reshape(mask.numel(), -1).amax(-1)
            sides = {side: each[mask.to(e.device).flatten() == side] for side in (True, False)}
            for side, there in sides.items():
                other = sides[not side]
                if len(other) and len(there) and float(other.max()) < ROUNDING * float(there.max()):
                    yield f"only where {name} is {side}"


def _sizes(tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers by which an error is often too large: sizes of dimensions, and numeric arguments."""
    found = {f"{n}.shape[{i}]": float(k) for n, x in tensors.items() for i, k in enumerate(x.shape)}
    numbers = {n: float(x) for n, x in inputs.items() if isinstance(x, int | float) and not isinstance(x, bool)}
    return {n: x for n, x in {**numbers, **found}.items() if x not in (0.0, 1.0)}


def _factor(v: torch.Tensor, o: torch.Tensor, named: Mapping[str, float]) -> Iterator[str]:
    """A factor that leaves a tenth of the error, and all that it may be. A single number is a factor of any other: that is said
    only where it is one of those."""
    factor = float((v * o).sum() / o.square().sum())
    rounded = v.numel() == 1 and abs(factor - 1) < ROUNDED
    if rounded or abs(factor) > CANCELLED or not float((v - factor * o).norm()) < 0.1 * float((v - o).norm()):
        return
    label = _named(factor, named)
    if label or v.numel() > 1:
        yield f"{factor:.{4 if abs(factor - 1) > ROUNDED else 7}g} times the definition{label and f', which is {label}'}"


def _named(factor: float, named: Mapping[str, float]) -> str:
    """All that a factor may be, for sizes and counts are often alike; squares where it is nothing else."""
    for powers in (((1, "{}"), (-1, "1 ÷ ({})")), ((2, "({})²"),)):
        found = [
            text.format(label)
            for label, value in named.items()
            for power, text in powers
            if value not in (0.0, 1.0) and not (value == -1.0 and power != 1) and abs(factor / value**power - 1) < 2e-3
        ]
        if found:
            return " or ".join(found)
    return ""


def _places(e: torch.Tensor, o: torch.Tensor, worst: Sequence[int]) -> Iterator[str]:
    """Indices of a dimension, at most a quarter of those that have a value, that hold nearly all of the relative error."""
    for d in range(e.dim()):
        rows, exact = (x.movedim(d, 0).reshape(x.shape[d], -1) for x in (e, o))
        some = (rows.any(1) | exact.any(1)).nonzero().flatten()
        ordered, order = rows[some].square().sum(1).sort(descending=True)
        few = 1 + int((ordered.cumsum(0) < NEARLY_ALL * ordered.sum()).sum())
        gaps = (ordered[few - 1 : -1] > FAR * ordered[few:]).nonzero().flatten()
        if not len(gaps) or (few := few + int(gaps[0])) > max(1, len(some) // 4):
            continue
        where = sorted(some[order[:few]].tolist())
        if worst and worst[d] not in where:  # its error is large, and so is that of correct code there
            continue
        shown = ", ".join(map(str, where[:FEW])) + ("…" if few > FEW else "")
        yield f"{PLACE} {shown} of dimension {d}, which has {e.shape[d]}"
