"""The commands of a night besides the long run, each in a process of its own with a limit on the clock."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parity.errors import UsageError
from parity.process import stopping
from parity.results.header import Header
from parity.results.report.findings import Finding
from parity.results.report.rows import read
from parity.results.report.summary import summarise
from parity.results.report.wording import count
from parity.results.row import Row
from parity.results.step import CommandOutcome
from parity.results.turns import NOT_RUN, TRIES, WRONG, Turn, Turns
from parity.running import outcome

COMMAND = (sys.executable, "-P", "-m", "parity")
GRACE = 10.0
"""Seconds to end in after SIGTERM."""
TURNS = ("history", "mutants", "upstream")
"""Commands that begin with what was looked at longest ago, so that no night begins with the same and none is left out."""
SHARE_OF_RUN = 0.8
"""Of the time of `parity run`; the rest is for its environment and its report."""
TAIL = 24
"""Lines of its output that a step's place in the report shows: the report of a search has 13 and more."""


def part(name: str, words: Sequence[str], reports: Path, limit: float, module: str = "") -> CommandOutcome:
    """One of a night's commands, `parity WORDS`: what it has looked at counts, although its time is over before its end.

    Each keeps its turns in `reports`, its output in `reports/NAME.log`, and a run its rows in `reports/NAME`.
    """
    since, more, turns = datetime.datetime.now(datetime.UTC), list[str](), reports / "turns" / f"{name}.json"
    if words[0] in TURNS:
        more += ["--turns", str(turns)]
    if words[0] in ("run", "upstream"):
        more += ["--reports", str(reports / name)]
    if words[0] == "run":
        more += ["--max-time", f"{max(int(SHARE_OF_RUN * limit), 1)}s"]
    done = run(name, [*words, *more], reports / f"{name}.log", limit, module)
    rows = reports / name / "results.ndjson"
    try:
        if words[0] in TURNS and done.exit_code is None and turns.exists():
            return in_turn(done, Turns.read(turns), since)
        written = rows.stat() if rows.exists() else None
        if words[0] == "run" and written and written.st_size and written.st_mtime >= since.timestamp():
            return of_run(done, *read(rows))
    except UsageError as error:  # what it left behind cannot be read: its exit code alone counts
        return dataclasses.replace(done, tail=f"{done.tail}\n{error}".strip())
    return done


def in_turn(done: CommandOutcome, turns: Turns, since: datetime.datetime) -> CommandOutcome:
    """A stopped command, by the turns of its units: what was wrong when it was looked at last counts until it is right."""
    ended, of = turns.reached(since), len(turns.units)
    if len(ended) == of:
        return done
    rest = of - sum(bool(turns.known.get(unit, Turn()).ended) for unit in turns.units)
    reached = f"{len(ended):,} of {of:,}, the others first next time"
    reached += f", {rest:,} of them never yet" if rest else f", none longer ago than {turns.oldest()}"
    code, wrong, starved = done.exit_code, turns.having(WRONG), turns.starved()
    if code is None and ended:
        unusable = set(turns.having(NOT_RUN)) & set(ended)
        code = outcome.NEW if wrong else outcome.NOTHING if unusable else outcome.AGREE
    if starved:
        code, reached = None, f"{reached}; begun {TRIES} times and never at an end: {', '.join(starved)}"
    tail = [done.tail, *(f"wrong: {unit}, looked at {turns.known[unit].ended[:10]}" for unit in wrong)]
    return dataclasses.replace(done, exit_code=code, reached=reached, tail="\n".join(filter(None, tail)))


def of_run(done: CommandOutcome, header: Header, rows: Sequence[Row]) -> CommandOutcome:
    """A run by its rows: each new finding in a line, and what one that was not whole, or killed before its report, had found."""
    summary = summarise(header, rows)
    reached, code, tail = summary.incomplete, done.exit_code, done.tail
    if reached and code in (None, outcome.TERMINATED):
        code = outcome.NEW if any(row.new for row in rows) else outcome.AGREE if any(r.judged for r in rows) else None
    new = [f"new      {_line(one)}" for one in summary.findings]
    if reached and done.exit_code is None:
        tail = "\n".join([*tail.splitlines()[-1:], *new])
    else:  # the end of its report may lack some
        tail = "\n".join([*new, *tail.splitlines()])
    return dataclasses.replace(done, exit_code=code, reached=reached, tail=tail)


def _line(one: Finding) -> str:
    what = f"{one.verdict} in {', '.join(one.roots)}" if one.roots else one.verdict
    return "; ".join(filter(None, [f"{one.implementation}: {what}", count(one.cases, "case"), one.lead.replay]))


def run(name: str, words: Sequence[str], log: Path, limit: float, module: str = "") -> CommandOutcome:
    """Run `parity WORDS`, or another module, with its output in `log`; after `limit` seconds it and its children are ended."""
    command = [*((sys.executable, "-m", module) if module else COMMAND), *words]
    begun = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p and Path(p).is_dir())}
    with log.open("wb") as out, stopping():
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code: int | None = process.wait(max(limit, 1.0))
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        except BaseException:
            _end(process)
            raise
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return CommandOutcome(
        name, " ".join([module or "parity", *words]), code, time.monotonic() - begun, "\n".join(lines[-TAIL:])
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its whole session, in order if that takes no more than `GRACE`."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
