"""Pages of docs/measured: a heading with the command that writes the page, and shares."""

import datetime
import shlex
import sys
from collections.abc import Iterable, Sequence


def head(title: str, program: str, page: str = "") -> str:
    """The opening of a page: its title, then the command with its arguments, the file it is kept in, and the date.
    `program` is what the user typed before the arguments, "parity" or "python -m cases.bench.rate"."""
    command = shlex.join([*shlex.split(program), *sys.argv[1:]]) + (f" > docs/measured/{page}" if page else "")
    return f"# {title}\n\nWritten by `{command}` on {datetime.date.today()}.\n"


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table; the numbers of a column whose heading begins with ">" stand at its right."""
    rule = "".join("---:|" if head.startswith(">") else "---|" for head in heads)
    shown = ([head.removeprefix(">") for head in heads], *rows)
    lines = [f"| {' | '.join(row)} |" for row in shown]
    return [lines[0], f"|{rule}", *lines[1:]]


def share(part: int, whole: int) -> str:
    """A percentage with at most one decimal; what is not all never reads 100 %, what is not nothing never 0 %."""
    percent = 100 * part / whole
    if part == whole or part == 0:
        return f"{percent:.0f} %"
    return "> 99.9 %" if percent > 99.9 else "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %"
