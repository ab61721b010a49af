"""A Markdown summary, short enough for a comment on a pull request (GitHub refuses 65,536 characters); templates."""

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from parity.results.report import wording
from parity.results.report.failure import text_of
from parity.results.report.findings import headroom
from parity.results.report.summary import Summary

LIMIT, IN_FULL = 60_000, 8
_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write(summary: Summary, path: str | Path, exit_code: int = 0, reasons: Sequence[str] = ()) -> None:
    """Write the Markdown file."""
    Path(path).write_text(render(summary, exit_code, reasons), encoding="utf-8")


def render(summary: Summary, exit_code: int = 0, reasons: Sequence[str] = ()) -> str:
    """How it ended and why, findings, table, coverage; findings beyond what fits are counted, never dropped."""
    for full in (IN_FULL, IN_FULL // 2, 2, 1, 0):
        text = filled("summary.md.j2", summary=summary, code=exit_code, reasons=wording.others(reasons), full=full)
        if len(text) <= LIMIT:
            break
    return text


def filled(template: str, **values: Any) -> str:
    """A template of the folder `page` with values; in HTML whatever comes from them is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("page")),
        autoescape=lambda name: name == "page.html.j2",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"md": escape, "code": code}
    environment.globals.update(w=wording, headroom=headroom, text_of=text_of)
    return environment.get_template(template).render(values)


def escape(text: str) -> str:
    """Text that Markdown and HTML show as it stands, on one line and in one table cell."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def code(text: str) -> str:
    """An id in code style, whatever it contains."""
    text = " ".join(text.split()).replace("|", "\\|")
    ticks = "`" * (max((len(t) for t in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"
