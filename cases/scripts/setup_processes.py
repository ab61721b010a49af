import os
import subprocess
import sys

import transformers


class Keep(transformers.TrainerCallback):
    """Norms of the gradients of each step, behind the reduction."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        squares = [float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None]
        self.norms.append(sum(squares) ** 0.5)


def norm(trainer):
    """Of the last gradient of a run."""
    keep = Keep()
    trainer.add_callback(keep)
    trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand in the table
    trainer.train()
    return keep.norms[-1]


def step(trainer):
    """One step: the sum of what `compute_loss` returned, and the norm of the gradient."""
    losses, compute = [], trainer.compute_loss

    def watched(*given, **options):
        losses.append(compute(*given, **options))
        return losses[-1]

    trainer.compute_loss = watched
    found = norm(trainer)
    return float(sum(losses).detach()), found


def compared(made):
    """Name -> (by two processes, by one): the norm of the gradient of two rows. `made`: name -> (rows of a process -> trainer)."""
    rank = os.environ.get("RANK")
    if rank is not None:  # one of the two
        found = {name: norm(make(1)) for name, make in made.items()}
        if rank == "0":
            print(*(f"norm of {name}: {value!r}" for name, value in found.items()), sep="\n", flush=True)
        os._exit(0)  # gloo's threads may abort an interpreter that ends
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [sys.executable, *launch, "--local-addr=127.0.0.1", sys.argv[0]]
    told = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    two = dict(line[8:].split(": ") for line in told.stdout.splitlines() if line.startswith("norm of "))
    if told.returncode or not two:
        raise SystemExit(told.stderr[-2000:])
    return {name: (float(two[name]), norm(make(2))) for name, make in made.items()}


def shown(found):
    """Print them, and end with 1 where they differ."""
    print("| the same two rows | gradient norm, two processes | one | relative distance |\n|---|---|---|---|")
    off = {name: abs(two / one - 1) for name, (two, one) in found.items()}
    for name, (two, one) in found.items():
        print(f"| {name} | {two:.5g} | {one:.5g} | {off[name]:.3g} |")
    raise SystemExit(int(max(off.values()) > 1e-3))
