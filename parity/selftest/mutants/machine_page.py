"""Mutants by machine as a page: what became of them by operator and by file, and every survivor with the reason."""

import collections
import statistics
from collections.abc import Callable, Iterable, Sequence

from parity.results.report import measured
from parity.selftest.mutants.laboratory import Mutated

FATES = ("crashed", "unreached", "equivalent", "killed", "survived")
HEADINGS = ("tried", "crash at once", "never run", "equivalent", "killed", "survived", "cases: median", "90 %", "most")
REASONS: dict[str, str] = {}
"""Edit, without its line -> why it survives."""


def markdown(found: Sequence[Mutated]) -> str:
    """Three tables: by operator, by file, the survivors."""
    by_file = _table("file", found, lambda m: m.edit.module)
    by_operator = _table("operator", found, lambda m: m.edit.operator)
    return "\n\n".join([summary(found), by_operator, by_file, _survivors(found)]).rstrip() + "\n"


def summary(found: Sequence[Mutated]) -> str:
    """How many of the wrong ones die."""
    killed, survived = (sum(m.fate == fate for m in found) for fate in ("killed", "survived"))
    share = measured.share(killed, max(killed + survived, 1))
    fast = sum(m.fate == "killed" and m.cases <= 100 for m in found)
    return (
        f"{len(found)} edits, {killed + survived} of them wrong: {killed} killed ({share}), "
        f"{fast} within 100 cases ({measured.share(fast, max(killed, 1))} of the killed)"
    )


def _table(name: str, found: Iterable[Mutated], key: Callable[[Mutated], str]) -> str:
    groups: dict[str, list[Mutated]] = collections.defaultdict(list)
    for mutated in found:
        groups[key(mutated)].append(mutated)
    return "\n".join(measured.table((name, *HEADINGS), (_row(n, groups[n]) for n in sorted(groups))))


def _row(name: str, of: Sequence[Mutated]) -> tuple[str, ...]:
    counts = collections.Counter(m.fate for m in of)
    cases = sorted(m.cases for m in of if m.fate == "killed")
    ends = (
        (f"{statistics.median(cases):g}", str(cases[int(0.9 * (len(cases) - 1))]), str(cases[-1]))
        if cases
        else ("",) * 3
    )
    return name, str(len(of)), *(str(counts[fate]) for fate in FATES), *ends


def _survivors(found: Iterable[Mutated]) -> str:
    rows = []
    for m in (m for m in found if m.fate == "survived"):
        name = f"{m.edit.module.rpartition('.')[2]}.{m.edit.function}: {m.edit.before} → {m.edit.after}"
        cells = (name, m.implementation, str(m.cases), measured.short(m.moved), REASONS.get(name, "not known"))
        rows.append([cell.replace("|", "\\|") for cell in cells])
    heads = ("survivor", "implementation", "cases", "largest change in float64", "why")
    return "\n".join(measured.table(heads, rows)) if rows else ""
