"""The counts of a run, made once for all report formats."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from parity.results.header import About, End, Header
from parity.results.report.coverage import Coverage, Openings, Reason, coverage, openings, reasons, shared
from parity.results.report.findings import Finding, findings, tier
from parity.results.report.matrix import Grid, Lines, StepOne, errors, grids, step_one
from parity.results.report.outcomes import ImplementationCase, about_run, grouped, headroom
from parity.results.row import STOPPED, Row


@dataclasses.dataclass(frozen=True)
class Counts:
    """Implementation-cases by verdict; each is in exactly one of the first six.

    `compared` is divided once more: agree, known (every failing row is in the ledger), nondeterministic, disagree.
    """

    compared: int = 0
    refused: int = 0
    unsupported: int = 0
    crashed: int = 0
    timed_out: int = 0
    out_of_memory: int = 0
    agree: int = 0
    known: int = 0
    nondeterministic: int = 0
    disagree: int = 0

    @property
    def total(self) -> int:
        """All implementation-cases."""
        return self.compared + self.refused + self.unsupported + self.crashed + self.timed_out + self.out_of_memory


@dataclasses.dataclass(frozen=True)
class Tally:
    """One quantity of a line: in how many cases it was judged, its worst row, and the verdict over all of them."""

    quantity: str
    judged: int
    failing: int
    worst: Row
    known: tuple[str, ...]
    verdict: str


@dataclasses.dataclass(frozen=True)
class Line:
    """One implementation x family x dtype x device.

    Attributes:
        implementation: its id.
        family: of the loss.
        dtype: of the parameters under test.
        device: it ran on.
        role: reference or candidate.
        counts: of its implementation-cases.
        worst: the judged row of largest headroom, or None; where something fails anew, the worst of its root
            quantities; known findings left out where anything else was judged.
        known: ledger ids of what it fails.
        verdict: disagree, crashed, timed-out, out-of-memory, nondeterministic, known, agree, or the commoner of refused
            and unsupported where nothing was compared.
        reason: the commonest reason for what was not compared, or "".
        tallies: the same, by quantity.
    """

    implementation: str
    family: str
    dtype: str
    device: str
    role: str
    counts: Counts
    worst: Row | None
    known: tuple[str, ...]
    verdict: str
    reason: str
    tallies: tuple[Tally, ...] = ()


@dataclasses.dataclass(frozen=True)
class Summary:
    """Everything a report says.

    Attributes:
        run: id of the run.
        header: what the header row carries under "header".
        incomplete: how far a run came that did not finish; empty for one that did.
        ended: whether it came to its end in order, if only because its time was over.
        counts: of all implementation-cases.
        compared: device -> implementation-cases compared there.
        lines: the table, by family, implementation and dtype.
        findings: new ones.
        known: findings that the ledger has.
        coverage: of each family.
        takers: implementation -> the coverage of its own cases, where some were compared.
        reasons: for what was unsupported or refused.
        undecided: entries that no gate judged, because rounding alone decides about them or a replica overflows.
        unjudged: user's functions -> what they returned that no definition knows.
        imported: implementations -> the file that their library was imported from, where not in site-packages.
        grids: headroom by implementation, loss and dtype, for each family.
        step_one: first steps of real trainers.
        errors: of each candidate beside the reference's, by family.
        openings: of each user's function, the parameters that it lacks.
    """

    run: str
    header: About
    incomplete: str
    ended: bool
    counts: Counts
    compared: Mapping[str, int]
    lines: tuple[Line, ...]
    findings: tuple[Finding, ...]
    known: tuple[Finding, ...]
    coverage: tuple[Coverage, ...]
    takers: Mapping[str, Coverage]
    reasons: tuple[Reason, ...]
    undecided: int
    grids: tuple[Grid, ...]
    step_one: tuple[StepOne, ...]
    errors: tuple[tuple[str, list[str], Lines], ...]
    unjudged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    imported: tuple[tuple[str, str], ...] = ()
    openings: tuple[Openings, ...] = ()


DTYPES = ("fp64", "fp32", "fp16", "bf16")


def interrupted(header: Header) -> bool:
    """Whether a run was stopped, or killed, before it could end in order."""
    return header.end.exit_code in (130, 143) if isinstance(header.end, End) else header.interrupted is True


def _incomplete(header: Header, rows: Iterable[Row]) -> str:
    if isinstance(end := header.end, End):
        how = "interrupted: " if interrupted(header) else ""
        return "" if end.complete else f"{how}stopped after {end.cases:,} of {end.of:,} cases"
    if header.interrupted is not True:
        return ""
    plan = header.header.shards
    if not plan:
        return "interrupted: the file ends before the run did, what came later is missing"
    done = {part.name: part.cases for part in header.parts or ()}
    begun = {(r.shard, r.case) for r in rows if r.shard in plan and r.shard not in done}
    count = sum(cases for name, cases in done.items() if name in plan) + len(begun)
    return f"interrupted: stopped after {count:,} of {sum(plan.values()):,} cases, the file ends before the run did"


def summarise(header: Header, rows: Iterable[Row]) -> Summary:
    """Count a run; `header` is the file's first row, `rows` all others (`rows.read` returns the two)."""
    everything = grouped(rows)
    cases = [c for c in everything if not about_run(c.rows[0])]
    ordered = sorted(cases, key=_where)
    found = findings(everything)
    dimensions = header.header.dimensions or {}
    families = list(dict.fromkeys([c.family for c in cases]))
    takers = _takers(cases, dimensions, {i: p for part in header.parts or () for i, p in part.apart.items()})
    return Summary(
        run=header.run,
        header=header.header,
        incomplete=_incomplete(header, rows),
        ended=not interrupted(header),
        counts=_counts(cases),
        compared=collections.Counter(c.device for c in cases if c.outcome == "compared"),
        lines=tuple(_lines(everything)),
        findings=tuple(f for f in found if f.known is None),
        known=tuple(f for f in found if f.known is not None),
        coverage=tuple(
            coverage(
                f,
                [c for c in cases if c.family == f],
                dimensions.get(f, {}),
                shared(own for own in takers.values() if own.family == f),
            )
            for f in families
        ),
        takers=takers,
        reasons=tuple(reasons(cases)),
        undecided=sum(r.undecided for c in cases for r in c.judged),
        unjudged=_unjudged(cases),
        openings=tuple(openings(cases)),
        imported=tuple({(r.imported_from, r.implementation): 0 for c in everything for r in c.rows if r.imported_from}),
        grids=tuple(grids(ordered, dimensions, DTYPES)),
        step_one=tuple(step_one(ordered)),
        errors=tuple(errors(cases, DTYPES)),
    )


def _takers(
    cases: Iterable[ImplementationCase],
    dimensions: Mapping[str, Mapping[str, object]],
    apart: Mapping[str, Sequence[tuple[str, str, str]]],
) -> dict[str, Coverage]:
    own: dict[str, list[ImplementationCase]] = collections.defaultdict(list)
    for case in cases:
        own[case.implementation].append(case)
    seen = {
        name: coverage(found[0].family, found, dimensions.get(found[0].family, {}), apart.get(name, ()))
        for name, found in own.items()
    }
    return {name: one for name, one in seen.items() if one.compared}


def _unjudged(cases: Iterable[ImplementationCase]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found: dict[str, dict[str, None]] = {}
    for row in (r for c in cases for r in c.rows if r.unjudged):
        found.setdefault(row.implementation, {}).update(dict.fromkeys(row.unjudged))
    return tuple((who, tuple(names)) for who, names in found.items())


def _counts(cases: Iterable[ImplementationCase]) -> Counts:
    counter = collections.Counter(c.outcome.replace("-", "_") for c in cases)
    judged = collections.Counter(_verdict(c.failing) for c in cases if c.outcome == "compared")
    return Counts(**counter, **judged)


def _verdict(failing: Sequence[Row]) -> str:
    """The verdict over failing rows, the gravest of the new ones first."""
    new = {r.verdict for r in failing if not r.known}
    for verdict in ("disagree", *STOPPED, "nondeterministic"):
        if verdict in new:
            return verdict
    return "known" if failing else "agree"


def _known(failing: Iterable[Row]) -> tuple[str, ...]:
    return tuple(sorted({r.known for r in failing if r.known}))


def _worst(rows: Sequence[Row]) -> Row | None:
    """The row to name: of what fails anew the worst among the roots, else the largest headroom outside the ledger."""
    new = [r for r in rows if r.new]
    if new:
        return max(new, key=lambda r: (-tier(r), headroom(r)))
    return max([r for r in rows if not r.known] or rows, key=headroom, default=None)


def _where(case: ImplementationCase) -> tuple[str, str, int, str, str]:
    """Family, references first, then implementation and dtype: the order of every table."""
    dtype = f"{DTYPES.index(case.dtype) if case.dtype in DTYPES else 9}{case.dtype}"
    return case.family, case.device, int(case.rows[0].role != "reference"), case.implementation, dtype


def _lines(everything: Iterable[ImplementationCase]) -> list[Line]:
    groups: dict[tuple[str, str, int, str, str], list[ImplementationCase]] = collections.defaultdict(list)
    for case in everything:
        groups[_where(case)].append(case)
    out = []
    for _, found in sorted(groups.items()):
        first = found[0]
        cases = [c for c in found if not about_run(c.rows[0])]
        failing = [r for c in found for r in c.failing]
        judged = [r for c in found for r in c.judged]
        counted = reasons(cases)
        verdict = _verdict(failing)
        if not failing and not judged:
            verdict = max(counted, key=lambda r: r.count).verdict if counted else "unsupported"
        out.append(
            Line(
                implementation=first.implementation,
                family=first.family,
                dtype=first.dtype,
                device=first.device,
                role=first.rows[0].role,
                counts=_counts(cases),
                worst=_worst(judged),
                known=_known(failing),
                verdict=verdict,
                reason=max(counted, key=lambda r: r.count).message if counted else "",
                tallies=tuple(_tallies(judged)),
            )
        )
    return out


def _tallies(judged: Iterable[Row]) -> Iterator[Tally]:
    by_quantity: dict[str, list[Row]] = collections.defaultdict(list)
    for row in judged:
        by_quantity[row.subject].append(row)
    for quantity, rows in by_quantity.items():
        failing, worst = [r for r in rows if r.failing], _worst(rows)
        assert worst is not None
        yield Tally(quantity, len(rows), len(failing), worst, _known(failing), _verdict(failing))
