"""The gates: an implementation's error, divided by the error that correct code makes on the same inputs.

Every gate is the ratio of an error to what is allowed, so that 1 is the limit and a smaller number the headroom used.
Comparisons are in positive form: a NaN fails. The judge knows no loss.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from parity.case.case import DTYPES
from parity.recipe import HALF_SUBNORMAL, LARGEST, UNIT_ROUNDOFF

NORM, MAX, ROW, SLOPE, SCALAR, FIRST_ORDER = 3.0, 6.0, 6.0, 6.0, 6.0, 10.0
"""Multiples of the unit that each gate allows; docs/judging.md holds the measurements behind them."""
WORST = 2.0
"""Every gate but zero and exact also allows this multiple of the worst replica's error: where one entry carries the error,
3·rms is a 3σ test of one number; where rounding moves an exponent (a KL term at τ = 1e-3) or decides whether a tail
1 - Σp is clamped, rms says nothing of the tail. Twelve replicas cannot show one longer than √12·rms."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Unit:
    """What a quantity is measured with.

    Attributes:
        exact: the oracle's value, float64.
        replicas: the replicas' values, (R, …) of the same trailing shape.
        compute: dtype name in which the recipe computes, for the common-mode term of the slope.
        zero: rows (leading dimensions) that the mask makes exactly zero, or None.
        entrywise: whether every entry is a row of its own (log-probs, a bias gradient) instead of the last dimension.
        scalar: whether the quantity is a sum that the scalar gate judges.
        counted: whether it is a count or fraction that must be exact.
        first_order: √Σ(∂L/∂logp·rms e)², for a scalar.
        terms: ‖terms‖₂·√n of what a scalar sums.
    """

    exact: torch.Tensor
    replicas: torch.Tensor
    compute: str = "fp32"
    zero: torch.Tensor | None = None
    entrywise: bool = False
    scalar: bool = False
    counted: bool = False
    first_order: float = 0.0
    terms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on one quantity: headroom of every gate, the tightest first in `gate`.

    `overflows`: nothing but infinities breaks its structure, beside entries where replicas overflow.
    """

    gates: dict[str, float]
    message: str = ""
    undecided: int = 0
    overflows: bool = False
    max_abs: float | None = None
    max_rel: float | None = None
    dist: float | None = None
    atol: float | None = None
    rtol: float | None = None
    allclose: bool | None = None
    slope: float | None = None
    worst: tuple[tuple[tuple[int, ...], float, float, float], ...] = ()

    @property
    def gate(self) -> str:
        """The tightest gate."""
        return _tightest(self.gates)

    @property
    def headroom(self) -> float:
        """Error ÷ allowed at the tightest gate; infinite for a structural failure."""
        value = self.gates[self.gate]
        return math.inf if math.isnan(value) else value

    @property
    def agrees(self) -> bool:
        """Whether every gate holds."""
        return self.headroom <= 1.0


def _tightest(gates: dict[str, float]) -> str:
    return max(gates, key=lambda g: math.inf if math.isnan(gates[g]) else gates[g])


def failed(message: str, gate: str = "structure") -> Judgement:
    """A quantity that is not there, or not of the right shape or kind."""
    return Judgement({gate: math.inf}, message)


def judge(value: torch.Tensor | None, unit: Unit, dtype: torch.dtype) -> Judgement:
    """Hold a value against the oracle; `dtype` is the one the quantity should have.

    Gates (o the oracle, e = value - o, e_r the replicas' errors, u the unit roundoff of `dtype`, η half its subnormal
    spacing): structure; zero; norm ‖e‖ ≤ 3·max(rms‖e_r‖, u‖o‖, η√n); max |e|∞ ≤ 6·max(rms|e_r|∞, u|o|∞, η); row, the
    same per last dimension (6 becomes (exp(6·√log(1+s²)) - 1)/s, at most (max|e_r|/unit)², where the unit is a large
    share s of the row); slope |Σe·o|/‖o‖² ≤ 6·max(rms s_r, u/√3·√Σo⁴/‖o‖², 2u_c); for a scalar
    |e| ≤ max(10·first order, 6·rms e_r, u|o|, u_c·terms); for a count |e| ≤ 4·2⁻²⁴·max(|o|, 1). All but structure, zero
    and the count also allow `WORST` times the worst replica (the row gate: of that row).
    """
    if value is None:
        return failed("missing")
    if tuple(value.shape) != tuple(unit.exact.shape):
        return failed(f"shape {tuple(value.shape)}, expected {tuple(unit.exact.shape)}")
    if not value.is_floating_point():
        return failed(f"dtype {_NAMES.get(value.dtype, value.dtype)}, expected a floating-point one")
    if not unit.scalar and value.dtype != dtype:
        return failed(f"dtype {_NAMES.get(value.dtype, value.dtype)}, expected {_NAMES[dtype]}")
    name = _NAMES[value.dtype]
    u, eta, largest = UNIT_ROUNDOFF[name], HALF_SUBNORMAL[name], LARGEST[name]
    o, v = unit.exact.detach().cpu().double(), value.detach().cpu().double()
    stack = unit.replicas.detach().cpu().double()
    if stack.shape[1:] != o.shape:
        raise ValueError(f"replicas {tuple(stack.shape)} do not stack the oracle's {tuple(o.shape)}")
    spread = stack - o
    if o.numel() == 0:
        return Judgement({"structure": 0.0})
    infinite = torch.isinf(o) & (stack == o).all(0)  # by definition, not because something overflowed
    skip = ~torch.isfinite(spread).all(0) | (o.abs() > largest / 2) | ((spread + o).abs() > largest).any(0)
    skip = skip & ~infinite
    finite = torch.isfinite(v)
    same = (finite == torch.isfinite(o)) & (torch.isnan(v) == torch.isnan(o))
    same = torch.where(infinite, v == o, same | skip)
    gates = {"structure": 0.0}
    message, overflows = "", False
    if not bool(same.all()):
        beyond = ~same & torch.isinf(v) & torch.isfinite(o)
        if bool((same | beyond).all()):
            nearest = judge(torch.where(beyond, v.sign() * largest, v).to(value), unit, dtype)
            if nearest.agrees:
                return nearest
        gates["structure"] = math.inf
        overflows = bool(skip.any()) and bool((torch.isinf(v) | same).all())
        nan, inf = int((torch.isnan(v) & ~same).sum()), int((torch.isinf(v) & ~same).sum())
        message = (
            f"{nan} NaN and {inf} infinite entries where the oracle is finite"
            if nan + inf
            else "finite where the oracle is not"
        )
    skip = skip | ~torch.isfinite(o) | ~finite
    e = torch.where(skip, 0.0, v - o)
    o = torch.where(skip, 0.0, o)
    spread = torch.where(skip, 0.0, spread)
    if unit.zero is not None:
        zero = unit.zero.reshape(unit.zero.shape + (1,) * (v.dim() - unit.zero.dim()))
        leak = torch.where(zero & ~torch.isnan(v), v.abs(), 0.0).amax()
        gates["zero"] = 0.0 if float(leak) == 0.0 else math.inf
        if gates["zero"]:
            message = message or f"{float(leak):.3g} where the mask implies exactly 0"
    by_row = None
    if unit.counted:
        gates["exact"] = float(e.abs().amax()) / (4 * UNIT_ROUNDOFF["fp32"] * max(1.0, float(o.abs().amax())))
        allowed = 4 * UNIT_ROUNDOFF["fp32"]
    elif unit.scalar:
        u_c = UNIT_ROUNDOFF[unit.compute]
        rms = float(spread.square().mean().sqrt())
        worst = WORST * float(spread.abs().amax())
        allowed = max(FIRST_ORDER * unit.first_order, SCALAR * rms, worst, u * float(o.abs()), u_c * unit.terms, eta)
        gates["scalar"] = float(e.abs()) / allowed
    else:
        allowed, by_row = _tensor_gates(gates, e, o, spread, u, eta, UNIT_ROUNDOFF[unit.compute], unit.entrywise)
    rtol = 6 * u
    safe = torch.where(skip, 0.0, v)
    return Judgement(
        gates=gates,
        message=message,
        overflows=overflows,
        undecided=int(skip.sum()),
        max_abs=float(e.abs().amax()),
        max_rel=_finite_ratio(float(e.abs().amax()), float(o.abs().amax())),
        dist=float(torch.dist(safe, o)),
        atol=allowed,
        rtol=rtol,
        allclose=bool(torch.allclose(safe, o, atol=allowed, rtol=rtol)) and bool(same.all()),
        slope=_slope(e, o) if e.dim() > 0 else None,
        worst=_worst(v, unit.exact.detach().cpu().double(), e, same, by_row if _tightest(gates) == "row" else None),
    )


def _tensor_gates(
    gates: dict[str, float],
    e: torch.Tensor,
    o: torch.Tensor,
    spread: torch.Tensor,
    u: float,
    eta: float,
    u_c: float,
    entrywise: bool,
) -> tuple[float, torch.Tensor | None]:
    """Add the norm, max, row and slope gates; returns what the max gate allows, and the row gate each entry."""
    count = spread.shape[0]
    flat = spread.reshape(count, -1)
    n = o.numel()
    norms = flat.norm(dim=1)
    unit_norm = max(_rms(norms), u * float(o.norm()), eta * n**0.5)
    gates["norm"] = float(e.norm()) / max(NORM * unit_norm, WORST * float(norms.amax()))
    tops = flat.abs().amax(1)
    allowed = max(MAX * max(_rms(tops), u * float(o.abs().amax()), eta), WORST * float(tops.amax()))
    gates["max"] = float(e.abs().amax()) / allowed
    by_row = None
    if o.dim() > 0:
        size = (lambda x: x.abs()) if entrywise else (lambda x: x.norm(dim=-1))
        width = 1 if entrywise else o.shape[-1]
        unit = torch.maximum(size(spread).square().mean(0).sqrt(), u * size(o)).clamp(min=eta * width**0.5)
        # a probability is the exponential of a rounded logit: where its row is uncertain by a large share, by a factor
        share = (unit / size(o).clamp(min=1e-300)).clamp(1e-9, 10.0)
        factor = (ROW * share.square().log1p().sqrt()).expm1() / share
        tail = (size(spread).amax(0) / unit).square()  # long only where the replicas show it: additive noise has none
        multiple = torch.minimum(factor, tail).clamp(min=ROW)
        allowed_row = torch.maximum(multiple * unit, WORST * size(spread).amax(0))
        gates["row"] = float((size(e) / allowed_row).amax())
        by_row = allowed_row if entrywise else allowed_row.unsqueeze(-1)
    top = float(o.abs().amax())
    if top > eta:  # below, the quantity is zero in its dtype and has no direction
        p, q = o / top, e / top
        energy = float(p.square().sum())
        s_r = (flat / top) @ p.reshape(-1) / energy
        floor = max(_rms(s_r), u / 3**0.5 * float(p.pow(4).sum().sqrt()) / energy, 2 * u_c)
        floor += eta / top * float(p.abs().sum()) / energy
        gates["slope"] = abs(float((q * p).sum()) / energy) / max(SLOPE * floor, WORST * float(s_r.abs().amax()))
    return allowed, by_row


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _finite_ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 else None


def _slope(e: torch.Tensor, o: torch.Tensor) -> float | None:
    top = float(o.abs().amax())
    if top == 0:
        return None
    p = o / top
    return float((e / top * p).sum() / p.square().sum())


def _worst(
    v: torch.Tensor, o: torch.Tensor, e: torch.Tensor, same: torch.Tensor, allowed: torch.Tensor | None
) -> tuple[tuple[tuple[int, ...], float, float, float], ...]:
    """Up to five entries (index, value, oracle, error): structural mismatches, then by error ÷ what its row is allowed.

    Without `allowed` (another gate than row is the tightest) simply by error.
    """
    order = torch.where(same, e.abs() if allowed is None else e.abs() / allowed, torch.inf).flatten()
    k = min(5, order.numel())
    found = []
    for flat in order.topk(k).indices.tolist():
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), v.shape)) if v.dim() else ()
        found.append((index, float(v[index]), float(o[index]), float(v[index] - o[index])))
    return tuple(found)
