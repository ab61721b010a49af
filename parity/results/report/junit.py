"""JUnit XML: one test case per implementation, dtype and quantity.

Not one per drawn case: those have new names in every run, and a CI viewer's history, flakiness and duration columns
live on names that stay. A test case "runs" carries what never came to a judgement.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

from msgspec import UNSET

from parity.results.report import wording
from parity.results.report.failure import text_of
from parity.results.report.findings import Finding
from parity.results.report.outcomes import headroom
from parity.results.report.summary import Line, Summary, Tally
from parity.results.row import STOPPED

_ILLEGAL = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
RUNS = "runs"


def write(summary: Summary, path: str | Path) -> None:
    """Write the XML file."""
    Path(path).write_bytes(render(summary))


def render(summary: Summary) -> bytes:
    """The XML: a suite per family; new findings fail (or are errors, where nothing was judged), the rest is skipped."""
    root = ET.Element("testsuites", name="parity")
    if summary.header.seconds is not UNSET:
        root.set("time", str(summary.header.seconds))
    for family in dict.fromkeys(line.family for line in summary.lines):
        suite = ET.SubElement(root, "testsuite", name=f"parity.{family}")
        _properties(suite, summary)
        for line in summary.lines:
            if line.family == family:
                _runs(suite, line, summary)
                for tally in line.tallies:
                    _quantity(suite, line, tally, summary)
        _totals(suite)
    if summary.incomplete:  # else a viewer shows what there is as green
        suite = ET.SubElement(root, "testsuite", name="parity.run")
        error = ET.SubElement(ET.SubElement(suite, "testcase", classname="parity", name="run", time="0"), "error")
        error.set("message", _legal(summary.incomplete))
        _totals(suite)
    _totals(root)
    ET.indent(root)
    xml: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"


def _testcase(suite: ET.Element, entry: Line, name: str) -> ET.Element:
    # Viewers split a class name at its dots into a tree: family, library, function.
    classname = _legal(f"{entry.family}.{entry.implementation}")
    return ET.SubElement(
        suite, "testcase", classname=classname, name=f"{name} [{entry.dtype}, {entry.device}]", time="0"
    )


def _runs(suite: ET.Element, line: Line, summary: Summary) -> None:
    """Whether it ran at all: error for a crash, skipped where nothing was compared."""
    case = _testcase(suite, line, RUNS)
    concerned = [f for f in _findings(summary.findings, line, None) if f.verdict in STOPPED]
    known = [f for f in _findings(summary.known, line, None) if f.verdict in STOPPED]
    if concerned:
        _failed(case, "error", concerned)
    elif not line.counts.compared:
        _skipped(case, f"known: {known[0].known}" if known else f"{line.verdict}: {line.reason}")
    c = line.counts
    left_out = f"; commonest reason: {line.reason}" if line.reason else ""
    _text(case, "system-out", " · ".join(wording.counts(c)) + left_out)


def _quantity(suite: ET.Element, line: Line, tally: Tally, summary: Summary) -> None:
    case = _testcase(suite, line, tally.quantity)
    if tally.verdict == "known":
        _skipped(case, "known: " + ", ".join(tally.known))
    elif tally.verdict != "agree":
        _failed(case, "failure", _findings(summary.findings, line, tally.quantity))
    message = (
        f"worst headroom {wording.ratio(headroom(tally.worst))} at {wording.at(tally.worst)} in {tally.judged} cases"
    )
    known = f"; known: {', '.join(tally.known)}" if tally.known and tally.verdict != "known" else ""
    _text(case, "system-out", message + known)


def _findings(found: Iterable[Finding], entry: Line, quantity: str | None) -> list[Finding]:
    wanted = entry.dtype, entry.device, quantity
    return [
        f
        for f in found
        if f.implementation == entry.implementation and f.family == entry.family and wanted in f.failing
    ]


def _failed(case: ET.Element, tag: str, found: list[Finding]) -> None:
    messages = [f"{wording.title(f)}: {wording.wrong(f.lead)} ({wording.spread(f)})" for f in found]
    kinds = [f.verdict if f.verdict in (*STOPPED, "nondeterministic") else wording.cls(f.lead) for f in found]
    element = ET.SubElement(case, tag, message=_legal("; ".join(messages)), type=", ".join(dict.fromkeys(kinds)))
    element.text = _legal("\n".join(text_of(f.rows) for f in found))


def _skipped(case: ET.Element, message: str) -> None:
    ET.SubElement(case, "skipped", message=_legal(message))


def _text(case: ET.Element, tag: str, text: str) -> None:
    ET.SubElement(case, tag).text = _legal(text)


def _properties(suite: ET.Element, summary: Summary) -> None:
    properties = {
        "run": summary.run,
        "about": wording.about(summary),
        "counts": " · ".join(wording.counts(summary.counts)),
    }
    properties |= {f"version {k}": str(v) for k, v in summary.header.versions.items()}
    holder = ET.SubElement(suite, "properties")
    for name, value in properties.items():
        ET.SubElement(holder, "property", name=_legal(name), value=_legal(value))


def _totals(element: ET.Element) -> None:
    element.set("tests", str(len(element.findall(".//testcase"))))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(len(element.findall(f".//testcase/{tag}"))))


def _legal(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold, escaped or not: a message may carry an ANSI escape."""
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
