"""A worker process, in which implementations run: reads a plan, writes one JSON event a line to its standard output.

`python -m parity.running.worker PLAN.json`. A separate process, because an implementation may hang or take the process down.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from parity.process import prepare


def main(path: str) -> int:
    """Run the shards of a plan; the last event is `Done`."""
    plan: dict[str, Any] = json.loads(Path(path).read_text())
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with events
    prepare(plan["device"], plan["threads"])

    from parity.running.events import Done, Event, ShardDone, line_of

    def emit(event: Event) -> None:
        events.write(line_of(event))

    from parity.case.case import Case
    from parity.case.profiles import PROFILES
    from parity.registry import resolved, select
    from parity.results.ledger import Ledger
    from parity.running.shard import Session, Shard
    from parity.trainers.catalogue import is_trainer

    for name in plan["families"]:
        resolved(name)
    session = Session(
        implementations=[i for i in select(plan["implementations"]) if i.id not in plan.get("exclude", ())],
        profile_name=plan["profile"],
        profile=PROFILES[plan["profile"]],
        dtypes=plan["dtypes"],
        device=plan["device"],
        ledger=Ledger.load(Path(plan["ledger"])),
        findings_dir=Path(plan["findings"]),
        emit=emit,
    )
    frozen = [(name, Case.from_json(case), extra) for name, case, extra in plan["frozen"]]
    for raw in plan["shards"]:
        shard = Shard(**raw | {"skip": tuple(map(tuple, raw.get("skip", ())))})
        if shard.count == 0:
            session.frozen(shard, frozen)
        elif is_trainer(shard.family):
            session.checks(shard)
        else:
            session.drawn(shard)
        emit(ShardDone())
    emit(Done())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
