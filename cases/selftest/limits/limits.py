"""Limits of detection: the smallest relative error that one case, or a run, catches.

A correct implementation is edited by a factor 1 + ε on its log-probs, its loss or its gradients, and judged as a run
judges. ε goes down a grid of quarter octaves; an error that is caught at ε is taken to be caught at every larger one.
"""

import collections
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from cases.bench.measure import short
from cases.selftest.controls.correct import PAIRED, control
from cases.selftest.controls.logprobs import HEADS
from cases.selftest.controls.policy import REORDERED, loss_of
from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import cases_drawn
from parity.implementations.implementation import Implementation
from parity.judging.assess import CaseOracle, judged
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.registry import loss_family
from parity.results.report import measured

OCTAVES, STEPS = 24, 4
GRID = tuple(2.0 ** (-k / STEPS) for k in range(OCTAVES * STEPS, -1, -1))
"""ε from 2⁻²⁴ to 1."""
NEVER, CERTAIN = math.inf, 0.99

DTYPES = ("fp32", "fp16", "bf16")
LOGITS = {"fp32 logits": "reordered", "16-bit logits": "plain"}
"""How the correct implementation keeps its logits: the name of the control; in float32 the two are one."""
ROAD = {"reordered": "ieee", "plain": "stored"}

Values = Mapping[str, torch.Tensor]
Edited = Callable[[float], Values]
Errors = Iterator[tuple[str, tuple[str, ...], Edited]]


@dataclasses.dataclass(frozen=True)
class DetectionLimit:
    """What became of one kind of error on one case.

    Attributes:
        target: "log-probs", "loss" or "gradients".
        limit: smallest ε of `GRID` that is caught; `NEVER` if an error of 1 is not.
    """

    family: str
    dtype: str
    logits: str
    target: str
    limit: float


def implementation(name: str, kind: str, error: float = 0.0) -> Implementation:
    """The control of a family on one kind of logits, without metrics; inside a loss its log-probs times 1 + `error`."""
    found = control(f"control.{name}.{ROAD[kind] if name == 'divergence' else kind}")
    found = dataclasses.replace(found, outputs=frozenset(), contexts=frozenset({"plain", "checkpoint"}))
    if not error:
        return found

    def wrong(x):
        logps, entropy = HEADS[kind].call(x)
        return logps * (1 + error), entropy

    return dataclasses.replace(found, call=loss_of(wrong, **(REORDERED if kind in PAIRED else {})))


def drawn(name: str, dtype: str, count: int, seed: int) -> Iterator[Case]:
    """Cases as profile pr draws them, of one dtype, outside autocast, which would make another of it."""
    found = (c for c in draws(cases(loss_family(name), (dtype,), "pr"), f"limits/{seed}/{name}/{dtype}", 2 * count))
    yield from itertools.islice((c for c in found if c.settings.get("context") in (None, "checkpoint")), count)


def measure(name: str, dtype: str, kind: str, oracle: CaseOracle) -> list[DetectionLimit]:
    """Every kind of error on one case; none where the correct implementation does not run or is called wrong itself."""
    honest = implementation(name, LOGITS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = oracle.offered(honest)
        outcome = execute(honest, oracle.inputs)
        if outcome.verdict != "ran":
            return []
        by_run = functools.partial(caught, oracle, honest)
        plain: Values = {n: v for n, v in outcome.quantities.items() if v is not None}
        out = []
        for target, names, edited in _errors(name, kind, oracle, plain):
            present = [n for n in names if n in plain and bool(oracle.exact[n].nan_to_num().any())]
            if not present or _same(plain, edited(1.0), present) or by_run(plain, present):
                continue
            limit = smallest(lambda error, edited=edited, names=present: by_run(edited(error), names))
            out.append(DetectionLimit(name, dtype, kind, target, limit))
    return out


def _errors(name: str, kind: str, oracle: CaseOracle, plain: Values) -> Errors:
    """(target, quantities that may show it, ε -> their values)."""
    gradients = tuple(n for n in plain if n.startswith("grad_"))
    narrow = all(plain[n].dtype == oracle.inputs.dtype for n in gradients)  # a float32 head's gradient would decide
    first = oracle.family.first
    yield "log-probs" if first == "logps" else first, (first,), lambda e: scaled(plain, (first,), e)
    if name == "policy":
        yield "log-probs", ("loss", *gradients), lambda e: again(oracle, implementation(name, LOGITS[kind], e))
    if gradients and narrow:
        yield "gradients", gradients, lambda e: scaled(plain, gradients, e)


def scaled(values: Values, names: tuple[str, ...], error: float) -> Values:
    """The named values times 1 + ε, rounded once to their dtype."""
    return dict(values) | {n: (values[n].double() * (1 + error)).to(values[n].dtype) for n in names}


def again(oracle: CaseOracle, edited: Implementation) -> Values:
    return {n: v for n, v in execute(edited, oracle.inputs).quantities.items() if v is not None}


def _same(a: Values, b: Values, names: list[str]) -> bool:
    """Whether an edit changes no bit: there is nothing to catch."""
    return all(n in b and torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in names)


def smallest(caught: Callable[[float], bool]) -> float:
    """The smallest ε of the grid that is caught, by bisection."""
    if not caught(GRID[-1]):
        return NEVER
    low, high = -1, len(GRID) - 1  # caught at high, not at low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if caught(GRID[middle]) else (middle, high)
    return GRID[high]


def caught(oracle: CaseOracle, honest: Implementation, values: Values, names: Sequence[str]) -> bool:
    """Whether a run calls one of the quantities wrong, more replicas included."""
    found = judged(oracle, honest, Outcome("ran", values), only=frozenset(names))
    return not all(name in values and found[name].agrees for name in names)


Key = tuple[str, str, str, str]


def groups(found: Iterable[DetectionLimit]) -> dict[Key, list[DetectionLimit]]:
    """By (family, error, dtype, kind of logits), in the order in which they were measured."""
    out: dict[Key, list[DetectionLimit]] = collections.defaultdict(list)
    for one in found:
        out[one.family, one.target, one.dtype, one.logits].append(one)
    return dict(sorted(out.items(), key=lambda item: (item[0][0], item[0][1])))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]


def cases_of_a_run(found: Sequence[DetectionLimit], drawn: int) -> int:
    """Cases of this family and dtype that show the error, in a run of profile pr."""
    return max(1, round(cases_drawn(found[0].family, "pr") / len(DTYPES) * len(found) / drawn))


def by_a_run(found: Sequence[DetectionLimit], drawn: int) -> float:
    """The ε that at least one case of a run catches with 99 % probability: (1 - F(ε))ⁿ ≤ 1 %."""
    return quantile([one.limit for one in found], 1 - (1 - CERTAIN) ** (1 / cases_of_a_run(found, drawn)))


HEADINGS = ("family", "error on", "dtype", "half of the cases catch", "a run of profile pr catches")


def page(rows: Iterable[Sequence[object]]) -> str:
    """The limits, a row for each group, from what the slow test says: the cases drawn, then a `DetectionLimit`."""
    drawn, found = 0, []
    for count, *fields in rows:
        drawn, found = int(count), [*found, DetectionLimit(*fields)]
    return "\n".join(measured.table(HEADINGS, (_cells(key, group, drawn) for key, group in groups(found).items())))


def _cells(key: Key, group: Sequence[DetectionLimit], drawn: int) -> list[str]:
    family, target, dtype, logits = key
    half = quantile([one.limit for one in group], 0.5)
    shown = ["beyond 1" if value == NEVER else short(value) for value in (half, by_a_run(group, drawn))]
    return [family, target, dtype if dtype == "fp32" else f"{dtype}, {logits}", *shown]
