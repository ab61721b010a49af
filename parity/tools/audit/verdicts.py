"""Is a setting honoured by an implementation, or ignored, wrong, refused, crashed, absent, or not run?"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from parity.case.case import Case
from parity.case.probe import Probe
from parity.compare.one_case import skip_reason
from parity.implementations.implementation import Implementation
from parity.judge.escalation import CERTAIN, settle
from parity.judge.gates import Judgement
from parity.judging.assess import CaseOracle, expected, judge_all
from parity.judging.oracle import Quantities
from parity.protocol.exceptions import Outcome
from parity.results.row import Row
from parity.tools.audit import source_lines
from parity.tools.audit.call import entry_points, run
from parity.tools.audit.pairs import Pair, Pairs

ANSWERS = ("honoured", "ignored", "wrong", "refused", "crashed", "absent", "not run")
"""Moves alike; does not move; moves otherwise; a clear error; an unclear one; no such parameter; nothing to judge."""
FINDINGS = frozenset({"ignored", "wrong", "crashed"})
JUDGED = FINDINGS | {"honoured", "refused"}

DTYPES = ("fp32", "fp16", "bf16")
INTERPRETER = "Triton's interpreter"
CONFOUNDED = "disagrees without the setting too (parity run judges that)"
PATIENCE = 4
"""Pairs on which an implementation may be wrong without the setting until the next one is no longer tried."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of one implementation to one probe.

    Attributes:
        answer: one of `ANSWERS`, over all pairs tried.
        reason: message of the refusal, or why there is nothing to judge.
        case: the pair's case that shows it best; None where there is none.
        gates: failing quantity -> its gate.
        metrics: metrics that disagree although loss and gradients agree.
        loss, gradient: value and norm over the definition's; None where that is 0 or not finite.
        moved_loss, moved_gradient: the same of the definition, with the setting over without it.
        silent: nothing was said that is not said without the setting; None unless the answer is a finding.
        also_without: the implementation disagrees without the setting too.
        place: where it reads the setting, or raised; `reads` is whether it does read it.
        parameter: a parameter of that name which the adapter does not use, where it says absent.
        known: ledger entries, when they cover every failing quantity.
    """

    family: str
    implementation: str
    role: str
    probe: Probe
    answer: str
    reason: str = ""
    case: Case | None = None
    gates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    loss: float | None = None
    gradient: float | None = None
    moved_loss: float | None = None
    moved_gradient: float | None = None
    silent: bool | None = None
    also_without: bool = False
    place: str = ""
    reads: bool = False
    parameter: str | None = None
    known: tuple[str, ...] = ()

    @property
    def new(self) -> bool:
        """Whether it is a finding that the ledger does not have, or an adapter that denies a parameter."""
        return (self.answer in FINDINGS and not self.known) or self.parameter is not None


Ledger = Callable[[Row, Case], str | None]


def answer(implementation: Implementation, pairs: Pairs, count: int, known: Ledger) -> Answer:
    """The answer of an implementation on `count` pairs of the first base and dtype on which it runs at all.

    Pairs that disagree about the answer make it "wrong", unless one side is an error.
    """
    blank = Answer(pairs.name, implementation.id, implementation.role, pairs.probe, "not run")
    reasons: list[str] = []
    confounded = 0
    for base in range(len(pairs.probe.bases)):
        for dtype in DTYPES:
            found: list[Answer] = []
            for pair in pairs.moving(base, dtype):
                one = _one(implementation, pair, blank, known)
                if one is None:
                    continue
                if one.reason == CONFOUNDED:
                    confounded += 1
                    if confounded == PATIENCE:
                        break
                    continue
                if one.answer == "not run":
                    reasons.append(one.reason)
                    break
                found.append(one)
                if len(found) == count:
                    break
            if found:
                return _merged(found)
            if confounded:
                return dataclasses.replace(blank, reason=CONFOUNDED)
    return dataclasses.replace(blank, reason=reasons[0] if reasons else "no case on which the definition moves")


SEVERITY = ("not run", "absent", "honoured", "ignored", "wrong", "refused", "crashed")


def _merged(found: Sequence[Answer]) -> Answer:
    """The pair that is furthest off, under the answer of all: an error on one is the answer, else they must be alike."""
    kinds = {a.answer for a in found}
    worst = max(found, key=lambda a: (SEVERITY.index(a.answer), _far(a.loss) + _far(a.gradient)))
    if len(kinds) > 1 and worst.answer in ("ignored", "wrong"):
        return dataclasses.replace(worst, answer="wrong")
    return worst


def _far(ratio: float | None) -> float:
    return 0.0 if ratio is None else abs(math.log(max(abs(ratio), 1e-30)))


def _one(implementation: Implementation, pair: Pair, blank: Answer, known: Ledger) -> Answer | None:
    """The answer on one pair; None where the gates of its recipe could not tell the two sides apart."""
    case, probe = pair.case, pair.moved.inputs
    reason = skip_reason(pair.moved.family, implementation, case, probe.settings, pair.moved.inputs.device.type)
    if reason:
        return dataclasses.replace(blank, reason=reason)
    asked = [n for n in probe.cotangents if n in pair.moved.family.optional and n not in implementation.outputs]
    still, said_still, _ = run(implementation, pair.still.offered(implementation).inputs)
    if still.verdict == "unsupported":
        return dataclasses.replace(blank, reason=still.message)
    out = dataclasses.replace(
        blank,
        case=case,
        moved_loss=_ratio(pair.moved.exact, pair.still.exact, "loss"),
        moved_gradient=_gradient_ratio(pair.moved.exact, pair.still.exact),
    )
    if asked:
        return _absent(implementation, out, f"has no {' and no '.join(asked)}")
    moved, said, raised = run(implementation, pair.moved.inputs)
    if moved.verdict == "unsupported" and moved.message.startswith(INTERPRETER):
        return dataclasses.replace(blank, reason=moved.message)
    if moved.verdict == "unsupported":
        return _absent(implementation, out, moved.message)
    where = source_lines.reads(entry_points(implementation), out.probe.spellings)
    out = dataclasses.replace(out, place=raised or str(where), reads=where.read)
    if moved.verdict == "refused":
        return dataclasses.replace(out, answer="refused", reason=moved.message)
    if moved.verdict != "ran":
        row = _row(out, None, "", moved.verdict, pair)
        return dataclasses.replace(
            out, answer="crashed", reason=moved.message, silent=False, known=_known([row], known, case)
        )
    return _judged(implementation, pair, out, moved, still, bool(said - said_still), known)


def _absent(implementation: Implementation, out: Answer, reason: str) -> Answer:
    """No such parameter: that is what the adapter says, and the installed signature is asked whether it is so."""
    scalar = not isinstance(out.probe.value, str) or out.probe.setting == "importance_sampling_level"
    names = out.probe.spellings if scalar and "no " in reason and "parameter" in reason else ()
    there = source_lines.parameter(entry_points(implementation), names)
    where = source_lines.reads(entry_points(implementation), out.probe.spellings)
    return dataclasses.replace(out, answer="absent", reason=reason, parameter=there, place=str(where), reads=where.read)


def _judged(
    implementation: Implementation, pair: Pair, out: Answer, moved: Outcome, still: Outcome, said: bool, known: Ledger
) -> Answer | None:
    quantities = _differentiable(pair.moved, implementation)
    judged = _judge(pair.moved, implementation, moved)
    failing = {n: j.gate for n, j in judged.items() if n in quantities and not j.agrees}
    out = dataclasses.replace(
        out,
        loss=_ratio(moved.quantities, pair.moved.exact, "loss"),
        gradient=_gradient_ratio(moved.quantities, pair.moved.exact),
    )
    if not failing:
        if not out.probe.stays and not _visible(pair, implementation, quantities):
            return None
        metrics = tuple(n for n, j in judged.items() if n not in quantities and not j.agrees)
        return dataclasses.replace(
            out, answer="honoured", metrics=metrics, place=out.place.removeprefix(source_lines.NOT_READ)
        )
    alike = still.verdict == "ran" and _same(moved, still, quantities)
    unmoved = _judge(pair.still, implementation, moved)
    ignored = not out.probe.stays and (alike or all(n in unmoved and unmoved[n].agrees for n in quantities))
    before = _judge(pair.still, implementation, still) if still.verdict == "ran" else {}
    also = any(not before[n].agrees for n in quantities if n in before)
    if also and not ignored:  # what the setting does cannot be told from what was wrong before
        return dataclasses.replace(out, answer="not run", reason=CONFOUNDED)
    rows = [_row(out, n, gate, "disagree", pair) for n, gate in failing.items()]
    return dataclasses.replace(
        out,
        answer="ignored" if ignored else "wrong",
        gates=failing,
        silent=not said,
        also_without=also,
        known=_known(rows, known, pair.case),
    )


def _differentiable(oracle: CaseOracle, implementation: Implementation) -> list[str]:
    """What the audit is about: outputs with an upstream gradient, and gradients; no metrics."""
    wanted = expected(oracle, implementation, implementation.recipe_for(oracle.inputs))
    return [n for n in wanted if n in oracle.inputs.cotangents or n.startswith("grad_")]


def _judge(oracle: CaseOracle, implementation: Implementation, outcome: Outcome) -> dict[str, Judgement]:
    """Judged with the replicas of a run, and with more of them where it is close."""
    recipe = implementation.recipe_for(oracle.inputs)
    return dict(settle(lambda count: judge_all(oracle, implementation, outcome, recipe, count), certain=CERTAIN))


def _visible(pair: Pair, implementation: Implementation, quantities: Iterable[str]) -> bool:
    """Whether the definition without the setting would be called wrong, in this recipe."""
    dtypes = expected(pair.moved, implementation, implementation.recipe_for(pair.moved.inputs))
    without = {n: v.to(dtypes.get(n) or torch.float32) for n, v in pair.still.exact.items() if n in dtypes}
    judged = _judge(pair.moved, implementation, Outcome("ran", without))
    return any(not judged[n].agrees for n in quantities)


def _same(a: Outcome, b: Outcome, quantities: Iterable[str]) -> bool:
    for name in quantities:
        x, y = a.quantities.get(name), b.quantities.get(name)
        if x is None or y is None:
            if x is not y:
                return False
        elif x.shape != y.shape or not bool(((x == y) | (x.isnan() & y.isnan())).all()):
            return False
    return True


def _ratio(
    value: Mapping[str, torch.Tensor | None], truth: Mapping[str, torch.Tensor | None], name: str
) -> float | None:
    a, b = value.get(name), truth.get(name)
    return None if a is None or b is None else _quotient(float(a), float(b))


def _gradient_ratio(value: Mapping[str, torch.Tensor | None], truth: Quantities) -> float | None:
    names = [n for n in truth if n.startswith("grad_")]
    if any(value.get(n) is None for n in names):
        return None
    return _quotient(_norm(value[n] for n in names), _norm(truth[n] for n in names))


def _norm(tensors: Iterable[torch.Tensor | None]) -> float:
    return math.hypot(*(float(t.double().norm()) for t in tensors if t is not None))


def _quotient(a: float, b: float) -> float | None:
    return a / b if b != 0.0 and math.isfinite(a) and math.isfinite(b) else None


def _row(out: Answer, quantity: str | None, gate: str, verdict: Any, pair: Pair) -> Row:
    """What the ledger looks at."""
    case = pair.case
    return Row(
        case=case.id,
        family=out.family,
        implementation=out.implementation,
        quantity=quantity,
        dtype=case.dtype,
        device=pair.moved.inputs.device.type,
        verdict=verdict,
        gate=gate,
    )


def _known(rows: Iterable[Row], known: Ledger, case: Case) -> tuple[str, ...]:
    """The entries that cover the failing quantities; none when one of them is not covered."""
    found = [known(row, case) for row in rows]
    return () if None in found else tuple(dict.fromkeys(str(f) for f in found))
