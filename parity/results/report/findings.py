"""Rows grouped once: by case and implementation, and what fails into findings, one for each set of wrong quantities."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from parity.results.row import JUDGED, STOPPED, Row, stopped_by

UNEXPLAINED = ("protocol", "relation", "pooled slope")  # gates about several calls, which no rounding explains
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,.]*(e[+-]?\d+)?")
_DTYPE = re.compile(r"\b(?:c10::|torch\.)?(?:BFloat16|Half|Float|Double|bfloat16|half|double|float(?:16|32|64)?)\b")


@dataclasses.dataclass(frozen=True)
class ImplementationCase:
    """One case through one implementation on one device: a row for each quantity, in order."""

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """Its first row, which has what all have: implementation, case, family, dtype, device, settings."""
        return self.rows[0]

    @cached_property
    def outcome(self) -> str:
        """compared, or why nothing was: crashed, timed-out, out-of-memory, refused, unsupported."""
        found = {row.verdict for row in self.rows}
        if stopped := next((verdict for verdict in STOPPED if verdict in found), None):
            return stopped
        if not found.isdisjoint(JUDGED):
            return "compared"
        return "refused" if "refused" in found else "unsupported"

    @cached_property
    def failing(self) -> tuple[Row, ...]:
        """The rows that need an explanation, known or new."""
        return tuple(row for row in self.rows if row.failing)

    @cached_property
    def roots(self) -> frozenset[str]:
        """The quantities that its failure starts in: outputs if any fails, else gradients, else relations, else the run. A
        wrong value makes a wrong gradient, and either breaks the relations."""
        tiers = collections.defaultdict[int, set[str]](set)
        for row in self.failing:
            if row.verdict not in STOPPED:
                tiers[tier(row)].add(row.subject)
        return frozenset(tiers[min(tiers)]) if tiers else frozenset()

    @cached_property
    def lead(self) -> Row:
        """The failing row that speaks for the others: a root, logic before precision, then the largest headroom."""
        stopped = [r for r in self.failing if r.verdict in STOPPED]
        return max(stopped or [r for r in self.failing if r.subject in self.roots], key=_gravity)

    @property
    def size(self) -> tuple[int, int, int, str]:
        """Orders cases for the reader: minimised ones first, then small shapes, then few settings."""
        row = self.first
        volume = math.prod(v for v in (row.settings.get(k, 1) for k in "BTVH") if isinstance(v, int))
        return (row.minimised is not True, volume, len(row.settings), row.case)


def _gravity(row: Row) -> tuple[bool, float]:
    return row.cls == "logic", headroom(row)


def headroom(row: Row) -> float:
    """The headroom of a judged row; infinite where the row has null because the failure has no size."""
    if row.headroom is not None:
        return row.headroom
    return 0.0 if row.verdict == "agree" else math.inf


def about_run(row: Row) -> bool:
    """Whether a row is about the run as a whole (a pooled slope) and not about a case: such rows have no settings."""
    return not row.settings


def tier(row: Row) -> int:
    """0 for an output, 1 for a gradient, 2 for a relation or the protocol, 3 for a row about the whole run."""
    if about_run(row):
        return 3
    if row.subject == "protocol" or row.subject.startswith("relation"):
        return 2
    return 1 if row.subject.startswith("grad_") else 0


def grouped(rows: Iterable[Row]) -> list[ImplementationCase]:
    """Rows by case, implementation and device. Where a case ran twice the later rows count, and count once."""
    found = collections.defaultdict[tuple[str, ...], dict[str | None, Row]](dict)
    for row in rows:
        found[row.implementation, row.case, row.family, row.dtype, row.device][row.quantity] = row
    return [ImplementationCase(tuple(by_quantity.values())) for by_quantity in found.values()]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Cases in which one implementation fails in the same root quantities (none where there was no result), under one ledger
    entry or, with `known` empty, none. `verdict`: disagree, nondeterministic, crashed, timed-out or out-of-memory. Each of
    `parts` has all rows of its case, less failures that belong to another finding. `also`: of a new one of a
    released trainer, the same on its other paths, in no other cases."""

    implementation: str
    family: str
    known: str | None
    verdict: str
    roots: tuple[str, ...]
    parts: tuple[ImplementationCase, ...]
    also: tuple["Finding", ...] = ()

    @property
    def each(self) -> tuple["Finding", ...]:
        """One for each implementation."""
        return dataclasses.replace(self, also=()), *self.also

    @property
    def settings(self) -> dict[str, Any]:
        """Those away from their default in all its cases, shapes left out: the value that all share, or up to three."""
        its = [p.first.settings for p in self.parts]
        of = {k: {str(s[k]): s[k] for s in its} for k in its[0] if k not in "BTVH" and all(k in s for s in its)}
        return {k: v.popitem()[1] if len(v) == 1 else "|".join(v) for k, v in of.items() if len(v) <= 3}

    @cached_property
    def shown(self) -> ImplementationCase:
        """The smallest case, which speaks for all: logic before precision, and one of which it is known whose fault it is."""
        logic = [p for p in self.parts if p.lead.cls == "logic"]
        return min(logic or self.parts, key=lambda p: (p.lead.verdict in STOPPED and p.lead.blame is None, p.size))

    @property
    def lead(self) -> Row:
        """The row of the smallest case that fails worst among the roots."""
        return self.shown.lead

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.shown.rows

    @property
    def key(self) -> str:
        """What it is recognised by in another run: who, in which family, how, in which quantities; or its ledger entry."""
        if self.known:
            return f"{self.implementation} {self.known}"
        return " ".join([self.implementation, self.family, self.verdict, *sorted(self.roots)])

    @cached_property
    def worst(self) -> Row:
        """The row that fails worst among the roots of all cases."""
        return max((p.lead for p in self.parts), key=_gravity)

    @property
    def cases(self) -> int:
        return len(self.parts)

    @property
    def classes(self) -> Mapping[str, int]:
        """How many of the cases are logic, and how many precision."""
        return collections.Counter(p.lead.cls for p in self.parts if p.lead.cls)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({p.first.dtype for p in self.parts}))

    @cached_property
    def failing(self) -> tuple[Row, ...]:
        """Everything that fails in its cases, roots or not."""
        return tuple(r for p in self.parts for r in p.failing)

    @property
    def minimised(self) -> bool | None:
        """Of the case that is shown; False: no time was left for it, None: it is of no kind that is minimised."""
        if any(r.minimised is True for r in self.rows):
            return True
        return False if any(r.minimised is False for r in self.failing) else None


def findings(cases: Iterable[ImplementationCase]) -> list[Finding]:
    """All findings: crashes and logic before precision, large before small, known ones last."""
    groups = collections.defaultdict[tuple[Any, ...], list[ImplementationCase]](list)
    for case in cases:
        for part in _parts(case):
            groups[part.first.implementation, part.first.family, part.lead.known, *_how(part)].append(part)
    out = dict[tuple[Any, ...], Finding]()
    for (who, family, known, verdict, why), group in groups.items():
        for roots, parts in _by_roots(group).items():
            order = dict.fromkeys(r.subject for p in parts for r in p.failing if r.subject in roots)
            found = Finding(who, family, known, verdict, tuple(order), tuple(parts))
            out[who, family, known, verdict, why, roots] = found
    for key, found in list(out.items()):
        as_released = f"{found.family}.released", *key[1:]
        whole = out.get(as_released)
        if whole and other_path(found.lead) and not found.known and _ran(found) <= _ran(whole):
            out[as_released] = dataclasses.replace(whole, also=(*whole.also, out.pop(key)))
    return sorted(out.values(), key=_order)


def _ran(finding: Finding) -> set[tuple[str, str]]:
    return {(p.first.case, p.first.device) for p in finding.parts}


def other_path(row: Row) -> str:
    """The path of a row of TRL's own trainer that is not as released: "fused" or "fixed"."""
    of, _, path = row.implementation.rpartition(".")
    return path if of == row.family and path != "released" else ""


def normalised(message: str) -> str:
    """A message without its numbers, so that the same reason at two shapes counts as one; dtype names keep theirs."""
    return _NUMBER.sub("#", message)


def _order(finding: Finding) -> tuple[bool, int, int, float, bool, str]:
    kinds = ("crashed", "timed-out", "out-of-memory", "disagree", "nondeterministic")
    mild = "logic" not in finding.classes and finding.verdict not in STOPPED
    size = -headroom(finding.worst)
    who = bool(other_path(finding.lead)), finding.implementation  # the trainer as released before its other paths
    return finding.known is not None, mild, kinds.index(finding.verdict), size, *who


def _parts(case: ImplementationCase) -> list[ImplementationCase]:
    """A case for each ledger entry among its failing rows; a protocol leak is a finding beside whatever else is wrong."""

    def of(row: Row) -> tuple[str | None, bool]:
        return row.known, row.quantity == "protocol"

    kinds = dict.fromkeys(map(of, case.failing))
    return [ImplementationCase(tuple(r for r in case.rows if not r.failing or of(r) == kind)) for kind in kinds]


def _how(part: ImplementationCase) -> tuple[str, str]:
    """The verdict of a failure, and why a call came to no end: the same cause whatever the numbers, the part that ran, and the
    dtypes, which a finding lists."""
    if part.lead.verdict in STOPPED:
        return part.lead.verdict, normalised(_DTYPE.sub("dtype", stopped_by(part.lead.message)[0]))
    flaky = all(r.verdict == "nondeterministic" for r in part.failing if r.subject in part.roots)
    return "nondeterministic" if flaky else "disagree", ""


def _by_roots(parts: Sequence[ImplementationCase]) -> dict[frozenset[str], list[ImplementationCase]]:
    """Parts by root set. A case that asked for fewer gradients joins the set that it shows as far as it was judged."""
    sets = sorted({p.roots for p in parts}, key=lambda s: (-len(s), sorted(s)))
    out = collections.defaultdict[frozenset[str], list[ImplementationCase]](list)
    for part in parts:
        target = part.roots
        if target and all(name.startswith("grad_") for name in target):
            judged = {r.quantity for r in part.rows if r.judged}
            target = next(s for s in sets if s & judged == target)
        out[target].append(part)
    return out


def suggested(rows: Iterable[Row]) -> list[Row]:
    """The rows; where a user's function has a recipe under which all its new failures agree, in every case, it is said.

    A case where the reference is wrong too says nothing of the function, and is left out. What is wrong in float32 too is not
    explained by what 16 bits round: where it is logic, one of the cases must be in float32, or none of the run's.
    Of several that which allows least in most of them: the smallest sum of its ranks.
    """
    rows, out = list(rows), list[Row]()
    wrong = [row for row in rows if row.new and row.judged and row.gate not in UNEXPLAINED]
    both = {(row.implementation, row.case) for row in wrong if row.blame == "both"}
    wrong = [row for row in wrong if (row.implementation, row.case) not in both]
    of = collections.defaultdict[str, dict[str, list[str]]](dict)
    for row in wrong:
        of[row.implementation].setdefault(row.case, row.recipes)
    logic = {row.implementation for row in wrong if row.cls == "logic"}
    logic &= {row.implementation for row in rows if row.judged and _in_float32(row)}
    logic -= {row.implementation for row in wrong if _in_float32(row)}
    best: dict[str, str] = {}
    for name, cases in of.items():
        if name not in logic and (every := set.intersection(*map(set, cases.values()))):
            best[name] = min(sorted(every), key=lambda recipe: sum(found.index(recipe) for found in cases.values()))
    for row in rows:
        if (recipe := best.get(row.implementation)) in row.recipes:
            said = f"right for code that rounds so, in every case where it alone is wrong: {recipe}"
            said += "; declare it if that is meant"
            row = replace(row, message="; ".join(filter(None, [row.message, said])))
        out.append(row)
    return out


def _in_float32(row: Row) -> bool:
    return row.dtype == "fp32" and "autocast" not in str(row.settings.get("context"))
