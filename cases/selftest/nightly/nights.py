"""What tests of kept nights share: their age and their page."""

import contextlib
import sqlite3

from parity.cli import show
from parity.results import memory
from parity.results.report.rows import read


def yesterday(reports):
    """Let the runs that are kept be of one day earlier."""
    for path in (reports / "history").glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as base, base:
            base.execute("UPDATE run SET started = datetime(started, '-1 day') || '+00:00'")


def page_of(reports):
    header, rows = read(reports / "results.ndjson")
    (run,) = (run for run in memory.runs(reports / "history", str) if run.id == header.run)
    show.report(header, rows, reports, list(run.reasons), run.exit_code)
    return (reports / "index.html").read_text()
