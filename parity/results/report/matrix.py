"""Tables over a whole run: headroom by implementation, loss and dtype; KL at step 1; errors beside the reference's."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parity.results.report import measured
from parity.results.report.accuracy import decided, error, kind_of
from parity.results.report.outcomes import ImplementationCase, about_run, headroom
from parity.results.row import STOPPED, Row

LOSS = ("loss_type", "check")
"""Settings that name which loss of a family, or which check of a trainer, a case is about."""
STEPS = ((0.25, "h0"), (0.5, "h1"), (0.75, "h2"), (1.0, "h3"))
"""Headroom up to which a cell has a colour."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one implementation came to on one loss in one dtype: its text, its colour, and what to say of it."""

    text: str
    style: str
    hint: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of a grid; `cells` as its columns, None where nothing was compared; `dtype` is "" where columns are dtypes."""

    implementation: str
    dtype: str
    device: str
    cells: tuple[Cell | None, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Headroom of one family: losses across, implementation and dtype downwards; of a single loss dtypes across."""

    family: str
    columns: tuple[str, ...]
    rows: tuple[Entry, ...]

    @property
    def by_dtype(self) -> bool:
        """Whether a row is one dtype."""
        return any(row.dtype for row in self.rows)


@dataclasses.dataclass(frozen=True)
class StepOne:
    """The first step of a real trainer, whose policy is still its reference."""

    implementation: str
    settings: str
    kl: float | None
    log_ratio: float | None
    headroom: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Errors:
    """‖value - oracle‖ ÷ ‖oracle‖ of a candidate and of the reference on the same cases, as "median (worst)"."""

    ours: str
    peer: str
    farther: bool


def loss_of(row: Row, defaults: Mapping[str, Any]) -> str:
    """The loss or check that a case is about; its family where that has only one."""
    for name in LOSS:
        if name in defaults or name in row.settings:
            return str(row.settings.get(name, defaults.get(name)))
    return row.family


def grids(
    cases: Sequence[ImplementationCase], dimensions: Mapping[str, Mapping[str, Any]], order: Sequence[str]
) -> list[Grid]:
    """A grid for each family, in the order of `cases`, dtypes in `order`; what compared nothing has no row."""
    of: dict[str, list[tuple[ImplementationCase, str]]] = {}
    for case in cases:
        if case.outcome == "compared" or case.outcome in STOPPED:
            of.setdefault(case.family, []).append((case, loss_of(case.rows[0], dimensions.get(case.family, {}))))
    out = []
    for family, found in of.items():
        single = len({loss for _, loss in found}) == 1
        columns = tuple(_sorted({c.dtype for c, _ in found}, order) if single else sorted({x for _, x in found}))
        rows: dict[tuple[str, str, str], dict[str, list[ImplementationCase]]] = {}
        for case, loss in found:
            key = case.implementation, "" if single else case.dtype, case.device
            rows.setdefault(key, defaultdict(list))[case.dtype if single else loss].append(case)
        entries = (Entry(*k, tuple(_cell(v[c]) if c in v else None for c in columns)) for k, v in rows.items())
        out.append(Grid(family, columns, tuple(entries)))
    return out


def _sorted(dtypes: Iterable[str], order: Sequence[str]) -> list[str]:
    return sorted(dtypes, key=lambda d: (order.index(d) if d in order else len(order), d))


def _cell(cases: Sequence[ImplementationCase]) -> Cell:
    """What fails anew before what is known, and what is known apart from how tight the rest is."""
    judged = [r for c in cases for r in (*c.judged, *c.failing)]
    new = [r for r in judged if r.new]
    known = sorted({r.known for r in judged if r.known})
    worst = max(new or [r for r in judged if not r.known] or judged, key=headroom)
    value = headroom(worst)
    style = "hnew" if new else "hk" if worst.known else next((s for most, s in STEPS if value <= most), "h3")
    text = worst.verdict if worst.verdict in STOPPED else _size(value)
    hint = f"{len(cases):,} cases; worst {worst.subject}" + (f"; known: {', '.join(known)}" if known else "")
    return Cell(text, f"{style} also" if known and style != "hk" else style, hint)


def _size(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return ">1000" if value > 1000 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def step_one(cases: Iterable[ImplementationCase]) -> list[StepOne]:
    """The cases of the check step-one, in their order."""
    out = []
    for case in cases:
        rows = {r.subject: r for r in case.judged}
        settings = case.rows[0].settings
        if settings.get("check") != "step-one" or not rows:
            continue
        verdict = "agree" if not case.failing else "known" if all(r.known for r in case.failing) else "disagree"
        label = ", ".join(f"{k}={v}" for k, v in settings.items() if k not in ("check", "B", "T", "V", "H"))
        kl, log_ratio = (rows[q].value if q in rows else None for q in ("kl", "log_ratio"))
        size = max(map(headroom, rows.values()))
        out.append(StepOne(case.implementation, label, kl, log_ratio, size, verdict))
    return out


Lines = list[tuple[str, str, list[Errors | None]]]


def errors(cases: Iterable[ImplementationCase], order: Sequence[str]) -> list[tuple[str, list[str], Lines]]:
    """Family, its dtypes, and for each candidate and kind of quantity its errors beside the reference's, by dtype."""
    together: dict[tuple[str, str, str, str], dict[str, Row]] = defaultdict(dict)
    for case in cases:
        if not about_run(case.rows[0]):
            for row in (r for r in decided(case.rows) if r.dist is not None or r.value is None):
                together[row.family, row.case, row.subject, row.device][row.implementation] = row
    pairs: dict[str, dict[tuple[str, str], dict[str, list[tuple[float, float]]]]] = {}
    for (family, *_), rows in together.items():
        reference = next((r for r in rows.values() if r.role == "reference"), None)
        for row in rows.values() if reference else ():
            if row.role != "reference" and reference is not None:
                of = pairs.setdefault(family, {}).setdefault((row.implementation, kind_of(row)), defaultdict(list))
                of[row.dtype].append((error(row), error(reference)))
    out = []
    for family, lines in sorted(pairs.items()):
        dtypes = _sorted({d for by in lines.values() for d in by}, order)
        cells = [(name, kind, [_errors(by.get(d, ())) for d in dtypes]) for (name, kind), by in sorted(lines.items())]
        out.append((family, dtypes, cells))
    return out


def _errors(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    if not pairs:
        return None
    ours, peer = ([pair[side] for pair in pairs] for side in (0, 1))
    middle = statistics.median(ours), statistics.median(peer)
    texts = [f"{measured.short(m)} ({measured.short(max(side))})" for m, side in zip(middle, (ours, peer), strict=True)]
    return Errors(texts[0], texts[1], middle[0] > 2 * middle[1] and middle[0] > 0)
