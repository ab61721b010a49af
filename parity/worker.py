"""The process in which implementations run: reads a plan, writes events to its standard output, one JSON object a line.

`python -m parity.worker PLAN.json`. A separate process, because an implementation may hang or take the process down.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


def environment(device: str, threads: int) -> dict[str, str]:
    """Environment variables of a worker: no hub, quiet libraries, and Triton's interpreter where there is no GPU."""
    out = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "UNSLOTH_IS_PRESENT": "1",
        "UNSLOTH_ALLOW_CPU": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return out | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})


def prepare(device: str, threads: int) -> None:
    """Settings that hold for every party and are recorded in the header: full float32 products, no tf32."""
    for name, value in environment(device, threads).items():
        os.environ.setdefault(name, value)
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    import torch._dynamo.config
    import torch._inductor.config  # imported before the first snapshot: it sets environment variables

    torch._dynamo.config.recompile_limit = 10_000  # shapes differ from case to case here, as they do not in training
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)


def main(argv: list[str]) -> int:
    """Run the shards of a plan; the last event is `{"done": true}`."""
    plan: dict[str, Any] = json.loads(Path(argv[0]).read_text())
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with events
    prepare(plan["device"], plan["threads"])

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event, allow_nan=False) + "\n")

    from parity.case import Case
    from parity.implementations import select
    from parity.ledger import Ledger
    from parity.profiles import PROFILES
    from parity.session import Session, Shard
    from parity.trainers import is_trainer

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
        emit({"shard": raw["family"], "index": raw["index"], "count": raw["count"]})
        if shard.count == 0:
            session.frozen(shard, frozen)
        elif is_trainer(shard.family):
            session.checks(shard)
        else:
            session.drawn(shard)
        emit({"shard_done": raw["family"], "index": raw["index"]})
    emit({"done": True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
