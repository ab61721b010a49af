"""What changed between two sets of rows, quantity by quantity, and which side is nearer to the oracle. Pure functions."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from parity.case.case import Case
from parity.decoding import short
from parity.errors import UsageError
from parity.results import memory, trend
from parity.results.report import render, wording
from parity.results.report.findings import Finding, about_run, headroom
from parity.results.report.summary import summarise
from parity.results.row import Header, Row
from parity.versions.look import amount

Side = Mapping[tuple[str, str, str | None], Row]  # rows by (name of the case, implementation, quantity)
RELATIVE = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.05}
"""A value that passes its gates has moved when its norm changed by more than this share …"""
USED = 0.5  # … and at least one side uses this much of its gate: less is rounding in another order
REASON = 70  # characters of a verdict with its reason
TIMES = 2.0  # so does one whose error became so many times as large, or as small
_ORDER = {"agree": 0, "refused": 1, "disagree": 2, "crashed": 2, "nondeterministic": 2}
MARKS = "+-~"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A quantity that differs, with its rows before and after. `quantity` is None where a side has no quantities
    because it refused, crashed or does not support the case; the other side's row is then the worst of its quantities,
    or None where the implementation did not run there at all."""

    case: str
    implementation: str
    quantity: str | None
    before: Row | None
    after: Row | None

    @property
    def mark(self) -> str:
        """ "+" worse, "-" better, as asv prints them, "~" neither: both inside their gates, or a refusal. Of two that fail the
        nearer one is better; where neither is nearer by its error, error ÷ allowed decides."""
        sides = [_ORDER.get(r.verdict) if r else None for r in (self.before, self.after)]
        if sides[0] is None or sides[1] is None or sides == [0, 0]:
            return "~"
        if sides[0] != sides[1]:
            # What begins to be refused, or no longer is, was not wrong on either side.
            return "~" if 2 not in sides else "+" if sides[1] > sides[0] else "-"
        if self.nearer:
            assert self.before is not None
            assert self.after is not None
            return "~" if _same(self.before, self.after) else "+" if self.nearer == "before" else "-"
        levels = [self._level(r) for r in (self.before, self.after)]
        return "~" if levels[0] == levels[1] else "+" if levels[1] > levels[0] else "-"

    @property
    def nearer(self) -> str:
        """Which side is nearer to the oracle: "before", "after", or "" where that cannot be said."""
        if self.quantity is None or self.before is None or self.after is None:
            return ""
        one, two = (r.dist if r.value is not None else math.inf for r in (self.before, self.after))
        if one is None or two is None or one == two:
            return ""
        return "before" if one < two else "after"

    @property
    def weight(self) -> float:
        """The greater headroom of the two sides, infinite where a failure has no size: how clearly it shows."""
        return max(self._level(r) for r in (self.before, self.after))

    @staticmethod
    def _level(row: Row | None) -> float:
        return math.inf if row is None or row.headroom is None else float(row.headroom)


def side(found: Iterable[Row], cases: Sequence[tuple[str, Case]]) -> dict[tuple[str, str, str | None], Row]:
    """Rows by the names under which their cases are known."""
    names: dict[str, list[str]] = {}
    for name, case in cases:
        names.setdefault(case.id, []).append(name)
    return {(name, r.implementation, r.quantity): r for r in found for name in names.get(r.case, ())}


def differences(before: Side, after: Side) -> list[Difference]:
    """What differs, most telling first."""
    out = []
    for key in {**before, **after}:
        one, two = before.get(key), after.get(key)
        if one is None or two is None:
            # Quantities come and go with a refusal or a crash, whose own row says it once.
            if key[2] is not None:
                continue
            one, two = one or _worst(before, key), two or _worst(after, key)
        if one is None or two is None or _differ(one, two):
            out.append(Difference(*key, one, two))
    return sorted(out, key=lambda m: (MARKS.index(m.mark), m.quantity is None, -m.weight, m.implementation, m.case))


def _worst(rows: Side, key: tuple[str, str, str | None]) -> Row | None:
    same_case = [r for k, r in rows.items() if k[:2] == key[:2]]
    return max(same_case, key=lambda r: _ORDER.get(r.verdict, -1), default=None)


def _differ(one: Row, two: Row) -> bool:
    if one.verdict != two.verdict:
        return True
    if one.quantity is None:
        return False
    if one.value is None or two.value is None:
        return one.value is not two.value
    if _same(one, two):
        return False  # what is allowed may have moved: rounding is drawn anew in each environment
    scale = max(abs(one.value), abs(two.value), 1e-12)
    least, most = sorted(math.inf if r.headroom is None else r.headroom for r in (one, two))
    moved = abs(one.value - two.value) > RELATIVE.get(one.dtype, 0.05) * scale or most > TIMES * least
    return moved and most > USED


def _same(one: Row, two: Row) -> bool:
    """Whether values and their distances from the definition differ by rounding alone."""
    share = RELATIVE.get(one.dtype, 0.05)
    pairs = [(one.value, two.value), (one.dist, two.dist)]
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=share) for a, b in pairs)


def table(found: Sequence[Difference], each: bool = False) -> str:
    """Mark, case, implementation, quantity, before, after, ratio, by definition, and which side is nearer to it. A line for
    each kind of change, with the case that shows it most clearly and how many more there are, or for `each` case."""
    heads = ("", "case", "implementation", "quantity", "before", "after", "ratio", "definition", "nearer", "more cases")
    lines: list[tuple[str, ...]] = [heads]
    kinds: dict[Any, list[Difference]] = {}
    for n, m in enumerate(found):
        sides = [(r and r.verdict, m.quantity is None and r and r.message) for r in (m.before, m.after)]
        kinds.setdefault(n if each else (m.mark, m.implementation, m.quantity, *sides), []).append(m)
    for m, *more in kinds.values():
        whole, both = m.quantity is None, (m.before, m.after)
        values = [None if whole or r is None else r.value for r in both]
        ratio = f"{values[1] / values[0]:.4g}" if values[0] and values[1] is not None else ""
        cells = [_cell(r, whole) for r in both]
        if not whole and cells[0] == cells[1]:  # a norm that is the same of two gradients
            cells = [f"{cell}, {amount(r.dist)} off" for cell, r in zip(cells, both, strict=True) if r is not None]
        exact = "" if whole else next(amount(r.value_oracle) for r in both if r is not None)
        count = f"{len(more):,}" if more else ""
        lines.append((m.mark, m.case, m.implementation, m.quantity or "", *cells, ratio, exact, m.nearer, count))
    wide = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, wide, strict=True)).rstrip() for line in lines)


def _cell(row: Row | None, whole: bool) -> str:
    if row is None:
        return "(not run)"
    if whole or row.gate == "protocol":
        return short(f"{row.verdict}: {row.message}" if row.message else str(row.verdict), REASON)
    return amount(row.value) + {"agree": "", "disagree": "!"}.get(row.verdict, f" {row.verdict}")


def comment(base: tuple[Header, list[Row]], now: tuple[Header, list[Row]]) -> str:
    """Two results files, as they are read, as Markdown: findings that only `now` has, findings that only `base` had,
    and error ÷ allowed before and after where a quantity of a case of both moved (`parity.versions.row_diff`). Raises
    UsageError for runs of two profiles, or on two kinds of device, which have no cases in common."""
    summaries = [summarise(*one) for one in (base, now)]
    before, run = (memory.of(one, 0) for one in summaries)
    if (before.profile, before.device) != (run.profile, run.device):
        sides = [f"profile {one.profile} on {one.device}" for one in (before, run)]
        raise UsageError(f"--against: {sides[0]} and {sides[1]} cannot be compared")
    change = trend.change(run, [msgspec.structs.replace(before, id="base", started=min(before.started, run.started))])
    then, told = ({g.key: g for f in (*one.findings, *one.known) for g in (*f.also, f)} for one in summaries)
    parts = [one[0].parts or [] for one in (base, now)]
    every = [{(r.case, r.implementation, r.quantity): r for r in one[1] if not about_run(r)} for one in (base, now)]
    both = set.intersection(*({key[:2] for key in side} for side in every))
    common = [{key: row for key, row in side.items() if key[:2] in both} for side in every]
    return render.filled(
        "against.md.j2",
        summary=summaries[1],
        new=[told[key] for key in _once(told, change.new)],
        still=len(change.still),
        mended=[(then[key], key in change.failing) for key in _once(then, change.fixed)],
        moved=_moved(differences(*common)),
        versions=trend.version_changes(before, run),
        spent=[sum(part.seconds for part in found) for found in parts],
    )


def _once(found: Mapping[str, Finding], keys: Iterable[str]) -> list[str]:
    """The keys without those of findings that another of them tells."""
    told = {f.key for key in keys for f in found[key].also}
    return [key for key in keys if key not in told]


def _moved(found: Sequence[Difference]) -> list[list[str]]:
    """A line for each quantity of an implementation, dtype and direction, with the case that shows it most clearly."""

    def group(one: Difference) -> tuple[int, str, str, str]:
        row = one.after or one.before
        return MARKS.index(one.mark), one.implementation, row.dtype if row else "", one.quantity or ""

    out = []
    for (mark, who, dtype, quantity), its in itertools.groupby(sorted(found, key=group), group):
        first, *more = its
        sides = ["not run", "not run"]
        for n, row in enumerate((first.before, first.after)):
            if row is not None:
                sides[n] = wording.ratio(headroom(row)) if row.judged else row.verdict
        out.append([("worse", "better", "")[mark], who, dtype, quantity, *sides, f"{1 + len(more):,}", first.case])
    return out
