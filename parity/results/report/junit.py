"""JUnit XML: one test case per implementation, dtype and device.

Not one per drawn case: those have new names in every run, and a CI viewer's history, flakiness and duration columns
live on names that stay.
"""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

from msgspec import UNSET

from parity.results.report import wording
from parity.results.report.failure import text_of
from parity.results.report.summary import Line, Summary
from parity.results.row import STOPPED

_ILLEGAL = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def write(summary: Summary, path: str | Path) -> None:
    """Write the XML file."""
    Path(path).write_bytes(render(summary))


def render(summary: Summary) -> bytes:
    """The XML: a suite per family; new findings fail (or are errors, where nothing was judged), known ones and what was not
    compared are skipped."""
    root = ET.Element("testsuites", name="parity")
    if summary.header.seconds is not UNSET:
        root.set("time", str(summary.header.seconds))
    for family in dict.fromkeys(line.family for line in summary.lines):
        suite = ET.SubElement(root, "testsuite", name=f"parity.{family}")
        for line in summary.lines:
            if line.family == family:
                _case(suite, line, summary)
    if summary.incomplete:  # else a viewer shows what there is as green
        suite = ET.SubElement(root, "testsuite", name="parity.run")
        case = ET.SubElement(suite, "testcase", classname="parity", name="run", time="0")
        ET.SubElement(case, "error", message=_legal(summary.incomplete))
    for element in (*root, root):
        element.set("tests", str(len(element.findall(".//testcase"))))
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            element.set(attribute, str(len(element.findall(f".//testcase/{tag}"))))
    ET.indent(root)
    xml: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"


def _case(suite: ET.Element, line: Line, summary: Summary) -> None:
    # Viewers split a class name at its dots into a tree: family, library, function.
    where = {"classname": _legal(f"{line.family}.{line.implementation}"), "name": f"{line.dtype}, {line.device}"}
    case = ET.SubElement(suite, "testcase", where | {"time": "0"})
    mine = (line.implementation, line.family, line.dtype, line.device)
    found = [
        f for f in summary.findings if any((r.implementation, r.family, r.dtype, r.device) == mine for r in f.failing)
    ]
    if found:
        message = "; ".join(f"{wording.title(f)}: {wording.wrong(f.lead)} ({wording.spread(f)})" for f in found)
        tag = "failure" if any(f.verdict not in STOPPED for f in found) else "error"
        element = ET.SubElement(case, tag, message=_legal(message))
        element.text = _legal("\n".join(text_of(f.rows) for f in found))
    elif line.verdict != "agree":
        ET.SubElement(case, "skipped", message=_legal(wording.verdict_of(line)))
    ET.SubElement(case, "system-out").text = _legal(wording.counts(line.counts))


def _legal(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold, escaped or not: a message may carry an ANSI escape."""
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
