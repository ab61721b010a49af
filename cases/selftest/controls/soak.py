"""False alarms: correct implementations on drawn cases, which must never be called wrong.

Oracle and replicas of a case are shared by the implementations, so that twenty thousand implementation-cases take minutes.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence

from cases.selftest.controls.correct import CONTROLS
from cases.selftest.oracles import oracle_of
from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.compare.one_case import skip_reason
from parity.implementations.implementation import Implementation
from parity.judging.assess import CaseOracle, confirmed, judge_all
from parity.protocol.call import execute
from parity.registry import loss_family
from parity.results.report import measured, wording

DTYPES = ("fp32", "fp16", "bf16")
Key = tuple[str, str, str]


@dataclasses.dataclass
class Soak:
    """What a soak found.

    Attributes:
        judged: implementation-cases judged, by (family, dtype).
        headrooms: by (family, gate, dtype), of the first judgement with its few replicas.
        first: implementation-cases whose first judgement disagreed.
        alarms: those that the confirmation upheld: (implementation, quantity, gate, headroom, case).
        silent: implementation-cases that did not run, by (implementation, verdict, message).
    """

    judged: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    headrooms: dict[Key, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    first: list[tuple[str, str, str, float, str]] = dataclasses.field(default_factory=list)
    alarms: list[tuple[str, str, str, float, str]] = dataclasses.field(default_factory=list)
    silent: collections.Counter[tuple[str, str, str]] = dataclasses.field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        """Implementation-cases judged."""
        return sum(self.judged.values())


def drawn(name: str, count: int, seed: int) -> Iterator[Case]:
    """`count` different cases of a family, drawn as profile pr draws them."""
    return draws(cases(loss_family(name), DTYPES, "pr"), f"soak/{seed}/{name}", count)


def soak(chosen_cases: Iterable[Case], device: str = "cpu") -> Soak:
    """Judge the controls of each family on cases."""
    out = Soak()
    for case in chosen_cases:
        oracle = oracle_of(case, device)
        for implementation in CONTROLS[case.family]:
            _add(out, oracle.offered(implementation), implementation)
    return out


def _add(out: Soak, oracle: CaseOracle, implementation: Implementation) -> None:
    """The first judgement, and the one that counts, or why there is none."""
    x, case = oracle.inputs, oracle.inputs.case
    if reason := skip_reason(oracle.family, implementation, case, x.settings, x.device.type):
        out.silent[implementation.id, "unsupported", reason] += 1
        return
    outcome = execute(implementation, x)
    if outcome.verdict != "ran":
        out.silent[implementation.id, outcome.verdict, outcome.message] += 1
        return
    first = judge_all(oracle, implementation, outcome, implementation.recipe_for(x))
    # what autocast changes no bit of is held to more, by `confirmed`
    right = all(j.agrees for j in first.values()) and x.autocast is None
    final = first if right else confirmed(oracle, implementation, outcome)
    out.judged[(case.family, case.dtype)] += 1
    for j in first.values():
        for gate, headroom in j.gates.items():
            out.headrooms[case.family, gate, case.dtype].append(math.inf if math.isnan(headroom) else headroom)
    text = json.dumps(case.to_json())
    for alarms, judged in ((out.first, first), (out.alarms, final)):
        alarms += [(implementation.id, q, j.gate, j.headroom, text) for q, j in judged.items() if not j.agrees]


HEADINGS = ("family", "gate", ">judged", ">≤ 0.5", *(f">worst, {dtype}" for dtype in DTYPES))


def rows(found: Soak) -> list[list[object]]:
    """What the page needs of a soak, in plain types: implementation-cases, first alarms, alarms; then headrooms."""
    counts = [found.total, len(found.first), len(found.alarms)]
    spreads = [
        [*key, len(values), sum(v <= 0.5 for v in values), max(values)]
        for key, values in sorted(found.headrooms.items())
        if key[1] != "structure"
    ]
    return [counts, *spreads]


def page(told: Iterable[Sequence[object]]) -> str:
    """How many were judged and called wrong; by gate the share of headrooms up to a half, and the worst of each dtype."""
    told = list(told)
    total, first, alarms = (sum(counts) for counts in zip(*(row for row in told if len(row) == 3), strict=True))
    gates: dict[tuple[str, str], dict[str, tuple[int, int, float]]] = {}
    for family, gate, dtype, *numbers in (row for row in told if len(row) > 3):
        gates.setdefault((family, gate), {})[dtype] = tuple(numbers)
    cells = (
        [*key, f"{count:,}", measured.share(half, count), *(wording.ratio(of[d][2]) if d in of else "" for d in DTYPES)]
        for key, of in gates.items()
        for count, half in [[sum(numbers[i] for numbers in of.values()) for i in (0, 1)]]
    )
    head = f"{total:,} implementation-cases, {first:,} quantities beyond a gate at first, {alarms:,} false alarms"
    return "\n".join([head, "", *measured.table(HEADINGS, cells)])
