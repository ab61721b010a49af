"""`parity replay`: run one case again. 0 agrees, 1 disagrees (known or not), 125 could not be judged."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from parity import data
from parity.case.case import Case
from parity.compare.result_rows import replay_line
from parity.errors import AGREE, NEW, NO_JUDGEMENT, UsageError
from parity.implementations.implementation import Implementation
from parity.process import prepare
from parity.registry import facts, family, resolved, run_case, select
from parity.results.ledger import Ledger
from parity.results.report import render
from parity.results.report.summary import not_judged
from parity.results.row import Row
from parity.running.plan import Options
from parity.running.provenance import resolve_device
from parity.sampling.find import find, followed
from parity.trainers import catalogue


def replay(
    name: str,
    implementations: Sequence[str],
    device: str,
    issue: bool,
    console: Console,
    minimise: Path | None = None,
    reports: Path = Path("reports"),
    test: Path | None = None,
    families: tuple[str, ...] = (),
    explained: Callable[[Callable[[], object]], Sequence[str]] | None = None,
) -> int:
    """Run the case through the named implementations (else the one it was found with, else all) and print the findings.
    `minimise`: a file for the smallest part of a stored case that still disagrees; `reports`: where a case is looked
    for by id; `test`: a file for a pytest that runs this again; `families`: FILE.py:NAME of a user's own; `explained`:
    what is said of a run of a user's trainers that disagree."""
    device = resolve_device(device)
    prepare(device)  # before an implementation is looked for, which may import Triton
    own = Options(families=tuple(resolved(name) and name for name in families)).own
    select(implementations)  # a user's own family is known from here on
    case, found_with = find(name, reports)
    chosen = [i for i in select(followed(implementations, found_with, case)) if i.family == case.family]
    family(case.family).full_settings(case)
    if not chosen:
        raise UsageError(f"case {case.id} is of family {case.family}; none of {', '.join(implementations)} is")
    if minimise is not None:
        from parity.tools.minimise import minimise as smallest_part

        before, case = _extent(case), smallest_part(case, _one(chosen, "--minimise"), minimise, device)
        render.show(f"wrote {minimise}: {_extent(case)} of {before}", console)
    if test is not None:
        _write_test(test, case, _one(chosen, "--test").id, own, console)
    wanted = {i.id for i in chosen}
    references = [i for i in select(()) if i.family == case.family and i.role == "reference" and i.id not in wanted]
    rows = list(run_case(case, [*references, *chosen], device))
    place = "" if reports == Path("reports") else f" --reports {shlex.quote(str(reports))}"
    stored = Path(name).suffix == ".json" or minimise
    for row in rows:
        line = replay_line(str(minimise or name), row.implementation) if stored else row.replay
        row.replay = line + own + ("" if stored else place)
    mine = chosen
    if implementations and all(".py:" in one for one in implementations):
        # `select` adds the references of a user's own, which answer for themselves
        mine = [i for i in chosen if i.role != "reference"]
    if issue:
        return _issue(case, mine, rows, console, name)
    for implementation in sorted(chosen, key=lambda i: i not in mine):  # what was asked for is read first
        its_rows = [r for r in rows if r.implementation == implementation.id]
        render.render_case(its_rows, console)
        if unknown := [name for row in its_rows for name in row.unjudged]:
            render.show(f"note {not_judged(implementation.id, unknown)}", console)
    theirs = [i for i in mine if ".py:" in i.id and catalogue.is_trainer(case.family)]
    wrong = [i for i in theirs if any(r.implementation == i.id and r.verdict == "disagree" for r in rows)]
    for line in explained(lambda: list(run_case(case, wrong, device))) if explained and wrong else ():
        render.show(line, console)
    wanted = {i.id for i in mine}
    return exit_code([r for r in rows if r.implementation in wanted])


TEST = '''"""A case that disagreed once, kept by `parity replay --test`."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[{depth}]
CASE = {case!r}


def test_{name}(tmp_path):
    """{who} agrees with the definition in float64."""
    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASE))
    asked = [sys.executable, "-m", "parity", "replay", str(file), "--implementation", {who!r}{own}]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
'''


def _one(chosen: Sequence[Implementation], option: str) -> Implementation:
    """Whom an option means: the only one, or the only one that is no reference."""
    named = [i for i in chosen if len(chosen) == 1 or i.role != "reference"]
    if len(named) != 1:
        raise UsageError(f"replay: {option} needs one --implementation")
    return named[0]


def _write_test(to: Path, case: Case, who: str, own: str, console: Console) -> None:
    """A test for the user's own repository. Raises UsageError where the case has stored tensors, or the file is there."""
    if case.tensors:
        raise UsageError(f"case {case.id}: --test is for drawn cases; keep the case file and replay it")
    if to.exists():
        raise UsageError(f"{to} is there already")
    if not to.resolve().is_relative_to(Path.cwd()):
        raise UsageError(f"{to}: the test runs from this folder, {Path.cwd()}; give it a place below")
    depth = len(to.resolve().relative_to(Path.cwd()).parts) - 1
    to.parent.mkdir(parents=True, exist_ok=True)
    more = "".join(f", {word!r}" for word in shlex.split(own))
    to.write_text(TEST.format(depth=depth, case=case.to_json(), name=case.id.replace("-", "_"), who=who, own=more))
    render.show(f"wrote {to}: python -m pytest {shlex.quote(str(to))}", console)


def _extent(case: Case) -> str:
    """`B=1 T=2 V=7 H=4`."""
    settings = vars(family(case.family).full_settings(case))
    return " ".join(f"{name}={settings[name]}" for name in "BTVH" if name in settings)


def exit_code(rows: Sequence[Row]) -> int:
    """1 when anything judged disagrees, 0 when something was judged and all of it agrees, else 125."""
    if any(r.verdict == "disagree" for r in rows):
        return NEW
    if any(r.failing for r in rows) or not any(r.verdict == "agree" for r in rows):
        return NO_JUDGEMENT
    return AGREE


def _issue(case: Case, chosen: Sequence[Implementation], rows: Sequence[Row], console: Console, name: str) -> int:
    """Print the report of the first that disagrees: that by hand where an entry covers it, first the one of this name."""
    from parity.tools.issue import issue_text
    from parity.tools.upstream import shown, text

    ledger, known = Ledger.load(data.ledger_file()), facts(case)
    for implementation in chosen:
        failing = [r for r in rows if r.implementation == implementation.id and r.failing]
        if failing:
            covering = [e for e in ledger.entries if any(e.covers(row, known) for row in failing)]
            covering.sort(key=lambda e: e.id != name)
            if covering and (found := shown(covering[0], ledger)).code:
                console.file.write(text(found, ledger) + "\n")
                return found.done.returncode if found.done and found.done.returncode in (AGREE, NEW) else NO_JUDGEMENT
            if case.tensors:
                sent = f"send the case file and {case.tensors}"
                raise UsageError(f"case {case.id}: no script stands alone without its tensors: {sent}")
            console.file.write(issue_text(case, implementation, rows) + "\n")
            return NEW
    console.print(f"case {case.id}: nothing to report, no implementation disagrees here", markup=False)
    return exit_code(rows)
