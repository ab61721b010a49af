"""Rows grouped once: by case and implementation, and what fails into findings, one for each set of wrong quantities."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from parity.results.row import JUDGED, STOPPED, Row, stopped_by

_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,.]*(e[+-]?\d+)?")

_DTYPE = re.compile(r"\b(?:c10::|torch\.)?(?:BFloat16|Half|Float|Double|bfloat16|half|double|float(?:16|32|64)?)\b")


@dataclasses.dataclass(frozen=True)
class ImplementationCase:
    """One case through one implementation on one device; `rows` has one row a quantity, in order."""

    implementation: str
    case: str
    family: str
    dtype: str
    device: str
    rows: tuple[Row, ...]

    @cached_property
    def outcome(self) -> str:
        """compared, or why nothing was: crashed, timed-out, out-of-memory, refused, unsupported."""
        found = {row.verdict for row in self.rows}
        if stopped := next((verdict for verdict in STOPPED if verdict in found), None):
            return stopped
        if not found.isdisjoint(JUDGED):
            return "compared"
        return "refused" if "refused" in found else "unsupported"

    @property
    def judged(self) -> tuple[Row, ...]:
        """The rows in which something was compared with the oracle."""
        return tuple(row for row in self.rows if row.judged)

    @property
    def failing(self) -> tuple[Row, ...]:
        """The rows that need an explanation, known or new."""
        return tuple(row for row in self.rows if row.failing)

    @property
    def size(self) -> tuple[int, int, int, str]:
        """Orders cases for the reader: minimised ones first, then small shapes, then few settings."""
        row = self.rows[0]
        volume = math.prod(v for v in (row.settings.get(k, 1) for k in "BTVH") if isinstance(v, int))
        return (row.minimised is not True, volume, len(row.settings), self.case)


def headroom(row: Row) -> float:
    """The headroom of a judged row; infinite where the row has null because the failure has no size."""
    if row.headroom is not None:
        return row.headroom
    return 0.0 if row.verdict == "agree" else math.inf


def about_run(row: Row) -> bool:
    """Whether a row is about the run as a whole (a pooled slope) and not about a case: such rows have no settings."""
    return not row.settings


def grouped(rows: Iterable[Row]) -> list[ImplementationCase]:
    """Rows by case, implementation and device. Where a case ran twice the later rows count, and count once."""
    found: dict[tuple[str, str, str, str, str], dict[str | None, Row]] = {}
    for row in rows:
        key = row.implementation, row.case, row.family, row.dtype, row.device
        found.setdefault(key, {})[row.quantity] = row
    return [ImplementationCase(*key, tuple(by_quantity.values())) for key, by_quantity in found.items()]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failing rows of one case that share a ledger entry and a root. `label`: why a call came to no end."""

    source: ImplementationCase
    known: str | None
    verdict: str
    roots: frozenset[str]
    label: str
    failing: tuple[Row, ...]

    @property
    def leads(self) -> list[Row]:
        """The failing rows of its roots; all where there are none."""
        return [r for r in self.failing if r.quantity in self.roots] or list(self.failing)

    @property
    def cls(self) -> str | None:
        """logic where one of its roots is."""
        found = {r.cls for r in self.leads}
        return "logic" if "logic" in found else "precision" if "precision" in found else None


@dataclasses.dataclass(frozen=True)
class Finding:
    """Cases in which one implementation fails in the same root quantities (none where there was no result), under one ledger
    entry or, with `known` empty, none. `verdict`: disagree, nondeterministic, crashed, timed-out or out-of-memory."""

    implementation: str
    family: str
    known: str | None
    verdict: str
    wrong_in: frozenset[str]
    parts: tuple[Failure, ...]

    @cached_property
    def shown(self) -> Failure:
        """The smallest case, which speaks for all: logic before precision, and one of which it is known whose fault it is."""
        logic = [p for p in self.parts if p.cls == "logic"]
        return min(
            logic or self.parts,
            key=lambda p: (p.verdict in STOPPED and lead_of(p.leads).blame is None, p.source.size),
        )

    @property
    def key(self) -> str:
        """What it is recognised by in another run: who, in which family, how, in which quantities; or its ledger entry."""
        if self.known:
            return f"{self.implementation} {self.known}"
        return " ".join([self.implementation, self.family, self.verdict, *sorted(self.roots)])

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """The quantities it starts in, in their order."""
        return tuple(
            dict.fromkeys(q for p in self.parts for r in p.failing if (q := r.quantity) in self.wrong_in and q)
        )

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows of the smallest case, less failures that belong to another finding."""
        ids = {id(r) for r in self.shown.failing}
        return tuple(r for r in self.shown.source.rows if id(r) in ids or not r.failing)

    @cached_property
    def lead(self) -> Row:
        """The row of `rows` that fails worst among the roots."""
        return lead_of(self.shown.leads)

    @cached_property
    def worst(self) -> Row:
        """The row that fails worst among the roots of all cases."""
        return lead_of(r for p in self.parts for r in p.leads)

    @property
    def cases(self) -> int:
        """In how many."""
        return len(self.parts)

    @property
    def classes(self) -> Mapping[str, int]:
        """How many of the cases are logic, and how many precision."""
        return collections.Counter(p.cls for p in self.parts if p.cls)

    @property
    def blames(self) -> Mapping[str, int]:
        """How many of the cases blame whom ("": nobody)."""
        return collections.Counter(lead_of(p.leads).blame or "" for p in self.parts)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those it was seen in."""
        return tuple(sorted({p.source.dtype for p in self.parts}))

    @cached_property
    def failing(self) -> tuple[Row, ...]:
        """Everything that fails in its cases, roots or not."""
        return tuple(r for p in self.parts for r in p.failing)

    @property
    def minimised(self) -> bool | None:
        """Of the case that is shown; False: no time was left for it, None: it is of no kind that is minimised."""
        if any(r.minimised is True for r in self.shown.source.rows):
            return True
        return False if any(r.minimised is False for r in self.failing) else None

    @property
    def off(self) -> list[float]:
        """‖error‖ ÷ ‖oracle‖ of its gradients, ascending, where both are finite: how much of the gradient it costs."""
        gradients = (r for r in self.failing if r.subject.startswith("grad_") and r.gate != "structure")
        return sorted(r.dist / r.value_oracle for r in gradients if r.dist is not None and r.value_oracle)


def findings(cases: Iterable[ImplementationCase]) -> list[Finding]:
    """All findings: crashes and logic before precision, large before small, known ones last."""
    groups: dict[tuple[str, str, str | None, str, str], list[Failure]] = collections.defaultdict(list)
    for case in cases:
        for part in failures(case):
            groups[case.implementation, case.family, part.known, part.verdict, part.label].append(part)
    out = [
        Finding(implementation, family, known, verdict, roots, tuple(parts))
        for (implementation, family, known, verdict, _), group in groups.items()
        for roots, parts in _by_roots(group).items()
    ]
    return sorted(out, key=_order)


def normalised(message: str) -> str:
    """A message without its numbers, so that the same reason at two shapes counts as one; dtype names keep theirs."""
    return _NUMBER.sub("#", message)


def _order(finding: Finding) -> tuple[bool, int, int, float, str]:
    kinds = ("crashed", "timed-out", "out-of-memory", "disagree", "nondeterministic")
    grave = "logic" in finding.classes or finding.verdict in STOPPED
    return (
        finding.known is not None,
        0 if grave else 1,
        kinds.index(finding.verdict),
        -headroom(finding.worst),
        finding.implementation,
    )


def failures(case: ImplementationCase) -> list[Failure]:
    """A case's failing rows, split by ledger entry; a protocol leak is a finding beside whatever else is wrong."""
    split: dict[tuple[str | None, bool], list[Row]] = collections.defaultdict(list)
    for row in case.failing:
        split[row.known, row.quantity == "protocol"].append(row)
    out = []
    for (known, _), rows in split.items():
        if stopped := [r for r in rows if r.verdict in STOPPED]:
            # The same cause whatever the numbers, the part that ran, and the dtypes, which a finding lists.
            label = normalised(_DTYPE.sub("dtype", stopped_by(stopped[0].message)[0]))
            out.append(Failure(case, known, stopped[0].verdict, frozenset(), label, tuple(rows)))
            continue
        roots = roots_of(rows)
        flaky = all(r.verdict == "nondeterministic" for r in rows if r.quantity in roots)
        out.append(Failure(case, known, "nondeterministic" if flaky else "disagree", roots, "", tuple(rows)))
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


def _by_roots(parts: Sequence[Failure]) -> dict[frozenset[str], list[Failure]]:
    """Parts by root set. A case that asked for fewer gradients joins the set that it shows as far as it was judged."""
    sets = sorted({p.roots for p in parts}, key=lambda s: (-len(s), sorted(s)))
    out: dict[frozenset[str], list[Failure]] = collections.defaultdict(list)
    for part in parts:
        target = part.roots
        if target and _gradients(target):
            judged = {r.quantity for r in part.source.judged}
            target = next(s for s in sets if s & judged == target and _gradients(s))
        out[target].append(part)
    return out


def _gradients(roots: Iterable[str]) -> bool:
    return all(q.startswith("grad_") for q in roots)


def lead_of(rows: Iterable[Row]) -> Row:
    """The failing row that speaks for the others: logic before precision, then the largest headroom."""
    return max((r for r in rows if r.failing), key=lambda r: (r.cls == "logic", headroom(r)))
