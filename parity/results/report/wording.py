"""The words that every renderer shares, so that terminal, Markdown, JUnit and HTML say the same thing."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from parity.results.report.findings import Finding, headroom
from parity.results.report.measured import share
from parity.results.report.summary import Counts, Coverage, Line, Reason, Summary
from parity.results.row import DECLINED, NO_REFERENCE, STOPPED, UNKNOWN, Row

ENTRY = ("parameter", "sequence", "position", "token", "masked", "index", "value", "oracle", "error")
HEADINGS = {"token": "token id", "masked": "masked?", "oracle": "float64"}


def count(n: int, noun: str, plural: str = "") -> str:
    """`1,234 cases`, `1 case`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {plural or noun + 's'}"


def ratio(value: float) -> str:
    """A headroom; beyond 1,000 its size says nothing."""
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
    """What was compared, what became of it, and what was not compared."""
    said = [f"{c['compared']:,} compared", f"{c['agree']:,} agree"]
    for name in ("known", "nondeterministic", "disagree", *DECLINED, *STOPPED):
        said += [f"{c[name]:,} {name}"] if c[name] else []
    return " · ".join(said)


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


def headline(summary: Summary) -> str:
    """`NEW none · KNOWN 14`: the opening of every report."""
    so_far = " so far" if summary.incomplete else ""
    return f"NEW {len(summary.findings) or 'none'}{so_far} · KNOWN {len(summary.known) or 'none'}"


def others(reasons: Sequence[str]) -> list[str]:
    """Reasons for an exit code that the findings do not tell."""
    return [r for r in reasons if "new failing row" not in r]


def verdict(summary: Summary, code: int) -> str:
    """The exit code of the run and what it says."""
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
    facts |= {"driver": h.driver, "float32 matmul": h.float32_matmul_precision, "Triton": h.triton, "revision": h.git}
    parts = [f"{k} {v}".strip() for k, v in facts.items() if v not in (None, "")]
    parts += [] if h.seconds is UNSET else [f"{h.seconds:,} s"]
    if h.rollouts and any(line.family == "policy" for line in summary.lines):
        parts.append(f"importance ratios generated, and from {'; '.join(h.rollouts)}")
    return " · ".join(parts)


def versions(summary: Summary) -> str:
    """The versions that the header tells."""
    return " · ".join(f"{k} {v}" for k, v in summary.header.versions.items())


def at(row: Row | None) -> str:
    """Quantity and gate; a gate that only repeats the quantity is left out."""
    if row is None:
        return ""
    quantity, gate = row.subject, row.gate
    return f"{quantity} {gate}" if gate and gate not in quantity else quantity


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
    blame = row.blame
    if row.variant:
        return f"nobody: {name} follows another definition, {row.variant!r}"
    if blame == "candidate":
        ran = "ran this case" if row.verdict in STOPPED else "agrees with float64"
        return f"the candidate {name}" + (f" (the reference {against} {ran})" if against else "")
    if blame == "reference":
        return f"the reference {name}"
    if blame == "both":
        return f"both the candidate {name} and the reference {against or ''}".rstrip()
    if blame == "harness":
        return f"the harness, in its adapter for {name}"
    why = UNKNOWN + (row.message.partition(UNKNOWN)[2] or NO_REFERENCE) if row.verdict in STOPPED else "not decided"
    return f"{name}, or what calls it ({why})"


def title(finding: Finding) -> str:
    """What a finding is, without its size: class or verdict, and where."""
    where = ", ".join(finding.roots)
    if not finding.roots:
        return finding.verdict
    kind = "nondeterministic" if finding.verdict == "nondeterministic" else cls(finding.lead)
    return f"{kind} in {where}"


def cls(row: Row) -> str:
    """The class of a failing row, or its verdict where nothing was judged."""
    return str(row.cls or row.verdict)


def spread(finding: Finding) -> str:
    """In how many cases and dtypes a finding shows, its worst headroom, and what it costs of the gradient."""
    parts = [count(finding.cases, "case"), " ".join(finding.dtypes)]
    if len(finding.classes) > 1:
        parts.append(", ".join(f"{k} in {v:,}" for k, v in sorted(finding.classes.items())))
    if len(finding.blames) > 1:
        parts.append(
            "wrong: " + ", ".join(f"{k or 'not known who'} in {v:,}" for k, v in sorted(finding.blames.items())[::-1])
        )
    if finding.roots:
        parts.append(f"worst headroom {ratio(headroom(finding.worst))} at {at(finding.worst)}")
    if finding.off:
        median, worst = statistics.median(finding.off), finding.off[-1]
        more = f", at worst {_of_norm(worst)}" if len(finding.off) > 1 else ""
        parts.append(f"gradient off by {_of_norm(median)} of its norm{more}")
    return " · ".join(parts)


def _of_norm(share: float) -> str:
    if share >= 10:
        return f"{100 * share:.2g} %" if share < 100 else "> 10,000 %"
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


def settings(values: Mapping[str, Any]) -> str:
    """Settings away from their default on one line, shapes first."""
    shapes = "x".join(str(values[k]) for k in "BTVH" if k in values)
    names = "x".join(k for k in "BTVH" if k in values)
    rest = [
        f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items() if k not in ("B", "T", "V", "H")
    ]
    return ", ".join(([f"{names} {shapes}"] if shapes else []) + rest)


def sizes(row: Row) -> str:
    """Value against oracle and reference, and the two measures that people ask for first."""
    parts = [f"value {number(row.value)}", f"float64 {number(row.value_oracle)}"]
    if row.value_reference is not None:
        parts.append(f"reference {number(row.value_reference)}")
    if row.max_abs is not None:
        finite = " of the finite entries" if row.gate == "structure" else ""
        parts.append(f"max |error|{finite} {number(row.max_abs)}")
    if row.dist is not None:
        parts.append(f"torch.dist {number(row.dist)}")
    if row.allclose is not None:
        tolerance = f"atol {row.atol or 0:.2g}, rtol {row.rtol or 0:.2g}"
        parts.append(f"torch.allclose {row.allclose} at {tolerance}")
    return " · ".join(parts)


def reason(r: Reason) -> str:
    """Why some cases were not compared, their share, and of which implementations, by name where they are few."""
    names = r.implementations
    whose = ", ".join(names) if len(names) <= 3 else f"{len(names)} implementations"
    return f"{r.verdict}, {r.share}: {r.message} ({whose})"


def coverage(c: Coverage) -> str:
    """Which settings a family's comparisons had away from their default, and which never."""
    met = ", ".join(f"{name} {share(count, c.compared)}" for name, count in c.settings.items() if count)
    never = ", ".join(c.never) or "none"
    return f"{c.family}: {c.compared:,} compared; away from the default: {met or 'nothing'}; never: {never}"


def gates(rows: Sequence[Row]) -> list[str]:
    """The gates that judged some of these rows, in their order."""
    return list(dict.fromkeys(gate for row in rows for gate in row.gates))


def hints(rows: Sequence[Row], lead: Row) -> list[str]:
    """The messages of everything that fails, the lead's first, each under the quantity it is about."""
    failing = [lead, *(r for r in rows if r is not lead and r.failing)]
    messages = [f"{r.quantity}: {r.message}" if r.quantity else r.message for r in failing if r.message]
    return list(dict.fromkeys(messages))


def entries(lead: Row) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the worst entries of a row; where sequence and position are known they stand for the index."""
    names = [k for k in ENTRY if any(k in e for e in lead.worst)]
    if "sequence" in names and "index" in names:
        names.remove("index")
    return [HEADINGS.get(k, k) for k in names], [[_cell(e, k) for k in names] for e in lead.worst]


def _cell(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name, "")
    if name == "masked" and value != "":
        return "yes" if value else "no"
    if name in ("index", "parameter"):
        return str(value)
    return "not finite" if value is None else number(value)
