"""Run cases inside an environment and return result rows, for history, bisect and compare.

`python -m parity.versions.look` reads a plan (JSON) from its standard input and prints one row a line, and the defaults
of GRPOConfig where the plan asks for them; `look` is the caller's side.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from parity.case.case import Case
from parity.decoding import decode
from parity.errors import UsageError
from parity.process import environment
from parity.registry import facts, run_case
from parity.results.row import Row
from parity.running.cpu_limit import LimitExceeded
from parity.versions.client import EnvironmentUnusable, one_line
from parity.versions.environment import Environment

CPU_LIMIT = 600.0
"""Seconds of CPU time of a probe, its children included; on the clock `cpu_limit.BACKSTOP` times as many."""
ROW, CONFIG = "parity-row ", "parity-config "


@dataclasses.dataclass(frozen=True)
class Look:
    """What a probe saw: result rows; name -> default of the fields of GRPOConfig (empty if not asked for)."""

    rows: list[Row]
    config: dict[str, Any]


def rows(made: Environment, cases: Sequence[Case], implementations: Sequence[str], device: str = "cpu") -> list[Row]:
    return look(made, cases, implementations, device=device).rows


def look(
    made: Environment,
    cases: Sequence[Case],
    implementations: Sequence[str],
    *,
    config: bool = False,
    clock: float | None = None,
    device: str = "cpu",
) -> Look:
    """Every case through the named implementations and the references of its family, in the environment.

    Failing rows carry the id of the ledger entry that they fall under, in `known`.
    One thread, without repeated calls and relations: the same cases, the same rows, wherever it runs.
    EnvironmentUnusable when the process dies, with its last line, or is ended: after `CPU_LIMIT` seconds of CPU time, or
    `clock` on the clock, by default `cpu_limit.BACKSTOP` times as many; the message says which.
    """
    plan = {"cases": [c.to_json() for c in cases], "implementations": list(implementations)}
    stdin = json.dumps(plan | {"config": config, "device": device})
    done = ran(made, "parity.versions.look", stdin, CPU_LIMIT, device, clock)
    try:
        found = [decode(Row, line, f"environment {made.name}") for line in printed(done, ROW)]
    except UsageError as error:
        raise EnvironmentUnusable(str(error)) from None
    return Look(found, json.loads(next(iter(printed(done, CONFIG)))) if config else {})


def printed(done: subprocess.CompletedProcess[str], mark: str) -> list[str]:
    """What a process printed by `print_json` with this mark; anything else may stand between."""
    return [line.removeprefix(mark) for line in done.stdout.splitlines() if line.startswith(mark)]


def ran(
    made: Environment,
    module: str,
    stdin: str,
    cpu_limit: float,
    device: str,
    clock: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """A module run in the environment, which reads `stdin`, to its end; EnvironmentUnusable as for `look`."""
    settings = environment(device, 1) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    command = ["python", "-W", "ignore", "-m", module]
    try:
        done = made.run(command, settings=settings, capture=True, stdin=stdin, cpu_limit=cpu_limit, clock=clock)
    except LimitExceeded as error:
        raise EnvironmentUnusable(f"environment {made.name}: {error}") from None
    if done.returncode:
        last = one_line(done.stderr.rstrip().rpartition("\n")[2]) or f"python ended with status {done.returncode}"
        raise EnvironmentUnusable(f"environment {made.name}: {last}")
    return done


def main() -> int:
    """Runs the plan in this process."""
    from parity import data
    from parity.process import prepare
    from parity.registry import select
    from parity.results.ledger import Ledger

    plan = json.load(sys.stdin)
    prepare(plan["device"], threads=1)
    ledger = Ledger.load(data.ledger_file())
    wanted = select(plan["implementations"])
    references = [one for one in select(()) if one.role == "reference"]
    for raw in plan["cases"]:
        case = Case.from_json(raw)
        chosen = {one.id: one for one in (*references, *wanted) if one.family == case.family}
        for row in run_case(case, chosen.values(), plan["device"], thorough=False):
            if row.failing:
                row.known = ledger.match(row, facts(case))
            print_json(ROW, row.to_json())
    if plan["config"]:
        print_json(CONFIG, _config())
    return 0


def print_json(mark: str, content: Any) -> None:
    """Print strict JSON on a line of its own, behind a mark."""
    print(f"\n{mark}{json.dumps(content, allow_nan=False)}", flush=True)


def _config() -> dict[str, Any]:
    """Defaults that a user may leave alone; one that is no plain value as Python writes it."""
    from parity.upstream import trl

    plain = (bool, int, float, str, type(None))
    known = {
        name: value
        for name, value in trl.fields(trl.class_named("GRPOConfig")).items()
        if value is not dataclasses.MISSING
    }
    return {name: value if isinstance(value, plain) else repr(value) for name, value in known.items()}


if __name__ == "__main__":
    sys.exit(main())
