"""What tests of kept nights share: their age and their page."""

import datetime
import json

from parity.cli import show
from parity.results import memory
from parity.results.report.rows import read


def yesterday(reports):
    """Let the runs that are kept be of one day earlier."""
    for path in (reports / "history").glob("*.json"):
        kept = json.loads(path.read_text())
        earlier = datetime.datetime.fromisoformat(kept["started"]) - datetime.timedelta(days=1)
        path.write_text(json.dumps(kept | {"started": earlier.isoformat()}))


def page_of(reports):
    results = reports / "results.ndjson"
    header, rows = read(results)
    (run,) = (run for run in memory.runs(reports / "history", str) if run.id == header.run)
    show.report(header, rows, results, reports, list(run.reasons), run.exit_code)
    return (reports / "index.html").read_text()
