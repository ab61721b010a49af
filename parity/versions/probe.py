"""Cases through implementations inside an environment, as result rows: what history, bisect and compare look through.

`python -m parity.versions.probe PLAN` reads a plan (JSON file) and prints one row a line; `rows` is the caller's side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity.case import Case
from parity.versions.client import EnvironmentUnusable, one_line
from parity.versions.environment import Environment
from parity.worker import environment

TIMEOUT = 600.0
MARK = "parity-row "

Row = dict[str, Any]


def rows(
    made: Environment, cases: Sequence[Case], implementations: Sequence[str], timeout: float = TIMEOUT
) -> list[Row]:
    """Rows of every case through the named implementations and the references of its family, in the environment.

    On the CPU, one thread, without repeated calls and relations: the same cases, the same rows, wherever it runs.
    EnvironmentUnusable when the process dies or takes longer than `timeout` seconds; the message is its last line.
    """
    with tempfile.TemporaryDirectory(prefix="parity-probe-") as folder:
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps({"cases": [c.to_json() for c in cases], "implementations": list(implementations)}))
        done = _ran(made, plan, timeout)
    found = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode:
        last = one_line(done.stderr.rstrip().rpartition("\n")[2]) or f"python ended with status {done.returncode}"
        raise EnvironmentUnusable(f"environment {made.name}: {last}")
    return found


def _ran(made: Environment, plan: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    command = ["python", "-W", "ignore", "-m", "parity.versions.probe", str(plan)]
    try:
        return made.run(command, settings=environment("cpu", 1), capture=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise EnvironmentUnusable(f"environment {made.name}: no answer in {timeout:.0f} s") from None


def main(argv: Sequence[str]) -> int:
    """Runs the plan in this process."""
    from parity.implementations import select
    from parity.run import run_case
    from parity.worker import prepare

    prepare("cpu", threads=1)
    plan = json.loads(Path(argv[0]).read_text())
    wanted = select(plan["implementations"])
    for raw in plan["cases"]:
        case = Case.from_json(raw)
        references = [one for one in select(()) if one.role == "reference"]
        chosen = {one.id: one for one in (*references, *wanted) if one.family == case.family}
        for row in run_case(case, chosen.values(), "cpu", thorough=False):
            sys.stdout.write(f"\n{MARK}{json.dumps(row, allow_nan=False)}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
