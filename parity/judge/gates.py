"""The gates: an implementation's error, divided by the error that correct code makes on the same inputs.

Every gate is the ratio of an error to what is allowed, so that 1 is the limit and a smaller number the headroom used.
Comparisons are in positive form: a NaN fails. The judge knows no loss.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from parity.judge.recipe import HALF_SUBNORMAL, LARGEST, NAMES, NARROW, UNIT_ROUNDOFF

NORM, MAX, ROW, SLOPE, SCALAR, FIRST_ORDER = 3.0, 6.0, 6.0, 6.0, 6.0, 10.0
"""Multiples of the unit that each gate allows; docs/measured/false-alarms.md holds the measurements behind them."""
WORST = 2.0
"""Every gate but zero, and a count in float32, also allows this multiple of a replica's worst error: where one entry carries it,
3·rms is a 3σ test of one number; where rounding moves an exponent (a KL term at τ = 1e-3) or decides whether a tail
1 - Σp is clamped, rms says nothing of the tail. Twelve replicas cannot show one longer than √12·rms."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """What a quantity is measured with."""

    exact: torch.Tensor  # the oracle's value, float64
    replicas: torch.Tensor  # the replicas' values, (R, …) of the same trailing shape
    compute: str = "fp32"  # dtype name in which the recipe computes, for the common-mode term of the slope
    zero: torch.Tensor | None = None  # rows (leading dimensions) that the mask makes exactly zero, or None
    # whether every entry is a row of its own (log-probs, a bias gradient) instead of the last dimension
    entrywise: bool = False
    scalar: bool = False  # whether the quantity is a sum that the scalar gate judges
    counted: bool = False  # whether it is a count or fraction that must be exact
    first_order: float = 0.0  # √Σ(∂L/∂logp·rms e)², for a scalar
    terms: float = 0.0  # ‖terms‖₂·√n of what a scalar sums

    @functools.cached_property
    def errors(self) -> Errors:
        """The replicas' errors at every entry of the oracle's value."""
        o, stack = self.exact.detach().cpu().double(), self.replicas.detach().cpu().double()
        if stack.shape[1:] != o.shape:
            raise ValueError(f"replicas {tuple(stack.shape)} do not stack the oracle's {tuple(o.shape)}")
        return Errors(o, stack - o, self.entrywise)

    @functools.cached_property
    def reach(self) -> float:
        """The largest size of the oracle or a replica; NaN or infinite where one is."""
        o, stack = self.exact, self.replicas
        return float(torch.maximum(o.detach().abs().amax(), stack.detach().abs().amax())) if o.numel() else 0.0


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors `each` of R replicas, (R, …), around the oracle's value `o`; what the gates need of them is computed once."""

    o: torch.Tensor
    each: torch.Tensor
    entrywise: bool = False

    def at(self, skip: torch.Tensor) -> Errors:
        """The same without the entries of `skip`."""
        return Errors(torch.where(skip, 0.0, self.o), torch.where(skip, 0.0, self.each), self.entrywise)

    @property
    def _flat(self) -> torch.Tensor:
        return self.each.reshape(self.each.shape[0], -1)

    @functools.cached_property
    def norm(self) -> float:
        """‖o‖₂."""
        return float(self.o.norm())

    @functools.cached_property
    def top(self) -> float:
        """|o|∞."""
        return float(self.o.abs().amax())

    @functools.cached_property
    def norms(self) -> tuple[float, float]:
        """Root mean square and maximum of ‖e_r‖₂."""
        return _rms_max(self._flat.norm(dim=1))

    @functools.cached_property
    def tops(self) -> tuple[float, float]:
        """Root mean square and maximum of |e_r|∞."""
        return _rms_max(self._flat.abs().amax(1))

    @functools.cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Root mean square and maximum of the size of e_r in each row."""
        sizes = self.size(self.each)
        return sizes.square().mean(0).sqrt(), sizes.amax(0)

    def size(self, x: torch.Tensor) -> torch.Tensor:
        """Of each row: an entry's absolute value, or the norm of the last dimension."""
        return x.abs() if self.entrywise else x.norm(dim=-1)

    def multiplied(self, floor: torch.Tensor) -> torch.Tensor:
        """exp(mean + 6·std) of log size of e_r in each row, sizes below `floor` taken for it."""
        logs = torch.maximum(self.size(self.each), floor).log()
        return (logs.mean(0) + ROW * logs.std(0, correction=0)).clamp(max=700.0).exp()

    @functools.cached_property
    def direction(self) -> tuple[torch.Tensor, float, float]:
        """p = o/|o|∞, ‖p‖² and √Σp⁴."""
        p = self.o / self.top
        return p, float(p.square().sum()), float(p.pow(4).sum().sqrt())

    def slope(self, e: torch.Tensor) -> float:
        """Σe·o/‖o‖²."""
        p, energy, _ = self.direction
        return float((e / self.top * p).sum()) / energy

    @functools.cached_property
    def slopes(self) -> tuple[float, float, float]:
        """Of Σe_r·o/‖o‖²: the size of its mean, its standard deviation, and the maximum of its size."""
        p, energy, _ = self.direction
        s = (self._flat / self.top) @ p.reshape(-1) / energy
        return float(s.mean().abs()), float(s.std(correction=0)), float(s.abs().amax())

    def stored_slope(self, dtype: torch.dtype) -> float:
        """Maximum of |Σ(stored(o + e_r) - o)·o|/‖o‖², with the replicas' values stored in `dtype`: equal ones round alike."""
        p, energy, _ = self.direction
        stored = (self.o + self.each).to(dtype).double() - self.o
        return float(((stored / self.top).flatten(1) @ p.reshape(-1)).abs().amax()) / energy


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on one quantity: headroom of every gate, the tightest first in `gate`.

    `overflows`: nothing but infinities breaks its structure, beside entries where replicas overflow. `rounded`: what it
    counts is decided by values rounded in 16 bits.
    """

    gates: dict[str, float]
    message: str = ""
    undecided: int = 0
    overflows: bool = False
    rounded: bool = False
    max_abs: float | None = None
    dist: float | None = None
    atol: float | None = None
    rtol: float | None = None
    allclose: bool | None = None
    slope: float | None = None
    worst: tuple[Any, ...] = ()

    @property
    def gate(self) -> str:
        return _tightest(self.gates)

    @property
    def headroom(self) -> float:
        """Error ÷ allowed at the tightest gate; infinite for a structural failure."""
        value = self.gates[self.gate]
        return math.inf if math.isnan(value) else value

    @property
    def place(self) -> tuple[int, ...]:
        """The index of the worst entry; () where it agrees, or is a single number."""
        return tuple(self.worst[0][0]) if self.worst else ()

    @property
    def open(self) -> bool:
        """Whether more replicas could change it: its tightest gate is neither infinite nor a count that float32 decides."""
        return (self.gate != "exact" or self.rounded) and math.isfinite(self.headroom)

    @property
    def agrees(self) -> bool:
        """Whether every gate holds."""
        return self.headroom <= 1.0


def _tightest(gates: dict[str, float]) -> str:
    return max(gates, key=lambda g: math.inf if math.isnan(gates[g]) else gates[g])


def failed(message: str) -> Judgement:
    """A quantity that is not there, or not of the right shape or kind."""
    return Judgement({"structure": math.inf}, message)


def judge(value: torch.Tensor | None, unit: Unit, dtype: torch.dtype) -> Judgement:
    """Hold a value against the oracle; `dtype` is the one the quantity should have.

    Gates (o the oracle, e = value - o, e_r the replicas' errors, u the unit roundoff of `dtype`, η half its subnormal
    spacing): structure; zero; norm ‖e‖ ≤ 3·max(rms‖e_r‖, u‖o‖, η√n); max |e|∞ ≤ 6·max(rms|e_r|∞, u|o|∞, η); row, the
    same per last dimension (6 becomes (exp(6·√log(1+s²)) - 1)/s, at most (max|e_r|/unit)², where the unit is a large
    share s of the row; where a replica is off by more than 6·rms, also exp(mean + 6·std of log‖e_r‖)); slope
    |Σe·o|/‖o‖² ≤ 6·max(std s_r, u/√3·√Σo⁴/‖o‖², 2u_c) + 2·|mean s_r|; for a scalar
    |e| ≤ max(10·first order, 6·rms e_r, u|o|, u_c·terms); for a count |e| ≤ 4·2⁻²⁴·max(|o|, 1). All but structure, zero
    and a count in float32 also allow `WORST` times the worst replica (row: of that row; slope: also as stored in 16 bits).
    """
    if value is None:
        return failed("missing")
    if tuple(value.shape) != tuple(unit.exact.shape):
        return failed(f"shape {tuple(value.shape)}, expected {tuple(unit.exact.shape)}")
    if not value.is_floating_point():
        return failed(f"dtype {NAMES.get(value.dtype, value.dtype)}, expected a floating-point one")
    if not unit.scalar and value.dtype != dtype:
        return failed(f"dtype {NAMES.get(value.dtype, value.dtype)}, expected {NAMES[dtype]}")
    # a scalar may come in any dtype, and is held to the finer of that and the one asked for
    name = NAMES[min((value.dtype, dtype), key=lambda d: UNIT_ROUNDOFF[NAMES[d]]) if unit.scalar else value.dtype]
    u, eta, largest = UNIT_ROUNDOFF[name], HALF_SUBNORMAL[name], LARGEST[name]
    errors, v = unit.errors, value.detach().cpu().double()
    o = errors.o
    if o.numel() == 0:
        return Judgement({"structure": 0.0})
    gates = {"structure": 0.0}
    message, overflows, same, skip, leaks = "", False, None, None, None
    finite = torch.isfinite(v)
    if not (unit.reach <= largest / 2 and bool(finite.all())):  # a NaN is no small number
        spread = errors.each
        # by definition, none overflowed
        infinite = torch.isinf(o) & (unit.replicas.detach().cpu().double() == o).all(0)
        skip = ~torch.isfinite(spread).all(0) | (o.abs() > largest / 2) | ((spread + o).abs() > largest).any(0)
        skip = skip & ~infinite
        same = (finite == torch.isfinite(o)) & (torch.isnan(v) == torch.isnan(o))
        same = torch.where(infinite, v == o, same | skip)
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
        errors = errors.at(skip)
    e = v - o if skip is None else torch.where(skip, 0.0, v - o)
    safe = v if skip is None else torch.where(skip, 0.0, v)
    if unit.zero is not None:
        zero = unit.zero.reshape(unit.zero.shape + (1,) * (v.dim() - unit.zero.dim()))
        leaks = torch.where(zero & ~torch.isnan(v), v.abs(), 0.0)
        leak = float(leaks.amax())
        gates["zero"] = 0.0 if leak == 0.0 else math.inf
        if gates["zero"]:
            message = message or f"{leak:.3g} where the mask implies exactly 0"
    by_row = None
    top = float(e.abs().amax())
    if unit.counted:
        allowed = 4 * UNIT_ROUNDOFF["fp32"] * max(1.0, errors.top)
        if UNIT_ROUNDOFF[unit.compute] > NARROW:  # a log-prob in 16 bits may be on the other side of a clip
            allowed = max(allowed, WORST * errors.tops[1])
        gates["exact"] = top / allowed
    elif unit.scalar:
        u_c = UNIT_ROUNDOFF[unit.compute]
        rms, worst = errors.tops
        allowed = max(
            FIRST_ORDER * unit.first_order, SCALAR * rms, WORST * worst, u * errors.top, u_c * unit.terms, eta
        )
        gates["scalar"] = top / allowed
    else:
        allowed, by_row = _tensor_gates(gates, e, errors, value.dtype, UNIT_ROUNDOFF[unit.compute])
    rtol = 6 * u
    agrees = all(g <= 1.0 for g in gates.values())
    coarse = unit.scalar and UNIT_ROUNDOFF[NAMES[value.dtype]] > UNIT_ROUNDOFF[name] and not agrees
    entries: tuple[Any, ...] = ()
    if not agrees:
        by = {"row": lambda: e.abs() / by_row, "zero": lambda: leaks}.get(_tightest(gates), e.abs)
        entries = _worst(v, o, e, same, by())
    return Judgement(
        gates=gates,
        message=message or (f"came in {NAMES[value.dtype]}, expected {name}" if coarse else ""),
        overflows=overflows,
        rounded=UNIT_ROUNDOFF[unit.compute] > NARROW,
        undecided=0 if skip is None else int(skip.sum()),
        max_abs=top,
        dist=float(torch.dist(safe, errors.o)),
        atol=allowed,
        rtol=rtol,
        allclose=bool(torch.allclose(safe, errors.o, atol=allowed, rtol=rtol)) and (same is None or bool(same.all())),
        slope=errors.slope(e) if e.dim() > 0 and errors.top > 0 else None,
        worst=entries,
    )


def _tensor_gates(
    gates: dict[str, float], e: torch.Tensor, errors: Errors, dtype: torch.dtype, u_c: float
) -> tuple[float, torch.Tensor | None]:
    """Add the norm, max, row and slope gates; returns what the max gate allows, and the row gate each entry."""
    o, name = errors.o, NAMES[dtype]
    u, eta = UNIT_ROUNDOFF[name], HALF_SUBNORMAL[name]
    rms, worst = errors.norms
    gates["norm"] = float(e.norm()) / max(NORM * max(rms, u * errors.norm, eta * o.numel() ** 0.5), WORST * worst)
    rms, worst = errors.tops
    allowed = max(MAX * max(rms, u * errors.top, eta), WORST * worst)
    gates["max"] = float(e.abs().amax()) / allowed
    by_row = None
    if o.dim() > 0:
        row_rms, row_worst = errors.rows
        width, size = 1 if errors.entrywise else o.shape[-1], errors.size(o)
        unit = torch.maximum(row_rms, u * size).clamp(min=eta * width**0.5)
        # a probability is the exponential of a rounded logit: where its row is uncertain by a large share, by a factor
        share = (unit / size.clamp(min=1e-300)).clamp(1e-9, 10.0)
        factor = (ROW * share.square().log1p().sqrt()).expm1() / share
        tail = (row_worst / unit).square()  # long only where the replicas show it: additive noise has none
        multiple = torch.minimum(factor, tail).clamp(min=ROW)
        allowed_row = torch.maximum(multiple * unit, WORST * row_worst)
        tailed = row_worst > ROW * row_rms  # no additive error is that far off: these are factors, whose logarithms add
        if bool(tailed.any()):
            floor = (u * size).clamp(min=eta * width**0.5)
            allowed_row = torch.where(tailed, torch.maximum(allowed_row, errors.multiplied(floor)), allowed_row)
        gates["row"] = float((errors.size(e) / allowed_row).amax())
        by_row = allowed_row if errors.entrywise else allowed_row.unsqueeze(-1)
    if errors.top > eta:  # below, the quantity is zero in its dtype and has no direction
        p, energy, fourth = errors.direction
        mean, spread, worst = errors.slopes
        floor = max(spread, u / 3**0.5 * fourth / energy, 2 * u_c)
        floor += eta / errors.top * float(p.abs().sum()) / energy
        # what rounding takes from all entries alike (sums in 16 bits) is no spread: twice of it, not six times
        limit = max(SLOPE * floor + WORST * mean, WORST * worst)
        slope = abs(errors.slope(e))
        if slope > limit and u > NARROW:
            limit = max(limit, WORST * errors.stored_slope(dtype))
        gates["slope"] = slope / limit
    return allowed, by_row


def _rms_max(x: torch.Tensor) -> tuple[float, float]:
    return float(x.square().mean().sqrt()), float(x.amax())


def _worst(
    v: torch.Tensor, o: torch.Tensor, e: torch.Tensor, same: torch.Tensor | None, size: torch.Tensor
) -> tuple[tuple[tuple[int, ...], float, float, float], ...]:
    """Up to five entries (index, value, oracle, error): structural mismatches, then by `size`."""
    order = (size if same is None else torch.where(same, size, torch.inf)).flatten()
    first = order.topk(min(5, order.numel())).indices
    places = torch.stack(torch.unravel_index(first, v.shape), -1).tolist() if v.dim() else [()]
    values = torch.stack([x.flatten()[first] for x in (v, o, v - o)], -1).tolist()
    return tuple((tuple(place), *found) for place, found in zip(places, values, strict=True))


CLEAR = 100.0
"""Error ÷ allowed from which on a failure is as clear as a larger one."""


def as_clear(simpler: float, whole: float) -> bool:
    """Whether a failure of a simpler case, in error ÷ allowed, may stand for that of the whole: of the same kind, finite or not,
    and not a mild one in its place, which something else may cause."""
    if math.isinf(whole) or math.isinf(simpler):
        return simpler == whole
    return simpler >= min(whole / 10, CLEAR)


def stands_for(simpler: Mapping[str, float], whole: Mapping[str, float]) -> bool:
    """Whether a simpler case fails `as_clear` in all that the whole does; what fails -> error ÷ allowed."""
    return all(name in simpler and as_clear(simpler[name], size) for name, size in whole.items())
