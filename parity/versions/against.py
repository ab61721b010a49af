"""A run beside one of another revision, as a comment on a pull request: what is new, mended, and moved."""

import itertools
from collections.abc import Sequence

import msgspec

from parity.errors import UsageError
from parity.results import memory, trend
from parity.results.header import Header
from parity.results.report import render, wording
from parity.results.report.findings import about_run, headroom
from parity.results.report.summary import summarise
from parity.results.row import Row
from parity.versions.row_diff import MARKS, Difference, Side, differences


def comment(base: tuple[Header, list[Row]], now: tuple[Header, list[Row]]) -> str:
    """Two results files, as they are read, as Markdown: findings that only `now` has, findings that only `base` had, and
    error ÷ allowed before and after where a quantity of a case of both moved (`parity.versions.row_diff`).

    Raises:
        UsageError: for runs of two profiles, or on two kinds of device, which have no cases in common.
    """
    summaries = [summarise(*one) for one in (base, now)]
    before, run = (memory.of(one, 0) for one in summaries)
    if (before.profile, before.device) != (run.profile, run.device):
        sides = [f"profile {one.profile} on {one.device}" for one in (before, run)]
        raise UsageError(f"--against: {sides[0]} and {sides[1]} cannot be compared")
    change = trend.change(run, [msgspec.structs.replace(before, id="base", started=min(before.started, run.started))])
    then, told = ({f.key: f for f in (*one.findings, *one.known)} for one in summaries)
    parts = [one[0].parts or [] for one in (base, now)]
    return render.filled(
        "against.md.j2",
        summary=summaries[1],
        new=[told[key] for key in change.new],
        still=len(change.still),
        mended=[(then[key], key in change.failing) for key in change.fixed],
        moved=_moved(differences(*_common(base[1], now[1]))),
        versions=trend.version_changes(before, run),
        spent=[sum(part.seconds for part in found) for found in parts],
        memory=[max((part.memory for part in found), default=0) for found in parts],
    )


def _common(before: Sequence[Row], after: Sequence[Row]) -> list[Side]:
    """The rows of the cases that both runs gave an implementation."""
    sides = [{(r.case, r.implementation, r.quantity): r for r in rows if not about_run(r)} for rows in (before, after)]
    both = set.intersection(*({key[:2] for key in side} for side in sides))
    return [{key: row for key, row in side.items() if key[:2] in both} for side in sides]


def _moved(found: Sequence[Difference]) -> list[list[str]]:
    """A line for each quantity of an implementation, dtype and direction, with the case that shows it most clearly."""

    def group(one: Difference) -> tuple[int, str, str, str]:
        row = one.after or one.before
        return MARKS.index(one.mark), one.implementation, row.dtype if row else "", one.quantity or ""

    out = []
    for (mark, who, dtype, quantity), its in itertools.groupby(sorted(found, key=group), group):
        first, *more = its
        sides = [_size(row) for row in (first.before, first.after)]
        out.append([("worse", "better", "")[mark], who, dtype, quantity, *sides, f"{1 + len(more):,}", first.case])
    return out


def _size(row: Row | None) -> str:
    return "not run" if row is None else wording.ratio(headroom(row)) if row.judged else row.verdict
