"""What a run comes to: its exit code, and why it is not 0."""

import collections
import datetime
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from parity.errors import AGREE, NEW, NOTHING, STALE
from parity.registry import facts, load, select
from parity.results.ledger import Ledger, stale
from parity.results.row import STOPPED, Row
from parity.running import gpu
from parity.running.plan import Options, demanded, from_user

MINIMUM_REQUIRED = 20


def cannot(options: Options, device: str) -> str | None:
    """Why a box with a GPU cannot give the run that was asked for: no run on its CPU instead, which would end green."""
    if device == "cpu":
        return gpu.unusable() if options.device == "auto" else None
    return gpu.no_triton() if any(i.interpreted for i in select(options.implementations)) else None


def required_kernels(options: Options) -> list[str]:
    """On CUDA every Triton kernel that runs by default is required: there it is what users run."""
    if options.dtypes or options.families:  # some kernels claim no other dtype; others are of another family
        return []
    return [i.id for i in select(options.implementations) if i.interpreted and not i.opt_in and not i.missing()]


def judge_run(options: Options, rows: Sequence[Row], lost: Sequence[str], device: str) -> tuple[int, list[str]]:
    """The exit code and, a line each, why it is not 0. Where several hold: nothing before new before stale."""
    nothing = [f"a worker was lost: {message}" for message in lost]
    comparisons = cases_compared(rows)
    if not sum(comparisons.values()):
        nothing.append("nothing was compared")
    kernels = required_kernels(options) if device == "cuda" else []
    nothing += [f"required on CUDA: {name}: {why(name, rows)}" for name in kernels if not comparisons[name]]
    stopped = {r.implementation for r in rows if r.new and r.verdict in STOPPED}  # a new crash says why there is less
    for item in options.require:
        name, wanted = demanded(item)
        there = cases_compared(r for r in rows if r.device == wanted) if wanted else comparisons
        count = sum(n for i, n in there.items() if i == name or i.startswith(f"{name}."))
        if count < MINIMUM_REQUIRED and not any(i == name or i.startswith(f"{name}.") for i in stopped):
            nothing.append(f"required {item}: {count} judged comparisons, at least {MINIMUM_REQUIRED} expected")
    new = collections.Counter(r.implementation for r in rows if r.new)
    found = [f"{count} new failing rows of {name}" for name, count in new.most_common()]
    own = {i.id for i in from_user(options)}
    silent = sorted(id for id in own if not comparisons[id] and not new[id])
    nothing += [f"{id}: nothing was compared, {why(id, rows)}" for id in silent]
    ledger = Ledger.known(options.ledger)
    rotten = sorted(stale_entries(ledger, rows, device))
    rotten += ledger.expired(datetime.datetime.now(datetime.UTC).date())
    rotten += ledger.unmatched([*load(), *own])
    code = NOTHING if nothing else NEW if found else STALE if rotten else AGREE
    return code, nothing + found + rotten


def stale_entries(ledger: Ledger, rows: Sequence[Row], device: str) -> Iterator[str]:
    """A line for each entry whose own case agrees now, or fails in nothing that is in the entry's scope."""
    of_case = collections.defaultdict[str, list[Row]](list)
    for row in rows:
        of_case[row.frozen or ""].append(row)
    for entry, case in ledger.frozen():
        its = of_case[Path(entry.case).name]
        agrees = stale(entry, its, device)
        if agrees:
            what = "no longer reproduces, its case agrees; delete the entry if that is mended"
            yield f"ledger entry {entry.id} {what}: {ledger.line_of(entry.id)}"
        elif agrees is False and not any(entry.covers(row, facts(case)) for row in its):
            yield f"ledger entry {entry.id} covers nothing of what fails in its case: {ledger.line_of(entry.id)}"


def why(id: str, rows: Iterable[Row]) -> str:
    """The commonest reason for which the cases of an implementation could not be judged, a refusal before all others."""
    given = [(r.verdict == "refused", f"{r.verdict}: {r.message}") for r in rows if r.implementation == id]
    counted = collections.Counter(given)
    if len(counted) == 1 and (said := given[0][1]).startswith("unsupported: written for "):
        return f"{said}, and no case here has these settings together"
    return max(counted, key=lambda key: (key[0], counted[key]))[1] if counted else "no case was drawn for it"


def cases_compared(rows: Iterable[Row]) -> collections.Counter[str]:
    """Implementation -> cases through it in which something was judged."""
    seen = {(r.implementation, r.case) for r in rows if r.judged}
    return collections.Counter(name for name, _ in seen)
