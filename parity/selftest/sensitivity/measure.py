"""The smallest relative error that is caught, case by case: by the gates, and by fixed tolerances.

A correct implementation is edited by a factor 1 + ε on its log-probs, its loss or its gradients, and judged as a run
judges. ε goes down a grid of quarter octaves; an error that is caught at ε is taken to be caught at every larger one.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.compare.pooled_slope import allowed_slope
from parity.implementations.implementation import Implementation, Outputs
from parity.judge.escalation import REPLICAS, if_near, ladder, settle
from parity.judge.gates import Judgement, judge
from parity.judging.assess import CaseOracle, expected, largest
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.registry import loss_family
from parity.selftest.controls import controls_of
from parity.selftest.controls.divergence import ROADS
from parity.selftest.controls.logprobs import HEADS
from parity.selftest.controls.policy import loss_of

OCTAVES, STEPS = 24, 4
GRID = tuple(2.0 ** (-k / STEPS) for k in range(OCTAVES * STEPS, -1, -1))
"""ε from 2⁻²⁴ to 1."""
NEVER = math.inf

DTYPES = ("fp32", "fp16", "bf16")
LOGITS = {"fp32 logits": "reordered", "16-bit logits": "plain"}
"""How the correct implementation keeps its logits: its name under `HEADS`; in float32 the two are one."""
ROAD = {"reordered": "ieee", "plain": "stored"}

GATES, DEFAULTS, LOOSE, ABSOLUTE = "gates", "torch.testing defaults", "atol 0.1, rtol 0.5", "atol 1e-2"
JUDGES = (GATES, DEFAULTS, LOOSE, ABSOLUTE)
TESTING = {torch.float32: (1.3e-6, 1e-5), torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}
"""rtol and atol of torch.testing.assert_close, by dtype."""

Values = Mapping[str, torch.Tensor]
Edited = Callable[[float], Values]
Errors = Iterator[tuple[str, tuple[str, ...], Edited]]


@dataclasses.dataclass(frozen=True)
class DetectionLimit:
    """What became of one kind of error on one case.

    Attributes:
        target: "log-probs", "loss" or "gradients".
        limits: judge -> smallest ε of `GRID` that it catches; `NEVER` if it does not catch 1; 0 if it faults the
            correct values themselves.
        slopes: gradient or log-probs -> slope of the correct values and what their gate allows, which a run pools.
    """

    family: str
    dtype: str
    logits: str
    target: str
    case: str
    limits: Mapping[str, float]
    slopes: Mapping[str, tuple[float, float]]


def implementation(name: str, kind: str, error: float = 0.0) -> Implementation:
    """The correct implementation of a family on one kind of logits, its log-probs times 1 + `error` inside a loss.

    Of a family of a user's own its first control, whatever the kind.
    """
    return MAKERS[name](kind, error) if name in MAKERS else controls_of(name)[0]


def _divergence(kind: str, error: float) -> Implementation:
    road = ROADS[ROAD[kind]]
    return Implementation(f"honest.divergence.{kind}", "divergence", "candidate", road, recipe=road.recipe)


def _logprobs(kind: str, error: float) -> Implementation:
    head = HEADS[kind]
    contexts = frozenset({"plain", "checkpoint"})

    def call(x: Any) -> Outputs:
        return {"logps": head.call(x)[0]}

    return Implementation(
        f"honest.logprobs.{kind}", "logprobs", "candidate", call, recipe=head.recipe, contexts=contexts
    )


def _policy(kind: str, error: float) -> Implementation:
    head = HEADS[kind]

    def logps(x: Any) -> Any:
        value, entropy = head.call(x)
        return (value * (1 + error) if error else value), entropy

    def recipe(x: Any) -> Any:
        return dataclasses.replace(head.recipe(x), output="fp32")

    contexts = frozenset({"plain", "checkpoint"})
    return Implementation(
        f"honest.policy.{kind}", "policy", "candidate", loss_of(logps), recipe=recipe, contexts=contexts
    )


MAKERS: dict[str, Callable[[str, float], Implementation]] = {
    "logprobs": _logprobs,
    "policy": _policy,
    "divergence": _divergence,
}
INNER = frozenset({"policy"})
"""Families of `MAKERS` that are measured with wrong log-probs inside a loss, too."""
LABELS = {"logps": "log-probs"}
"""How the tables call an output."""


def label_of(name: str) -> str:
    """How the tables call what a family returns first."""
    first = loss_family(name).outputs[0]
    return LABELS.get(first, first)


def drawn(name: str, dtype: str, count: int, seed: int) -> Iterator[Case]:
    """Cases as profile pr draws them, of one dtype, outside autocast, which would make another of it."""
    found = (c for c in draws(cases(loss_family(name), (dtype,), "pr"), f"limits/{seed}/{name}/{dtype}", 2 * count))
    for _, case in zip(
        range(count), (c for c in found if c.settings.get("context") in (None, "checkpoint")), strict=False
    ):
        yield case


def measure(name: str, dtype: str, kind: str, oracle: CaseOracle) -> list[DetectionLimit]:
    """Every kind of error on one case; none where the correct implementation does not run or is called wrong itself."""
    honest = implementation(name, LOGITS[kind])
    case = oracle.inputs.case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = oracle.offered(honest)
        outcome = execute(honest, oracle.inputs)
        if outcome.verdict != "ran":
            return []
        jury = Jury(oracle, honest)
        plain: Values = {n: v for n, v in outcome.quantities.items() if v is not None}
        out = []
        for target, names, edited in _errors(name, kind, oracle, plain):
            present = [n for n in names if n in plain and _size(oracle.exact[n]) > 0.0]
            if not present or _same(plain, edited(1.0), present) or jury.caught(plain, present):
                continue
            limits = {label: _smallest(jury.by(label, edited, present)) for label in JUDGES}
            slopes = dict(_slopes(jury, plain, present))
            out.append(DetectionLimit(name, dtype, kind, target, case.id, limits, slopes))
    return out


def _slopes(jury: Jury, plain: Values, present: list[str]) -> Iterator[tuple[str, tuple[float, float]]]:
    for n in present:
        j = jury.first(plain, n)
        if j.slope is not None and math.isfinite(j.slope) and "slope" in j.gates:
            yield n, (j.slope, allowed_slope(j.slope, j.gates["slope"]))


def _errors(name: str, kind: str, oracle: CaseOracle, plain: Values) -> Errors:
    """(target, quantities that may show it, ε -> their values)."""
    gradients = tuple(n for n in plain if n.startswith("grad_"))
    narrow = all(plain[n].dtype == oracle.inputs.dtype for n in gradients)  # a float32 head's gradient would decide
    first = oracle.family.outputs[0]
    yield label_of(name), (first,), lambda e: _scaled(plain, (first,), e)
    if name in INNER:
        yield "log-probs", ("loss", *gradients), lambda e: _again(oracle, implementation(name, LOGITS[kind], e))
    if gradients and narrow:
        yield "gradients", gradients, lambda e: _scaled(plain, gradients, e)


def _scaled(values: Values, names: tuple[str, ...], error: float) -> Values:
    """The named values times 1 + ε, rounded once to their dtype."""
    return dict(values) | {n: (values[n].double() * (1 + error)).to(values[n].dtype) for n in names}


def _again(oracle: CaseOracle, edited: Implementation) -> Values:
    outcome: Outcome = execute(edited, oracle.inputs)
    return {n: v for n, v in outcome.quantities.items() if v is not None}


def _same(a: Values, b: Values, names: list[str]) -> bool:
    """Whether an edit changes no bit: there is nothing to catch."""
    return all(n in b and torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in names)


def _size(x: torch.Tensor) -> float:
    return float(x.nan_to_num().abs().max()) if x.numel() else 0.0


def _smallest(caught: Callable[[float], bool]) -> float:
    """The smallest ε of the grid that is caught, by bisection; 0 where nothing needs to be wrong."""
    if caught(0.0):
        return 0.0
    if not caught(GRID[-1]):
        return NEVER
    low, high = -1, len(GRID) - 1  # caught at high, not at low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if caught(GRID[middle]) else (middle, high)
    return GRID[high]


@dataclasses.dataclass
class Jury:
    """The judges of one case."""

    oracle: CaseOracle
    honest: Implementation

    def __post_init__(self) -> None:
        inputs = self.oracle.inputs
        self.recipe = self.honest.recipe_for(inputs)
        self.dtypes = expected(self.oracle, self.honest, self.recipe)
        self.counts, self.near = ladder(largest(self.oracle)), if_near(largest(self.oracle))
        self._units: dict[tuple[str, int], Any] = {}

    def first(self, values: Values, name: str, count: int = REPLICAS) -> Judgement:
        """One quantity by the gates, with `count` replicas."""
        if (name, count) not in self._units:
            self._units[name, count] = self.oracle.oracle.unit(name, self.recipe, count)
        return judge(values[name], self._units[name, count], self.dtypes[name] or values[name].dtype)

    def by(self, label: str, edited: Edited, names: list[str]) -> Callable[[float], bool]:
        """ε -> whether the judge of that name catches it."""
        if label == GATES:
            return lambda error: self.caught(edited(error), names)
        return lambda error: self.outside(edited(error), names, label)

    def caught(self, values: Values, names: list[str]) -> bool:
        """Whether a run calls one of the quantities wrong, more replicas included."""
        return any(self._upheld(values, n) for n in names)

    def _upheld(self, values: Values, name: str) -> bool:
        if name not in values:
            return True
        return not settle(lambda count: {name: self.first(values, name, count)}, self.counts, near=self.near)[
            name
        ].agrees

    def outside(self, values: Values, names: list[str], label: str) -> bool:
        """Whether a fixed tolerance calls one of the quantities wrong, beside the exact value rounded to its dtype."""
        return any(not _close(values[n].cpu(), self.oracle.exact[n], label) for n in names)


def _close(value: torch.Tensor, exact: torch.Tensor, label: str) -> bool:
    rtol, atol = {DEFAULTS: TESTING[value.dtype], LOOSE: (0.5, 0.1), ABSOLUTE: (0.0, 1e-2)}[label]
    return torch.allclose(value.double(), exact.to(value.dtype).double(), rtol=rtol, atol=atol)
