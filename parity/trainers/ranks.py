"""Several processes that train together: `python -m parity.trainers.ranks PLAN.json`, rank and size from the environment.

The ranks talk through gloo on loopback, as torchrun would have started them. Each writes the gradients that it hands to
its optimizer, after the reduction, and the sequences that it was given.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from parity.errors import Unsupported
from parity.worker import environment

TIMEOUT = 300.0
JOINING = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in the environment of each process."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank did in the first optimizer step: its gradients, and the sequences that it was given."""

    gradients: dict[str, Tensor]
    sequences: list[tuple[list[int], int]]


def launch(trainers: Sequence[str], settings: Mapping[str, Any], ranks: int) -> dict[str, list[Rank]]:
    """Train each trainer's twin in `ranks` processes, one launch for all of them.

    Raises:
        Unsupported: when a process fails or takes longer than `TIMEOUT` seconds; the message is its last line.
    """
    with tempfile.TemporaryDirectory(prefix="parity-ranks-") as name:
        folder, port = Path(name), _free_port()
        (folder / "plan.json").write_text(json.dumps({"trainers": list(trainers), "settings": dict(settings)}))
        running = [_start(folder, rank, ranks, port) for rank in range(ranks)]
        _wait(running, folder)
        return {trainer: [_read(folder, trainer, rank) for rank in range(ranks)] for trainer in trainers}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _start(folder: Path, rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
    joining = dict(zip(JOINING, (rank, rank, ranks, ranks, "127.0.0.1", port), strict=True))
    settings = {name: str(value) for name, value in joining.items()} | {"ACCELERATE_USE_CPU": "true"}
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "parity.trainers.ranks", str(folder / "plan.json")],
            env=os.environ | environment("cpu", 1) | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(running: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    end = time.monotonic() + TIMEOUT
    try:
        while any(p.poll() is None for p in running):
            if any(p.poll() for p in running) or time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
    for rank, process in enumerate(running):
        if process.returncode > 0:
            last = (folder / f"{rank}.log").read_text(errors="replace").strip().rpartition("\n")[2]
            raise Unsupported(f"rank {rank} of {len(running)} failed: {last}")
    if any(process.returncode for process in running):
        raise Unsupported(f"{len(running)} ranks did not end within {TIMEOUT:.0f} s")


def _read(folder: Path, trainer: str, rank: int) -> Rank:
    from safetensors.torch import load_file

    sequences = json.loads((folder / f"{trainer}-{rank}.json").read_text())
    return Rank(load_file(folder / f"{trainer}-{rank}.safetensors"), [(ids, start) for ids, start in sequences])


def main(argv: Sequence[str]) -> int:
    """Runs the plan as one rank."""
    from parity.worker import prepare

    prepare("cpu", 1)
    from safetensors.torch import save_file

    from parity.trainers import models, recorded, twin_runs

    told = {name: os.environ.pop(name) for name in JOINING}  # with them transformers saves a model on one rank alone
    for architecture in ("llama", "qwen2"):
        models.saved(architecture)
    os.environ.update(told)
    plan = Path(argv[0])
    rank, wanted = int(os.environ["RANK"]), json.loads(plan.read_text())
    for trainer in wanted["trainers"]:
        steps = recorded.train(twin_runs.build(trainer, SimpleNamespace(**wanted["settings"])))
        found = {n: g.contiguous() for n, g in steps.gradients[0].items() if g is not None}
        save_file(found, plan.parent / f"{trainer}-{rank}.safetensors")
        (plan.parent / f"{trainer}-{rank}.json").write_text(json.dumps(twin_runs.seen(steps.window(0))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
