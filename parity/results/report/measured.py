"""Pages of docs/measured: a heading with the command that writes the page, and numbers rounded for people."""

import datetime
import math
import shlex
import sys
from collections.abc import Iterable, Sequence


def head(title: str, program: str, page: str = "") -> str:
    """The opening of a page: its title, then the command with its arguments, the file it is kept in, and the date.
    `program` is what the user typed before the arguments, "parity" or "python -m parity.tools.large"."""
    command = shlex.join([*shlex.split(program), *sys.argv[1:]]) + (f" > docs/measured/{page}" if page else "")
    return f"# {title}\n\nWritten by `{command}` on {datetime.date.today()}.\n"


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table; the numbers of a column whose heading begins with ">" stand at its right."""
    rule = "".join("---:|" if head.startswith(">") else "---|" for head in heads)
    shown = ([head.removeprefix(">") for head in heads], *rows)
    lines = [f"| {' | '.join(row)} |" for row in shown]
    return [lines[0], f"|{rule}", *lines[1:]]


def short(value: float) -> str:
    """Two significant digits: 0.0054, 220, 1,800, and with an exponent only below 0.001 or from 10,000 on: 5.4e-6, 2e33."""
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    rounded = float(f"{value:.2g}")
    if rounded == 0 or 1e-3 <= abs(rounded) < 1e4:
        return f"{rounded:,.10g}"
    digits, exponent = f"{rounded:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def share(part: int, whole: int) -> str:
    """A percentage with at most one decimal; what is not all never reads 100 %, what is not nothing never 0 %."""
    percent = 100 * part / whole
    if part == whole or part == 0:
        return f"{percent:.0f} %"
    return "> 99.9 %" if percent > 99.9 else "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %"
