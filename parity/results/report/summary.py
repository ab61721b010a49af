"""The counts of a run, made once for all report formats."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from parity.errors import INTERRUPTED, TERMINATED
from parity.results.report import findings as found_in
from parity.results.report.findings import Finding, ImplementationCase, about_run, grouped, headroom, normalised, tier
from parity.results.report.stack import Stack
from parity.results.row import DECLINED, STOPPED, About, End, Header, Row

DTYPES = ("fp64", "fp32", "fp16", "bf16")
ABSENT = re.compile(r" has no parameter (.+)$")  # how `parity.implementations.user` says which parameters a case needs
LEFT_OUT = "left out: "  # how `parity.sampling.capabilities` begins to say that a slow function does not get a case
SEVERAL = 3
OTHER_LOSS = (
    "its loss is not the {family}'s in any of {count} cases. If it is meant to be another, no check of loss, gradient or metrics "
    "can judge it here; hold the function itself against your definition (docs/testing.md)"
)

Counts = collections.Counter[str]
"""Implementation-cases: `compared`, of which agree, known (all that fails is in the ledger), nondeterministic and disagree;
refused, unsupported, crashed, timed-out, out-of-memory."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One implementation x family x dtype x device. `worst` is the judged row of largest headroom; where something
    fails anew, the worst of its root quantities; known findings left out where anything else was judged. `known`:
    ledger ids of what it fails. `reason`: the commonest for what was not compared. `verdict`: where nothing was, the
    commoner of refused and unsupported."""

    implementation: str
    family: str
    dtype: str
    device: str
    counts: Counts
    worst: Row | None
    known: tuple[str, ...]
    verdict: str
    reason: str

    @property
    def new(self) -> bool:
        """Whether something fails that no ledger entry covers."""
        return self.verdict not in ("agree", "known", *DECLINED)

    @property
    def idle(self) -> bool:
        """Whether nothing was compared, and nothing crashed."""
        return not self.counts["compared"] and self.verdict not in STOPPED


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why implementation-cases were unsupported or refused, in how many, of which implementations."""

    verdict: str
    message: str
    count: int
    implementations: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Everything a report says. `incomplete`: how far a run came that did not finish; `ended`: whether it came to its end in
    order, if only because its time was over; `stack`: its libraries, and what the ledger knows of them; `findings`: new ones;
    `known`: those of the ledger; `notes`: what a reader must know of an implementation, such as where it was imported from."""

    run: str
    header: About
    incomplete: str
    ended: bool
    stack: Stack
    counts: Counts
    lines: tuple[Line, ...]
    findings: tuple[Finding, ...]
    known: tuple[Finding, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]

    @property
    def compared(self) -> Mapping[str, int]:
        """Device -> implementation-cases compared there."""
        out = Counts()
        for line in self.lines:
            out[line.device] += line.counts["compared"]
        return out

    @property
    def own(self) -> Mapping[str, Counts]:
        """The same for each of a user's functions and trainers."""
        out = collections.defaultdict[str, Counts](Counts)
        for line in self.lines:
            if ".py:" in line.implementation:
                out[line.implementation] += line.counts
        return out


def summarise(header: Header, rows: Iterable[Row]) -> Summary:
    """Count a run; `header` is the file's first row, `rows` all others (`rows.read` returns the two)."""
    rows = found_in.suggested(rows)
    everything = grouped(rows)
    cases = [c for c in everything if not about_run(c.first)]
    found = found_in.findings(everything)
    asked = header.header.asked.implementations if header.header.asked else ()
    trainers = any(c.first.family.endswith("-trainer") for c in cases)
    own = bool(asked) and not trainers and all(".py:" in name for name in asked)
    interrupted = (
        header.end.exit_code in (INTERRUPTED, TERMINATED) if isinstance(header.end, End) else header.interrupted is True
    )
    return Summary(
        run=header.run,
        header=header.header,
        incomplete=_incomplete(header, rows, interrupted),
        ended=not interrupted,
        stack=Stack({}, (), own=True) if own else Stack.of_run(header.header, found, {c.first.family for c in cases}),
        counts=_counted(cases),
        lines=tuple(_lines(everything)),
        findings=tuple(f for f in found if f.known is None),
        known=tuple(f for f in found if f.known is not None),
        reasons=tuple(_reasons(cases)),
        notes=tuple(_notes(everything, found, asked)),
    )


def _incomplete(header: Header, rows: Iterable[Row], interrupted: bool) -> str:
    how = "interrupted: " if interrupted else ""
    if isinstance(end := header.end, End):
        return "" if end.complete else f"{how}stopped after {end.cases:,} of {end.of:,} cases"
    if not interrupted:
        return ""
    plan = header.header.shards
    if not plan:
        return f"{how}the file ends before the run did, what came later is missing"
    done = {part.name: part.cases for part in header.parts or ()}
    begun = {(r.shard, r.case) for r in rows if r.shard in plan and r.shard not in done}
    count = sum(cases for name, cases in done.items() if name in plan) + len(begun)
    return f"{how}stopped after {count:,} of {sum(plan.values()):,} cases, the file ends before the run did"


def _counted(cases: Iterable[ImplementationCase]) -> Counts:
    """Each case in one outcome, a compared one in its verdict too."""
    out = Counts()
    for case in cases:
        out[case.outcome] += 1
        if case.outcome == "compared":
            out[_verdict(case.failing)] += 1
        elif case.failing and _verdict(case.failing) == "known":
            out[f"{case.outcome}, known"] += 1
    return out


def _verdict(failing: Sequence[Row]) -> str:
    """The verdict over failing rows, the gravest of the new ones first."""
    new = {r.verdict for r in failing if not r.known}
    for verdict in ("disagree", *STOPPED, "nondeterministic"):
        if verdict in new:
            return verdict
    return "known" if failing else "agree"


def worst(rows: Sequence[Row]) -> Row | None:
    """The row to name: of what fails anew the worst among the roots, else the largest headroom outside the ledger."""
    if new := [r for r in rows if r.new]:
        return max(new, key=lambda r: (-tier(r), headroom(r)))
    return max([r for r in rows if not r.known] or rows, key=headroom, default=None)


def _lines(everything: Iterable[ImplementationCase]) -> Iterable[Line]:
    """By family, references first, then implementation and dtype: the order of every table."""
    groups = collections.defaultdict[tuple[str, str, bool, str, int, str], list[ImplementationCase]](list)
    for case in everything:
        row = case.first
        place = DTYPES.index(row.dtype) if row.dtype in DTYPES else len(DTYPES)
        groups[row.family, row.device, row.role != "reference", row.implementation, place, row.dtype].append(case)
    for (family, device, _, implementation, _, dtype), found in sorted(groups.items()):
        cases = [c for c in found if not about_run(c.first)]
        failing = [r for c in found for r in c.failing]
        judged = [r for c in found for r in c.rows if r.judged]
        common = max(_reasons(cases), key=lambda r: r.count, default=None)
        verdict = _verdict(failing)
        if not failing and not judged:
            verdict = common.verdict if common else "unsupported"
        yield Line(
            *(implementation, family, dtype, device),
            counts=_counted(cases),
            worst=worst(judged),
            known=tuple(sorted({r.known for r in failing if r.known})),
            verdict=verdict,
            reason=common.message if common else "",
        )


def _reasons(cases: Iterable[ImplementationCase]) -> list[Reason]:
    """Why nothing was compared, the most frequent first; messages that differ in a number only are one reason."""
    groups = collections.defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for case in cases:
        if case.outcome in DECLINED:
            message = next((r.message for r in case.rows if r.verdict == case.outcome), "")
            message = ABSENT.sub(" has no parameter for what the case moves", message) or "no reason given"
            groups[case.outcome, normalised(message)].append((message, case.first.implementation))
    out = [Reason(k, v[0][0], len(v), tuple(sorted({who for _, who in v}))) for (k, _), v in groups.items()]
    return sorted(out, key=lambda r: (r.verdict != "unsupported", -r.count, r.message))


def _notes(cases: Sequence[ImplementationCase], found: Sequence[Finding], asked: Sequence[str]) -> Iterable[str]:
    rows = [row for case in cases for row in case.rows]
    unsupported = [case.first for case in cases if case.outcome == "unsupported"]
    for said, count in Counts(row.message for row in unsupported if row.blame == "harness").items():
        yield f"not compared, {count:,} times: {said}"
    for file in dict.fromkeys(row.imported_from for row in rows if row.imported_from):
        names = dict.fromkeys(row.implementation for row in rows if row.imported_from == file)
        yield f"imported from {file}, not from site-packages: {', '.join(names)}"
    for who in dict.fromkeys(row.implementation for row in rows if row.unjudged):
        yield not_judged(who, dict.fromkeys(name for row in rows if row.implementation == who for name in row.unjudged))
    losses = collections.defaultdict[tuple[str, str], list[Row]](list)  # of a user's trainer
    for row in rows:
        if row.quantity == "loss" and row.judged and ".py:" in row.implementation and row.family.endswith("-trainer"):
            losses[row.implementation, row.family].append(row)
    for (who, family), its in losses.items():
        if len(its) >= SEVERAL and all(row.failing for row in its):
            yield f"{who}: {OTHER_LOSS.format(family=family, count=len(its))}"
    needs = collections.defaultdict[str, Counts](Counts)
    slow = collections.defaultdict[str, list[str]](list)
    for row in unsupported:
        if absent := ABSENT.search(row.message):
            needs[row.implementation].update(absent[1].split(", "))
        if row.message.startswith(LEFT_OUT):
            slow[row.implementation].append(row.message.removeprefix(LEFT_OUT))
    for who, counted in needs.items():
        lacking = ", ".join(f"{name} ({count:,})" for name, count in counted.most_common(8))
        yield f"{who}: cases that need parameters which it has not: {lacking}"
    for who, why in slow.items():
        yield f"{who}: {len(why):,} cases {LEFT_OUT}{why[-1]}"
    if drawn := sum(f.known is None and f.minimised is False for f in found):
        more = "" if len(asked) == 1 else "; run one --implementation alone for more of them"
        yield f"{drawn:,} of the new findings are shown as drawn: a run makes only so many smaller{more}"


def not_judged(who: str, names: Iterable[str]) -> str:
    """What a user's function returned that no definition knows."""
    return f"{who} returned {', '.join(names)}: not judged, its family has no quantity of that name"
