"""What is written and printed: templates of the folder `page`, filled with a run's summary or the rows of one case.

Control characters are replaced in whatever comes from rows: a message must not colour, clear or retitle the reader's terminal,
and XML cannot hold them. In HTML and XML everything is escaped.
"""

import collections
import dataclasses
import functools
import html
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from rich.console import Console
from rich.text import Text

from parity.results import memory, trend
from parity.results.ledger import Entry, Ledger
from parity.results.report import PAGES, stack, wording
from parity.results.report.findings import Finding, ImplementationCase, findings, grouped, headroom
from parity.results.report.summary import DTYPES, Line, Summary
from parity.results.row import STOPPED, Row
from parity.results.watched import levels

LINES, WIDTH = 60, 110  # what a summary on the terminal may fill; wider terminals get no longer lines
ENOUGH = 8  # tokens that show where the errors are
CHARACTERS = 60_000  # of a comment: GitHub refuses 65,536
LIMITS = (40, 20, 12, 8, 5, 3, 2, 1, 0)
"""How many of each list are shown: the first with which the whole fits. Others are counted."""
NAMED = (40, True), (40, False), (20, False), (8, False), (0, False)
"""How many further findings are named in a line each, with their replay lines or without: the first with which one finding in
full fits too."""
_SPECIAL = re.compile(r"([\\`*_\[\]|~])")
_CONTROL = re.compile(r"[^\t\n\x20-\x7e\xa0-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
_STYLES = {"new ": "bold red", "known ": "yellow", "note ": "yellow", "next ": "bold", "replay ": "bold", "run ": "dim"}
_STYLES |= dict.fromkeys(("class ", "wrong ", "quantity "), "bold")


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended: exit code, why it is not 0, its results file, where its reports are, the runs before it that were kept."""

    code: int = 0
    reasons: Sequence[str] = ()
    results: Path = Path("reports/results.ndjson")
    folder: Path = Path("reports")
    past: Sequence[memory.Run] = ()


IN_ORDER = Ending()


def write(summary: Summary, ending: Ending) -> None:
    """The files of a run: JUnit, a comment for a pull request, the page."""
    texts = {"junit.xml": junit(summary), "summary.md": markdown(summary, ending), "index.html": page(summary, ending)}
    for name, text in texts.items():
        (ending.folder / name).write_text(text, encoding="utf-8")


def terminal(summary: Summary, console: Console, ending: Ending = IN_ORDER, full: bool = False) -> None:
    """Print one screen: the stack and its defects, what is new, the verdict and the next command; or, in full, everything."""
    busy = {x.implementation for x in summary.lines if not x.idle}
    idle = {x.implementation: x.reason for x in summary.lines if x.implementation not in busy}
    values = {"summary": summary, "ending": ending, "full": full, "width": min(console.width, WIDTH)}
    values |= {"idle": collections.Counter(idle.values()), "matrix": _matrix(summary.lines)}
    for values["named"], values["replayed"] in NAMED:
        limits = (10**9,) if full else LIMITS[: -1 if values["named"] else None]
        text = _fitting("terminal.txt.j2", lambda text: text.count("\n") <= LINES, limits, **values)
        if full or text.count("\n") <= LINES:
            break
    show(text, console)


def markdown(summary: Summary, ending: Ending = IN_ORDER) -> str:
    """A comment for a pull request: the stack and its defects, what is new, how it ended and why, the table."""
    return _fitting("summary.md.j2", lambda text: len(text) <= CHARACTERS, summary=summary, ending=ending)


def page(summary: Summary, ending: Ending = IN_ORDER) -> str:
    """One HTML page, nothing fetched, complete without its script. Where this run is kept, it says what changed."""
    kept = next((run for run in ending.past if run.id == summary.run), None)
    change = trend.change(kept, ending.past) if kept else None
    before = change.before.by_key if change and change.before else {}
    gone = {k: next(iter(findings(grouped(before[k].rows))), None) for k in change.fixed} if change and before else {}

    def since(finding: Finding) -> str:
        if change is None or change.before is None:
            return ""
        life = change.lives[finding.key]
        often = f"in {life.times:,} of {wording.count(life.of, 'run')}"
        return f"{trend.since(life.first, change.run, 'new in this run')}, {often}"

    values = {"change": change, "gone": gone, "since": since, "trend": trend}
    return filled("page.html.j2", summary=summary, ending=ending, **values)


def trend_page(past: Sequence[memory.Run], ledger: Ledger, night: str = "") -> str:
    """Findings of runs of one profile and device, since when, and mended when. `night`: address of the last."""
    known = {e.id: e for e in (*Ledger.older(ledger.path), *ledger.entries)}
    found = sorted(trend.stories(past).values(), key=lambda x: (x.known, -x.first.started.timestamp(), x.name))
    counts = [len({f.known or f.key for f in run.findings}) for run in past]
    values = {"entries": known, "stories": found, "counts": counts, "releases": trend.releases(past)}
    return filled("trend.html.j2", past=past, night=night, **values)


def junit(summary: Summary) -> str:
    """JUnit XML: a test case for each implementation, dtype and device, and not for each drawn case: those have new names in
    every run, and a viewer's history lives on names that stay. New findings fail (or are errors, where nothing was judged),
    known ones and what was not compared are skipped."""
    of = collections.defaultdict[tuple[str, ...], dict[str, Finding]](dict)
    for f in (f for found in summary.findings for f in found.each):
        for r in f.failing:
            of[r.implementation, r.family, r.dtype, r.device][f"{f.key} {f.lead.message}"] = f
    suites = collections.defaultdict[str, list[Any]](list)
    for x in summary.lines:
        found = list(of[x.implementation, x.family, x.dtype, x.device].values())
        tag = "failure" if any(f.verdict not in STOPPED for f in found) else "error" if found else "skipped"
        suites[x.family].append({"line": x, "found": found, "tag": "" if x.verdict == "agree" else tag})
    return filled("junit.xml.j2", summary=summary, suites=suites, all=[c for found in suites.values() for c in found])


def ledger_page(ledger: Ledger, page: str = "high") -> str:
    """docs/findings.md: the newest releases' defects, of any library, of severity high; or another page of `PAGES`. "mended":
    those that only older releases have."""
    pages: dict[str, list[Entry]] = {name: [] for name in PAGES}
    for e in (e for e in ledger.entries if not e.user.part_of):
        severity = e.severity if e.severity in pages else "low"
        pages["mended" if stack.is_mended(e) else severity].append(e)
    older = Ledger.older(ledger.path) if page == "mended" else []
    found = stack.Stack.of(pages[page])
    counts = {name: sum(e.severity == name for e in found) for name, found in pages.items()}
    return filled("findings.md.j2", stack=found, page=page, counts=counts, older=older)


def strips(finding: Finding) -> list[tuple[Row, list[list[tuple[int, bool]]]]]:
    """(row, its sequences as `levels`), of the smallest case with `ENOUGH` tokens or the largest."""
    sized = sorted((max(sum(map(len, r.tokens)) for r in p.rows), n, p) for n, p in enumerate(finding.parts))
    case = next((p for count, _, p in sized if count >= ENOUGH), sized[-1][2])
    return [(r, levels(r.tokens)) for r in case.rows if r.tokens]


def text_of(rows: Sequence[Row], width: int = WIDTH) -> str:
    """The failure text of one implementation on one case, of which `rows` are all rows: class, who is wrong, quantity and how
    wrong; every gate of every quantity; the worst entries, decoded; hints; the replay line. Empty where nothing fails."""
    case = ImplementationCase(tuple(rows))
    if not case.failing:
        return ""
    judged = [r for r in rows if r.judged]
    # A relation, the protocol and a pooled slope are their own and only gate: beside the table, not in it.
    alone = [r for r in judged if list(r.gates) == [r.gate] and str(r.gate) in r.subject]
    table = [r for r in judged if r not in alone]
    return filled("card.txt.j2", rows=rows, lead=case.lead, judged=judged, alone=alone, table=table, width=width)


def render_case(rows: Sequence[Row], console: Console) -> None:
    """Print the failure text; where nothing fails one line: agrees and how nearly, or why nothing was judged. Nothing without
    rows: a check may be defined for some ways of using a trainer only."""
    text = text_of(rows, console.width)
    if judged := [r for r in rows if r.judged]:
        worst = max(judged, key=headroom)
        size = f"at most {headroom(worst):.2g} of the allowed error ({wording.at(worst)})"
        said = f"agrees      {worst.implementation} · {wording.count(len(judged), 'quantity', 'quantities')}, {size}"
    elif rows:
        row = max(rows, key=lambda r: r.verdict == "refused")
        said = f"{row.verdict:<11} {row.implementation} · {row.message}"
    show(text or (said if rows else ""), console)


def show(text: str, console: Console) -> None:
    """Print text as it is, never as markup; what is to be copied is one line, which only the terminal itself may break."""
    for line in _plain(text).splitlines():
        style = next((style for begin, style in _STYLES.items() if line.startswith(begin)), "")
        console.print(Text(line, style="bold red" if "! " in f"{line} " and not style else style), soft_wrap=True)


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("page")),
        autoescape=lambda name: str(name).endswith((".html.j2", ".xml.j2")),
        undefined=jinja2.StrictUndefined,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"md": escape, "code": code, "ticks": ticks, "wrapped": wrapped, "aligned": aligned}
    found.globals.update(w=wording, s=stack, headroom=headroom, text_of=text_of, strips=strips, levels=levels)
    return found


def filled(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values)


def _fitting(template: str, fits: Callable[[str], bool], limits: Sequence[int] = LIMITS, **values: Any) -> str:
    for limit in limits:
        if fits(text := filled(template, limit=limit, **values)):
            break
    return text


def _plain(value: Any) -> Any:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


def escape(text: str) -> str:
    """Text that Markdown and HTML show as it stands, on one line and in one table cell."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def code(text: str) -> str:
    """An id in code style, whatever it contains."""
    text = " ".join(text.split()).replace("|", "\\|")
    ticks = "`" * (max((len(t) for t in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def ticks(text: str) -> markupsafe.Markup:
    """HTML of a text whose code stands in backticks."""
    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(_plain(text)))))


def wrapped(text: str, width: int, label: str = "", most: int | None = None) -> str:
    """Text wrapped under itself behind a label, between words alone; what does not fit into `most` lines ends in …."""
    room, words = max(width - len(label), 20), " ".join(text.split())
    options: Any = {"break_long_words": False, "break_on_hyphens": False, "max_lines": most, "placeholder": " …"}
    return label + f"\n{' ' * len(label)}".join(textwrap.wrap(words, room, **options))


def aligned(rows: Iterable[Sequence[str]], left: int = 1, longest: int = 60) -> str:
    """A table as text: columns from `left` on at their right; a first cell longer than `longest` has a line of its own."""
    cells = [part for row in rows for part in ([row[:1], ["", *row[1:]]] if len(row[0]) > longest else [row])]
    columns = itertools.zip_longest(*(row for row in cells if len(row[0]) <= longest), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    numbered = [list(enumerate(zip(row, widths, strict=False))) for row in cells]
    lines = [[f"{c:<{n}}" if k < left else f"{c:>{n}}" for k, (c, n) in row] for row in numbered]
    return "\n".join(" ".join(line).rstrip() for line in lines)


def _matrix(lines: Sequence[Line]) -> list[list[str]]:
    """Error ÷ allowed by implementation and dtype: what fails first, then the tightest."""
    groups = collections.defaultdict[tuple[str, str, str], dict[str, Line]](dict)
    for x in lines:
        groups[x.family, x.implementation, x.device][x.dtype] = x
    busy = {key: found for key, found in groups.items() if not all(x.idle for x in found.values())}
    dtypes = [d for d in DTYPES if any(d in found for found in busy.values())]
    many = len({device for *_, device in busy}) > 1
    ids = collections.Counter((name, device) for _, name, device in busy)  # a user's trainer is of two families

    def rank(its: dict[str, Line]) -> tuple[bool, float]:
        fresh = [headroom(x.worst) for x in its.values() if x.worst and not x.worst.known]
        return any(x.new for x in its.values()), max(fresh, default=-1.0)

    out = [["", *dtypes, "compared"]]
    for (family, name, device), its in sorted(busy.items(), key=lambda pair: rank(pair[1]), reverse=True):
        cells = [_cell(its[d]) if d in its else "" for d in dtypes]
        compared = f"{sum(x.counts['compared'] for x in its.values()):,}"
        label = f"{name} ({family})" if ids[name, device] > 1 else name
        out.append([f"{label} ({device})" if many else label, *cells, compared])
    return out


def _cell(line: Line) -> str:
    """Error ÷ allowed; ! where it is new, in brackets where all that was judged is a known finding."""
    if line.verdict in STOPPED:
        return {"crashed": "crash!", "timed-out": "hung!", "out-of-memory": "memory!"}[line.verdict]
    if line.worst is None:
        return "·"
    size = wording.ratio(headroom(line.worst))
    return f"({size})" if line.worst.known else f"{size}!" if line.worst.new else size
