"""SDPO on two processes: where only one of them has a rollout to learn from, the two wait for different collectives."""

import contextlib
import faulthandler
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setup_processes import Keep
from setup_self import saved, sdpo
from setup_tiny import tiny

HANGS = 45  # seconds
CALLS = "all_gather gather all_reduce backward _engine_run_backward _compute_self_distillation_loss".split()
kind = sys.argv[-1]


def reward(prompts, **kwargs):
    return [1.0 if kind == "both" or p == "w2 w3" else 0.0 for p in prompts]


if os.environ.get("RANK") is not None:  # one of the two
    told = os.fdopen(os.open(os.path.join(os.environ["SAID"], os.environ["RANK"]), os.O_WRONLY | os.O_CREAT), "w")
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = sdpo(saved(tiny()), reward, shuffle_dataset=False)
    keep = Keep()
    trainer.add_callback(keep)
    faulthandler.dump_traceback_later(HANGS, exit=True, file=told)  # where it waits
    trainer.train()
    print(f"trained, gradient norm {keep.norms[0]:.5g}", file=told, flush=True)
    os._exit(0)


def outcome(kind):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    folder = tempfile.mkdtemp()
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "SAID": folder}
    command = [sys.executable, *launch, "--local-addr=127.0.0.1", sys.argv[0], kind]
    told = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = []
    for rank in "01":
        lines = Path(folder, rank).read_text().splitlines() if Path(folder, rank).exists() else []
        if not lines:
            raise SystemExit(told.stderr[-3000:])
        if lines[0].startswith("trained"):
            found.append(lines[0])
        else:
            calls = [line.split(" in ")[-1] for line in lines if line.lstrip().startswith("File")]
            known = [c for c in calls if c in CALLS]
            found.append(f"waits after {HANGS} s in " + " < ".join(known[:4] or calls[:6]))
    return found


found = {kind: outcome(kind) for kind in ("both", "one")}
print("| processes with a successful rollout | process 0 | process 1 |\n|---|---|---|")
for kind, (zero, one) in found.items():
    print(f"| {kind} | {zero} | {one} |")
raise SystemExit(int(any("trained" not in line for line in found["one"])))
