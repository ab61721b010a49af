"""Several processes that train together: torchrun starts `python -m parity.trainers.rig.ranks PLAN.json` in each.

They talk through gloo on loopback, and write the gradients, after the reduction, and the sequences that they were given.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.judge.calls import told
from parity.process import environment
from parity.trainers.rig import recorder

TIMEOUT = 300.0
JOINING = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in the environment of each process."""
FULL_SHARD: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
"""What turns FSDP2 on in a config, each decoder layer a unit of its own."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank did in the first optimizer step."""

    gradients: dict[str, Tensor]  # name -> gradient behind the reduction, put together where each rank holds a shard
    sequences: list[tuple[list[int], int]]  # those that it was given
    log: dict[str, float] = dataclasses.field(default_factory=dict)  # the numbers that it logged
    sharded: int = 0  # the number of parameters of which it holds a shard
    counted: bool = True  # whether the training loop told it how many tokens the window has
    failure: str = ""  # the exception that ended the step, empty if none did


def launch(
    build: str, trainers: Mapping[str, Mapping[str, Any]], sharding: str, ranks: int, path: str = "released"
) -> dict[str, list[Rank]]:
    """Train trainers in `ranks` processes, one launch for all of them. `build`: "module:function" that makes one, called with
    its family, its settings, the path and fields of its config; `trainers`: family -> settings; `sharding`: "none" or
    "fsdp2". Raises Unsupported when a process fails or takes longer than `TIMEOUT` seconds, with the last error."""
    with tempfile.TemporaryDirectory(prefix="parity-ranks-") as name:
        plan = Path(name, "plan.json")
        plan.write_text(json.dumps([build, trainers, sharding, path]))
        started("parity.trainers.rig.ranks", [str(plan)], ranks)
        return {t: [Rank(**torch.load(plan.parent / f"{t}-{i}")) for i in range(ranks)] for t in trainers}


def started(module: str, argv: Sequence[str], ranks: int) -> None:
    """Runs a module in `ranks` processes that can talk to each other. Raises Unsupported when one fails or takes longer than
    `TIMEOUT` seconds, with the last error."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", module, *argv]
    env = os.environ | environment("cpu") | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([sys.executable, *torchrun], env=env, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise Unsupported(f"{ranks} ranks did not end within {TIMEOUT:.0f} s") from None
        finally:
            process.terminate()  # torchrun ends its ranks
        log.seek(0)
        if code:
            errors = re.findall(r"\w+Error: .*", log.read().decode(errors="replace"))
            raise Unsupported(f"{ranks} ranks failed: {errors[-1] if errors else f'exit code {code}'}")


def main(argv: Sequence[str]) -> NoReturn:
    from parity.process import prepare

    prepare("cpu")
    from parity.trainers.rig import drive, models, twin_runs

    joining = {name: os.environ.pop(name) for name in JOINING}  # with them transformers saves a model on one rank alone
    for architecture in ("llama", "qwen2"):
        models.saved(architecture)
    os.environ.update(joining)
    plan = Path(argv[0])
    build, trainers, sharding, path = json.loads(plan.read_text())
    built_by = pkgutil.resolve_name(build)
    with sharding_on_any_device() if sharding == "fsdp2" else contextlib.nullcontext():
        for trainer, settings in trainers.items():
            more = recorder.LOGGED | (FULL_SHARD if sharding == "fsdp2" else {})
            try:
                built = built_by(trainer, SimpleNamespace(**settings), path, **more)
                steps = twin_runs.train(built, path)
                gradients = {n: g for n, g in steps.gradients[0].items() if g is not None}
                log = {n: v for n, v in drive.logged(built).items() if isinstance(v, int | float)}
                counted = any(n is not None for n in steps.items)
                found = Rank(gradients, recorder.sequences_of(steps.window(0)), log, steps.sharded, counted)
            except Exception as error:  # on every rank alike, or the others wait for this one until the launch gives up
                traceback.print_exc()
                found = Rank({}, [], failure=told(error)[:300])
            torch.save(dataclasses.asdict(found), plan.parent / f"{trainer}-{os.environ['RANK']}")
    leave()


def leave() -> NoReturn:
    """End this process as it stands. Gloo's threads need Python's lock to let go of their tensors: an interpreter that ends
    holds it while it waits for them, and hangs, or is gone, and they abort."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def sharding_on_any_device() -> Iterator[None]:
    """Within it accelerate shards over gloo on the CPU too, with its own code. `AcceleratorState` takes an FSDP plugin
    into account for GPUs and their like alone; with several processes on the CPU it leaves it aside without a word.
    Everything behind that (torch's fully_shard, the reduction) runs on the CPU."""
    from accelerate import state
    from accelerate.utils import DistributedType

    original = state.AcceleratorState.__init__

    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with mock.patch.object(state.AcceleratorState, "__init__", initialised):
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
