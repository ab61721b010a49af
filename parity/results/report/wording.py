"""The words that every renderer shares, so that terminal, Markdown, JUnit and HTML say the same thing."""

import collections
import contextlib
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET
from packaging.version import InvalidVersion, Version

from parity.judge.words import GATES, PROTOCOL
from parity.results.report.findings import Finding, headroom, other_path
from parity.results.report.summary import Counts, Line, Reason, Summary
from parity.results.row import DECLINED, NO_REFERENCE, STOPPED, UNKNOWN, Row

ENTRY = ("parameter", "sequence", "position", "token", "masked", "index", "value", "oracle", "error")
HEADINGS = {"token": "token id", "masked": "masked?", "oracle": "float64"}
CODES = {
    0: "nothing new disagrees",
    1: "something disagrees that no ledger entry covers",
    2: "the command was wrong",
    3: "nothing, or not enough, was compared",
    4: "a ledger entry no longer holds",
    70: "parity itself failed",
    130: "it was interrupted",
    143: "it was asked to end",
}
"""What an exit code says."""
PATHS = {"fused": "also fused", "fixed": "also with the fixes"}
"""Other paths of a trainer on which a finding shows."""


def count(n: int, noun: str, plural: str = "") -> str:
    """`1,234 cases`, `1 case`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {plural or noun + 's'}"


def ratio(value: float) -> str:
    """Error ÷ allowed; beyond 1,000 its size says nothing."""
    if math.isinf(value) or value > 1000:
        return "∞" if math.isinf(value) else ">1000"
    if value == 0:
        return "0"
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 100 else f"{value:.3g}"


def number(value: Any) -> str:
    """A value of a quantity; null means what was not finite or not there."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def counts(c: Counts) -> str:
    others = [f"{c[n]:,} {n}" for n in ("known", "nondeterministic", "disagree", *DECLINED) if c[n]]
    known = {n: c[f"{n}, known"] for n in STOPPED}
    others += [f"{c[n]:,} {n}" + (f" ({k:,} known)" if k else "") for n, k in known.items() if c[n]]
    return " · ".join([f"{c['compared']:,} compared", f"{c['agree']:,} agree", *others])


def headline(summary: Summary) -> str:
    """`4 high, 16 medium known defects, 0 new`: the opening of every report, behind the versions."""
    new = f"{len(summary.findings):,} new{' so far' if summary.incomplete else ''}"
    return new if summary.stack.own else f"{summary.stack.defects}, {new}"


def elsewhere(summary: Summary) -> str:
    """How many known defects a run of named families leaves out."""
    return f"{count(summary.stack.others, 'other known defect')}, not met and of other families: parity findings"


def opening(summary: Summary) -> str:
    """The headline behind the versions."""
    named = summary.stack.named
    return f"{named}: {headline(summary)}" if named else headline(summary)


def others(reasons: Sequence[str]) -> list[str]:
    """Reasons for an exit code that the findings do not tell."""
    return [r for r in reasons if "new failing row" not in r]


def verdict(summary: Summary, code: int) -> str:
    said = "the run did not come to its end" if code == 3 and summary.incomplete else CODES.get(code, "")
    return f"the run ended with {code}: {said}"


def compared(summary: Summary) -> str:
    """How many implementation-cases were compared on each kind of device; on a CUDA device nothing stands for another."""
    cpu, cuda = (f"{n:,}" if (n := summary.compared.get(device, 0)) else "none" for device in ("cpu", "cuda"))
    return f"{cpu} compared on CPU, {cuda} on CUDA"


def about(summary: Summary) -> str:
    """Profile, seed, device, revision and time of the run, as far as the header tells."""
    h = summary.header
    facts = {"run": summary.run, "profile": h.profile, "seed": h.seed, "device": h.device, "": h.device_name}
    facts |= {"driver": h.driver, "Triton": h.triton, "revision": h.git}
    parts = [f"{k} {v}".strip() for k, v in facts.items() if v not in (None, "")]
    parts += [] if h.seconds is UNSET else [f"{h.seconds:,} s"]
    return " · ".join(parts)


def versions(summary: Summary) -> str:
    return " · ".join(f"{k} {v}" for k, v in summary.header.versions.items())


def at(row: Row | None) -> str:
    """Quantity and gate; a gate that only repeats the quantity is left out."""
    if row is None:
        return ""
    quantity, gate = row.subject, row.gate
    return f"{quantity}, gate {gate}" if gate and gate not in quantity else quantity


def size(row: Row) -> str:
    """How wrong a quantity is: so many times the allowed error; or outright, where that has no size."""
    value = headroom(row)
    return f"{at(row)}: fails outright" if math.isinf(value) else f"{at(row)}: {ratio(value)} times the allowed error"


def verdict_of(line: Line) -> str:
    """The verdict of a line of the table, with the ledger ids it rests on, or why nothing was compared."""
    known = ", ".join(line.known)
    if line.verdict == "known":
        return f"known: {known}"
    if line.new:
        return line.verdict.upper() + (f"; known: {known}" if known else "")
    return f"{line.verdict}: {line.reason}" if line.verdict in DECLINED else line.verdict


def wrong(row: Row) -> str:
    """Who is wrong, as a clause."""
    name, against = row.implementation, row.against
    if row.variant:
        return f"{name} follows another definition: {row.variant}"
    ran = "ran this case" if row.verdict in STOPPED else "agrees with float64"
    trainer = row.family.endswith("-trainer")  # a trainer has a reference model, which is not what is meant
    reference = "the trainer as released" if trainer else f"the reference {against or ''}".rstrip()
    whose = {
        "candidate": f"the candidate {name}" + (f" ({reference} {ran})" if against else ""),
        "reference": reference if trainer else f"the reference {name}",
        "both": f"both the candidate {name} and {reference}",
        "harness": f"the harness, in its adapter for {name}",
    }
    if row.blame:
        return whose[row.blame]
    why = UNKNOWN + (row.message.partition(UNKNOWN)[2] or NO_REFERENCE) if row.verdict in STOPPED else "not decided"
    return f"{name}, or what calls it ({why})"


def title(finding: Finding) -> str:
    """What a finding is, without its size: class or verdict, and where."""
    if not finding.roots:
        return finding.verdict
    if finding.roots == ("protocol",):
        seldom = "nondeterministic " * (finding.verdict == "nondeterministic")
        return f"{seldom}protocol: {protocol(finding.lead)}"
    kind = "nondeterministic" if finding.verdict == "nondeterministic" else finding.lead.cls or finding.verdict
    return f"{kind} in {', '.join(finding.roots)}"


def spread(finding: Finding) -> str:
    """In how many cases and dtypes a finding shows, how wrong it is at worst, and what it costs of the gradient."""
    others = (PATHS[other_path(f.lead)] + f" ({f.cases:,})" * (f.cases < finding.cases) for f in finding.also)
    parts = [", ".join([count(finding.cases, "case"), *others]), " ".join(finding.dtypes)]
    if len(finding.classes) > 1:
        parts.append(", ".join(f"{k} in {v:,}" for k, v in sorted(finding.classes.items())))
    leads = [part.lead for part in finding.parts]
    blamed = collections.Counter("another definition" if r.variant else r.blame or "" for r in leads)
    if len(blamed) > 1:
        whose = sorted(blamed.items(), reverse=True)
        parts.append("wrong: " + ", ".join(f"{k or 'not known who'} in {v:,}" for k, v in whose))
    if finding.roots:
        parts.append(f"at worst {size(finding.worst)}")
    gradients = [r for r in finding.failing if r.subject.startswith("grad_") and r.gate != "structure"]
    if off := [r.dist / r.value_oracle for r in gradients if r.dist is not None and r.value_oracle]:
        more = f", at worst {_of_norm(max(off))}" if len(off) > 1 else ""
        parts.append(f"gradient off by {_of_norm(statistics.median(off))} of its norm{more}")
    return " · ".join(parts)


def _of_norm(share: float) -> str:
    if share >= 10:
        return f"{100 * share:.2g} %" if share < 100 else "> 10,000 %"
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


def library(implementation: str) -> str:
    """The first part of an id, `trl`; the file of a user's own."""
    return implementation.partition(":" if ".py:" in implementation else ".")[0]


def settings(values: Mapping[str, Any]) -> str:
    """Settings away from their default on one line, shapes first."""
    shapes = [k for k in "BTVH" if k in values]
    sizes = f"{'x'.join(shapes)} {'x'.join(str(values[k]) for k in shapes)}"
    rest = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items() if k not in shapes]
    return ", ".join([*([sizes] if shapes else []), *rest])


def sizes(row: Row) -> str:
    """Value against oracle and reference, and the two measures that people ask for first."""
    finite = " of the finite entries" if row.gate == "structure" else ""
    tolerance = f"atol {row.atol or 0:.2g}, rtol {row.rtol or 0:.2g}"
    said = {
        f"value {number(row.value)} · float64": number(row.value_oracle),
        "reference": row.value_reference,
        f"max |error|{finite}": row.max_abs,
        "torch.dist": row.dist,
        "torch.allclose": None if row.allclose is None else f"{row.allclose} at {tolerance}",
    }
    return " · ".join(f"{name} {number(value)}" for name, value in said.items() if value is not None)


def reason(r: Reason) -> str:
    """Why some cases were not compared, how many, and of which implementations, by name where they are few."""
    names = r.implementations
    whose = ", ".join(names) if len(names) <= 3 else f"{len(names)} implementations"
    return f"{r.verdict}, {count(r.count, 'case')}: {r.message} ({whose})"


def bisection(package: str, good: str, bad: str, case: str, implementation: str, verdict: str = "") -> str:
    """The command that finds the release which made a case of an implementation wrong; a newer `good` one repaired it."""
    words = ["parity", "bisect", package, "--good", good, "--bad", bad]
    with contextlib.suppress(InvalidVersion):
        words += ["--find", "fixed"] if Version(bad) < Version(good) else []
    words += ["--failure", verdict] if verdict in STOPPED else []
    return shlex.join([*words, "--case", case, "--implementation", implementation])


def hints(rows: Sequence[Row], lead: Row) -> list[str]:
    """The messages of everything that fails, the lead's first, each under the quantity it is about."""
    failing = [lead, *(r for r in rows if r is not lead and r.failing)]
    return list(dict.fromkeys(f"{r.quantity}: {r.message}" if r.quantity else r.message for r in failing if r.message))


def gates(rows: Sequence[Row]) -> list[list[str]]:
    """A table of error ÷ allowed: a line for each quantity, a column for each gate."""
    names = list(dict.fromkeys(gate for row in rows for gate in row.gates))

    def cell(row: Row, gate: str) -> str:
        found = row.gates.get(gate, 0.0)
        return "" if gate not in row.gates else ratio(math.inf if found is None else found)

    return [["quantity", "verdict", *names], *([r.subject, r.verdict, *(cell(r, g) for g in names)] for r in rows)]


def failed(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The gates that something failed, and what they look at."""
    of = {g: r for r in rows for g, value in r.gates.items() if value is None or value > 1}
    return [(g, protocol(r) if g == "protocol" else GATES[g]) for g, r in of.items() if g in GATES]


def protocol(row: Row) -> str:
    """What does not hold of the protocol, of a row about it."""
    found = dict.fromkeys(said for words, said in PROTOCOL.items() if words in row.message)
    return "; ".join(found) or GATES["protocol"]


def entries(lead: Row) -> list[list[str]]:
    """A table of the worst entries of a row; where sequence and position are known they stand for the index."""
    names = [k for k in ENTRY if any(k in e for e in lead.worst)]
    if "sequence" in names and "index" in names:
        names.remove("index")

    def cell(entry: Mapping[str, Any], name: str) -> str:
        value = entry.get(name, "")
        if name == "masked" and value != "":
            return "yes" if value else "no"
        if name in ("index", "parameter"):
            return str(value)
        return "not finite" if value is None else number(value)

    return [[HEADINGS.get(k, k) for k in names], *([cell(e, k) for k in names] for e in lead.worst)]
