"""Names for patterns in an error: what a maintainer would look for first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parity.judging.execute import Outcome
from parity.recipe import TF32, TF32_TRUNCATED

if TYPE_CHECKING:
    from parity.judging.assess import CaseOracle


def hints(oracle: CaseOracle, name: str, outcome: Outcome) -> list[str]:
    """Sentences about one failing quantity; empty where no pattern has a name."""
    value, truth = outcome.quantities.get(name), oracle.exact.get(name)
    if value is None or truth is None or value.shape != truth.shape:
        return []
    v, o = value.detach().cpu().double(), truth.double()
    out = []
    if not bool(torch.isfinite(v).all()):
        loss = outcome.quantities.get(oracle.family.outputs[0])
        if name.startswith("grad_") and loss is not None and bool(torch.isfinite(loss).all()):
            out.append("the value is finite, but its gradient is not")
        return out
    if float(o.abs().sum()) == 0.0:
        return ["the oracle is exactly zero here"] if float(v.abs().sum()) else []
    if float(v.abs().sum()) == 0.0:
        return ["all zero where the oracle is not"]
    factor = float((v * o).sum() / o.square().sum())
    residual = float((v - factor * o).norm() / (v - o).norm().clamp(min=1e-300))
    if residual < 0.1:
        out.append(f"{factor:.6g} times the oracle" + _named_factor(oracle, factor))
    out += _tf32(oracle, name, v, o)
    mask = oracle.inputs.tensors.get("mask")
    if mask is not None and v.dim() >= 2 and v.shape[:2] == mask.shape:
        error = (v - o).abs().flatten(2).sum(-1) if v.dim() > 2 else (v - o).abs()
        hidden = ~mask.cpu().bool()
        if bool(hidden.any()) and float(error[hidden].sum()) > 0.5 * float(error.sum()):
            out.append("the error sits on masked tokens")
    return out


EXPLAINED = 8.0
"""An error is tf32's where it is this many times smaller against the definition with operands on tf32's grid."""


def _tf32(oracle: CaseOracle, name: str, v: torch.Tensor, o: torch.Tensor) -> list[str]:
    """float32 products taken in tf32 where nothing allowed it, as `tl.dot` does unless it is told otherwise."""
    inputs = oracle.inputs
    if inputs.device.type != "cuda" or inputs.case.dtype != "fp32" or inputs.context in ("tf32", "autocast"):
        return []
    for precision, said in ((TF32, "rounded"), (TF32_TRUNCATED, "truncated")):
        if EXPLAINED * float((v - oracle.cut(precision)[name]).norm()) <= float((v - o).norm()):
            return [f"tf32 although it is off: products of operands {said} to 10 bits are right"]
    return []


def _named_factor(oracle: CaseOracle, factor: float) -> str:
    for label, value in oracle.family.factors(oracle.inputs).items():
        for power, text in ((1, label), (-1, f"1 ÷ ({label})"), (2, f"({label})²")):
            if value not in (0.0, 1.0) and not (value == -1.0 and power != 1) and abs(factor / value**power - 1) < 2e-3:
                return f", which is {text}"
    return ""
