"""The commands of a night besides the long run, each in a process of its own with a limit on the clock."""

import contextlib
import datetime
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from parity.errors import AGREE, NEW, TERMINATED, UsageError
from parity.process import stopping
from parity.results.memory import CommandOutcome
from parity.results.report.rows import read
from parity.results.report.summary import summarise
from parity.results.report.wording import count, title
from parity.results.row import Header, Row
from parity.running import child
from parity.running.child import LimitExceeded

COMMAND = (sys.executable, "-P", "-m", "parity")
SHARE_OF_RUN = 0.8  # of the time of `parity run`; the rest is for its environment and its report
TAIL = 24  # lines of its output that a step's place in the report shows


def part(name: str, words: Sequence[str], reports: Path, limit: float) -> CommandOutcome:
    """One of a night's commands, `parity WORDS` or `pytest …`; its output is in `reports/NAME.log`, rows in
    `reports/NAME`. What a run has looked at counts, although its time is over before its end."""
    since, more = datetime.datetime.now(datetime.UTC), list[str]()
    if words[0] in ("run", "upstream"):
        more += ["--reports", str(reports / name)]
    if words[0] == "run":
        more += ["--max-time", f"{max(int(SHARE_OF_RUN * limit), 1)}s"]
    done = run(name, [*words, *more], reports / f"{name}.log", limit)
    rows = reports / name / "results.ndjson"
    written = rows.stat() if words[0] == "run" and rows.exists() else None
    if written and written.st_size and written.st_mtime >= since.timestamp():
        try:
            return of_run(done, *read(rows))
        except UsageError as error:  # what it left behind cannot be read: its exit code alone counts
            return replace(done, tail=f"{done.tail}\n{error}".strip())
    return done


def of_run(done: CommandOutcome, header: Header, rows: Sequence[Row]) -> CommandOutcome:
    """A run by its rows: each new finding in a line, and what one that was not whole, or killed before its report, had found."""
    summary = summarise(header, rows)
    reached, code = summary.incomplete, done.exit_code
    if reached and code in (None, TERMINATED):
        code = NEW if any(row.new for row in rows) else AGREE if any(r.judged for r in rows) else None
    new = [
        f"new      {f.implementation}: {title(f)}; {count(f.cases, 'case')}; {f.lead.replay}" for f in summary.findings
    ]
    killed = reached and done.exit_code is None
    tail = [*done.tail.splitlines()[-1:], *new] if killed else [*new, *done.tail.splitlines()]
    return replace(done, exit_code=code, reached=reached, tail="\n".join(tail))


def run(name: str, words: Sequence[str], log: Path, limit: float) -> CommandOutcome:
    """Run `parity WORDS`, or `pytest …`, with its output in `log`; after `limit` seconds it and its children are ended."""
    tests = words[0] == "pytest"
    command = [sys.executable, "-m", *words] if tests else [*COMMAND, *words]
    begun = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p and Path(p).is_dir())}
    code: int | None = None
    with log.open("wb") as out, stopping(), contextlib.suppress(LimitExceeded):
        how: Any = {"stdout": out, "stderr": subprocess.STDOUT, "env": env}
        code = child.run(command, cpu=math.inf, clock=max(limit, 1.0), **how).returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said, seconds = " ".join(words if tests else ["parity", *words]), time.monotonic() - begun
    return CommandOutcome(name, said, code, seconds, "\n".join(lines[-TAIL:]))
