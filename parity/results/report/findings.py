"""Group failing rows into findings: one for each implementation and set of wrong quantities."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parity.results.report.outcomes import ImplementationCase, about_run, headroom
from parity.results.row import STOPPED, Row, stopped_by

_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,.]*(e[+-]?\d+)?")

_DTYPE = re.compile(r"\b(?:c10::|torch\.)?(?:BFloat16|Half|Float|Double|bfloat16|half|double|float(?:16|32|64)?)\b")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Cases in which one implementation fails in the same root quantities, under one ledger entry or none.

    Attributes:
        implementation: its id.
        family: of the loss.
        verdict: disagree, nondeterministic, crashed, timed-out or out-of-memory.
        roots: the quantities it starts in; empty where there was no result to judge.
        known: ledger id, or None for a new one.
        rows: all rows of the smallest case, what `terminal.render_finding` shows.
        lead: the row of `rows` that fails worst among the roots.
        worst: the row that fails worst among the roots of all cases.
        cases: in how many cases.
        classes: how many of the cases are logic, and how many precision.
        blames: how many of the cases blame whom ("": nobody).
        passes: how many of the calls that came to no end did so in their forward pass, their backward pass, or elsewhere ("").
        dtypes: those it was seen in.
        failing: (dtype, device, quantity) of everything that fails in these cases, roots or not.
        minimised: True where `rows` are of a minimised case, False where the run had no time left to minimise it, None
            where nothing is ever minimised (a frozen case, a check of a trainer).
        settings: those that all its cases share, by name.
        largest: headroom of what fails in these cases, the largest; None where one has none.
        off: ‖error‖ ÷ ‖oracle‖ of its gradients, ascending, where both are finite: how much of the gradient it costs.
    """

    implementation: str
    family: str
    verdict: str
    roots: tuple[str, ...]
    known: str | None
    rows: tuple[Row, ...]
    lead: Row
    worst: Row
    cases: int
    classes: Mapping[str, int]
    dtypes: tuple[str, ...]
    failing: frozenset[tuple[str, str, str | None]]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    largest: float | None = None
    off: tuple[float, ...] = ()
    minimised: bool | None = None
    blames: Mapping[str, int] = dataclasses.field(default_factory=dict)
    passes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Part:
    """The failing rows of one case that share a ledger entry and a root."""

    source: ImplementationCase
    known: str | None
    verdict: str
    roots: frozenset[str]
    label: str
    failing: tuple[Row, ...]

    @property
    def leads(self) -> list[Row]:
        return [r for r in self.failing if r.quantity in self.roots] or list(self.failing)

    @property
    def cls(self) -> str | None:
        found = {r.cls for r in self.leads}
        return "logic" if "logic" in found else "precision" if "precision" in found else None

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return (self.source.implementation, self.source.family, self.known or "", self.verdict, self.label)


def findings(cases: Iterable[ImplementationCase]) -> list[Finding]:
    """All findings: crashes and logic before precision, large before small, known ones last."""
    groups: dict[tuple[str, str, str, str, str], list[_Part]] = collections.defaultdict(list)
    for case in cases:
        for part in _parts(case):
            groups[part.key].append(part)
    by_roots: dict[tuple[str, str, str, str, str, frozenset[str]], list[_Part]] = {}
    for key, parts in groups.items():
        for roots, merged in _merged(parts).items():
            by_roots[(*key, roots)] = merged
    out = [_finding(key[-1], parts) for key, parts in by_roots.items()]
    return sorted(out, key=_order)


def normalised(message: str) -> str:
    """A message without its numbers, so that the same reason at two shapes counts as one; dtype names keep theirs."""
    return _NUMBER.sub("#", message)


def _cause(message: str) -> str:
    """Why a call came to no end, without its numbers, the part that ran, and its dtypes: those of a finding are listed."""
    return normalised(_DTYPE.sub("dtype", stopped_by(message)[0]))


def _order(finding: Finding) -> tuple[bool, int, int, float, str]:
    kinds = ("crashed", "timed-out", "out-of-memory", "disagree", "nondeterministic")
    worst = headroom(finding.worst)
    return (
        finding.known is not None,
        0 if "logic" in finding.classes or finding.verdict in STOPPED else 1,
        kinds.index(finding.verdict),
        -worst,
        finding.implementation,
    )


def _parts(case: ImplementationCase) -> list[_Part]:
    """A case's failing rows, split by ledger entry; a protocol leak is a finding beside whatever else is wrong."""
    split: dict[tuple[str | None, bool], list[Row]] = collections.defaultdict(list)
    for row in case.failing:
        split[row.known, row.quantity == "protocol"].append(row)
    out = []
    for (known, _), rows in split.items():
        stopped = [r for r in rows if r.verdict in STOPPED]
        if stopped:
            verdict, label = stopped[0].verdict, _cause(stopped[0].message)
            out.append(_Part(case, known, verdict, frozenset(), label, tuple(rows)))
            continue
        roots = roots_of(rows)
        flaky = all(r.verdict == "nondeterministic" for r in rows if r.quantity in roots)
        out.append(_Part(case, known, "nondeterministic" if flaky else "disagree", roots, "", tuple(rows)))
    return out


def roots_of(failing: Iterable[Row]) -> frozenset[str]:
    """The quantities that a disagreement starts in: outputs if any fails, else gradients, else relations, else the run.

    A wrong value makes a wrong gradient, and either breaks the relations: only the first of these says something new.
    """
    tiers: dict[int, set[str]] = collections.defaultdict(set)
    for row in failing:
        tiers[tier(row)].add(row.subject)
    return frozenset(tiers[min(tiers)]) if tiers else frozenset()


def tier(row: Row) -> int:
    """0 for an output, 1 for a gradient, 2 for a relation or the protocol, 3 for a row about the whole run."""
    quantity = row.quantity or ""
    if about_run(row):
        return 3
    if quantity == "protocol" or quantity.startswith("relation"):
        return 2
    return 1 if quantity.startswith("grad_") else 0


def _merged(parts: Sequence[_Part]) -> dict[frozenset[str], list[_Part]]:
    """Parts by root set. A case that asked for fewer gradients joins the set that it shows as far as it was judged."""
    sets = sorted({p.roots for p in parts}, key=lambda s: (-len(s), sorted(s)))
    out: dict[frozenset[str], list[_Part]] = collections.defaultdict(list)
    for part in parts:
        judged = {r.quantity for r in part.source.judged}
        gradients = part.roots and all(q.startswith("grad_") for q in part.roots)
        target = part.roots
        if gradients:
            target = next(s for s in sets if s & judged == part.roots and all(q.startswith("grad_") for q in s))
        out[target].append(part)
    return out


def _finding(roots: frozenset[str], parts: Sequence[_Part]) -> Finding:
    classes = collections.Counter(p.cls for p in parts if p.cls)
    cls = "logic" if "logic" in classes else None
    alike = [p for p in parts if cls is None or p.cls == cls]
    # Whose fault it is that a call came to no end is known only of some cases: one of those speaks.
    shown = min(alike, key=lambda p: (p.verdict in STOPPED and lead_of(p.leads).blame is None, p.source.size))
    every = [row for p in parts for row in p.leads]
    source = shown.source
    order = [q for q in (r.quantity for p in parts for r in p.failing) if q in roots]
    sizes = [r.headroom for p in parts for r in p.failing]
    return Finding(
        implementation=source.implementation,
        family=source.family,
        verdict=shown.verdict,
        roots=tuple(dict.fromkeys(q for q in order if q)),
        known=shown.known,
        rows=_without_others(source.rows, shown.failing),
        lead=lead_of(shown.leads),
        worst=lead_of(every),
        cases=len(parts),
        classes=dict(classes),
        dtypes=tuple(sorted({p.source.dtype for p in parts})),
        failing=frozenset((r.dtype, r.device, r.quantity) for p in parts for r in p.failing),
        minimised=_minimised(source.rows, parts),
        blames=collections.Counter(lead_of(p.leads).blame or "" for p in parts),
        passes=collections.Counter(
            stopped_by(next(r for r in p.failing if r.verdict in STOPPED).message)[1]
            for p in parts
            if p.verdict in STOPPED
        ),
        settings=_shared([p.source.rows[0].settings for p in parts]),
        largest=None if None in sizes else max(size for size in sizes if size is not None),
        off=tuple(sorted(off for p in parts for r in p.failing if (off := _off(r)) is not None)),
    )


def _shared(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = settings
    return {name: value for name, value in first.items() if all(name in s and s[name] == value for s in others)}


def _minimised(shown: Iterable[Row], parts: Iterable[_Part]) -> bool | None:
    if any(r.minimised is True for r in shown):
        return True
    return False if any(r.minimised is False for p in parts for r in p.failing) else None


def _off(row: Row) -> float | None:
    """‖error‖ ÷ ‖oracle‖ of a gradient; None of anything else, and where one of them is not finite."""
    gradient = row.subject.startswith("grad_") and row.gate != "structure"
    return row.dist / row.value_oracle if gradient and row.dist is not None and row.value_oracle else None


def lead_of(rows: Iterable[Row]) -> Row:
    """The failing row that speaks for the others: logic before precision, then the largest headroom."""
    return max((r for r in rows if r.failing), key=lambda r: (r.cls == "logic", headroom(r)))


def _without_others(rows: Sequence[Row], failing: Sequence[Row]) -> tuple[Row, ...]:
    """The rows of a case, without failures that belong to another finding of the same case (they have their own)."""
    ids = {id(r) for r in failing}
    return tuple(r for r in rows if id(r) in ids or not r.failing)
