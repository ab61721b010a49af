"""Run cases inside an environment and return result rows, for history, its recall, bisect and compare.

`python -m parity.versions.look` reads a plan (JSON) from its standard input and prints one row a line, and the defaults
of GRPOConfig where the plan asks for them; `look` is the caller's side.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from parity import data
from parity.case.case import Case
from parity.decoding import decode
from parity.errors import UsageError
from parity.process import environment, prepare
from parity.registry import facts, run_case, select
from parity.results.ledger import Ledger
from parity.results.row import Row
from parity.running.child import LimitExceeded
from parity.sampling.capabilities import nearest
from parity.upstream import trl
from parity.versions.client import EnvironmentUnusable, one_line
from parity.versions.environment import Environment

CPU_LIMIT = 600.0
"""Seconds of CPU time of a probe, its children included; on the clock `child.BACKSTOP` times as many."""
ROW, CONFIG = "parity-row ", "parity-config "


@dataclasses.dataclass(frozen=True)
class Look:
    """What a probe saw: result rows; name -> default of the fields of GRPOConfig (empty if not asked for)."""

    rows: list[Row]
    config: dict[str, Any]


def rows(
    made: Environment, cases: Sequence[Case], wanted: Sequence[str], device: str = "cpu", near: bool = False
) -> list[Row]:
    return look(made, cases, wanted, device=device, near=near).rows


def look(
    made: Environment,
    cases: Sequence[Case],
    implementations: Sequence[str],
    *,
    config: bool = False,
    near: bool = False,
    clock: float | None = None,
    device: str = "cpu",
) -> Look:
    """Every case through the named implementations and the references of its family, in the environment.

    `near`: also, where one of the named does not take a case of a loss there, the nearest case that it takes.

    Failing rows carry the id of the ledger entry that they fall under, in `known`.
    One thread, without repeated calls and relations: the same cases, the same rows, wherever it runs.
    EnvironmentUnusable when the process dies, with its last line, or is ended: after `CPU_LIMIT` seconds of CPU time, or
    `clock` on the clock, by default `child.BACKSTOP` times as many; the message says which.
    """
    plan = {"cases": [c.to_json() for c in cases], "implementations": list(implementations)}
    stdin = json.dumps(plan | {"config": config, "near": near, "device": device})
    settings = environment(device, 1) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    command = ["python", "-W", "ignore", "-m", "parity.versions.look"]
    try:
        done = made.run(command, settings=settings, capture=True, stdin=stdin, cpu_limit=CPU_LIMIT, clock=clock)
    except LimitExceeded as error:
        raise EnvironmentUnusable(f"environment {made.name}: {error}") from None
    if done.returncode:
        last = one_line(done.stderr.rstrip().rpartition("\n")[2]) or f"python ended with status {done.returncode}"
        raise EnvironmentUnusable(f"environment {made.name}: {last}")
    shown, about = (
        [line.removeprefix(mark) for line in done.stdout.splitlines() if line.startswith(mark)]
        for mark in (ROW, CONFIG)
    )
    try:
        return Look(
            [decode(Row, line, f"environment {made.name}") for line in shown], json.loads(about[0]) if config else {}
        )
    except UsageError as error:
        raise EnvironmentUnusable(str(error)) from None


def main() -> int:
    """Runs the plan in this process; lines without the marks may stand between."""
    plan = json.load(sys.stdin)
    prepare(plan["device"], threads=1)
    ledger = Ledger.load(data.ledger_file())
    wanted = select(plan["implementations"])
    references = [one for one in select(()) if one.role == "reference"]
    cases = {case.id: case for case in map(Case.from_json, plan["cases"])}
    if plan["near"]:
        pairs = [(i, case) for i in wanted for case in cases.values() if i.family == case.family and not i.is_trainer]
        cases |= {found.id: found for i, case in pairs if (found := nearest(i, case, plan["device"]))}
    for case in cases.values():
        chosen = {one.id: one for one in (*references, *wanted) if one.family == case.family}
        for row in run_case(case, chosen.values(), plan["device"], thorough=False):
            if row.failing:
                row.known = ledger.match(row, facts(case))
            print(f"\n{ROW}{json.dumps(row.to_json(), allow_nan=False)}", flush=True)
    if plan["config"]:
        print(f"\n{CONFIG}{json.dumps(_config(), allow_nan=False)}", flush=True)
    return 0


def _config() -> dict[str, Any]:
    """Defaults that a user may leave alone; one that is no plain value as Python writes it."""
    known = trl.fields(trl.class_named("GRPOConfig"))
    given = {name: value for name, value in known.items() if value is not dataclasses.MISSING}
    plain = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, plain) else repr(value) for name, value in given.items()}


if __name__ == "__main__":
    sys.exit(main())
