"""What is printed and written of a run, whole, as files in `shown/`: a change of theirs is for a person to read.

`python -m cases.selftest.results.test_shown` writes them anew.
"""

import io
import re
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from cases.selftest.results.runs import (
    BAD,
    CRASH,
    EVIL,
    FINDING,
    GOOD,
    GRADIENT,
    LOSS,
    PROTOCOL,
    about,
    changed,
    declined,
    everything,
    night,
    row,
    summary,
)
from parity.results import memory, notify, trend
from parity.results.report import render

SHOWN = Path(__file__).with_name("shown")
ENDING = render.Ending(1, ["2 new failing rows of lib.loss", "ledger entry x is stale"])


def printed(show, width=100):
    out = io.StringIO()
    show(Console(file=out, width=width, color_system=None, highlight=False))
    return out.getvalue()


def replayed(console):
    """How nearly it agrees; why it was not judged; nothing without rows; the failure text; that of a crash."""
    for rows in ([LOSS], [declined("unsupported", "no fused path")], [], [LOSS, GRADIENT, PROTOCOL], FINDING, [CRASH]):
        render.render_case(rows, console)


def nights():
    """The third night of one: a finding is new, one still there, one gone; a library moved; names that are markup."""
    worst = {"index": [1], "parameter": EVIL, "value": 2.0, "oracle": 1.0, "error": 1.0}
    kl = {"quantity": "kl", "implementation": "lib.gone"}
    gone = [row(**kl, headroom=7.25, verdict="disagree", minimised=True, worst=[worst])]
    old = [*GOOD, *changed(BAD, implementation="lib.old")]
    rows = [*old, *changed(BAD, implementation="lib.new", blame="reference"), row(**kl)]
    with tempfile.TemporaryDirectory() as folder:
        night(Path(folder), 0, GOOD)
        night(Path(folder), 1, [*old, *gone], 1)
        night(Path(folder), 2, rows, 1, {"trl": "1.17.0<b>"})
        past = memory.runs(Path(folder))
    page = render.page(summary(*rows, header=about(2)), render.Ending(1, past=past))
    return page, notify.body(trend.change(past[-1], past))


def shown():
    """File -> its text."""
    page, issue = nights()
    return {
        "terminal.txt": printed(lambda console: render.terminal(everything(), console, ENDING)),
        "verbose.txt": printed(lambda console: render.terminal(everything(), console, ENDING, full=True)),
        "replay.txt": printed(replayed),
        "summary.md": render.markdown(everything(), ENDING),
        "junit.xml": render.junit(everything()),
        "index.html": render.page(everything(), ENDING),
        "night.html": page,
        "issue.md": issue,
    }


def text_of(found):
    return re.sub("(?s)<style>.*?</style>", "", found)


@pytest.fixture(scope="module")
def now():
    found = shown()
    assert found.keys() == {path.name for path in SHOWN.iterdir()}, "a file that nothing writes, or a text without one"
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in SHOWN.iterdir()))
def test_it_is_as_it_was(now, name):
    assert text_of(now[name]) == (SHOWN / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, found in shown().items():
        (SHOWN / name).write_text(text_of(found), encoding="utf-8")
