"""`parity init`: a first test and a workflow in a repository of kernels or losses."""

import importlib.metadata
import json
import re
import shlex
import subprocess
from pathlib import Path

import click

from parity.errors import UsageError

TEST = '''"""Our kernels against their definitions in float64, forward and backward; tolerances follow from rounding."""

import pytest
import torch
from parity.testing import assert_parity


def rms_norm(x, weight, eps=1e-6):
    """The definition: plain torch, for any dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def kernel(x, weight):
    """Call your kernel here."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rms_norm(rows, dtype):
    x, weight = torch.randn(rows, 1024).to(dtype), torch.randn(1024).to(dtype)
    assert_parity(kernel, definition=rms_norm, inputs={"x": x, "weight": weight})
'''
WORKFLOW = """name: parity
on:
  pull_request:
  schedule:
    - cron: "17 3 * * *"  # new releases of what is not pinned
jobs:
  parity:
    runs-on: ubuntu-latest  # a kernel for a GPU: a runner that has one
    steps:
      - uses: actions/checkout@v6
      - uses: actions/setup-python@v6
        with:
          python-version: "3.12"
      - run: pip install pytest {requirement}{own}
      - run: python -m pytest {test}
{gate}"""
GATE = """      - run: parity run --implementation {loss} --ledger {ledger}
      - run: cat reports/summary.md >> "$GITHUB_STEP_SUMMARY"
        if: always()
"""
OWN = {"requirements.txt": "-r requirements.txt", "pyproject.toml": "-e .", "setup.py": "-e ."}
"""File of a repository -> how pip installs what its losses need."""
UNKNOWN = "https://github.com/OWNER/llm-parity"
LEDGER = "# What is known to be wrong with our losses, besides the shipped ledger; written by `parity ledger add`.\n"


def init(folder: Path, loss: str | None) -> None:
    """Write what is not there yet, and say which; `loss`: FILE.py:NAME, which a pull request is then judged by. Raises
    UsageError where `folder` is no repository, cannot be written, or has no such loss."""
    if not (folder / ".git").exists():
        raise UsageError(f"{folder}: no git repository; run `parity init` in the folder that holds .git")
    if loss is not None:
        _check(folder, loss)
    tests = next((name for name in ("tests", "test") if (folder / name).is_dir()), "tests")
    test, requirement = f"{tests}/test_parity.py", _requirement("[cli]" if loss else "")
    quoted, ledger = shlex.quote(loss or ""), f"{tests}/parity-ledger.toml"
    gate = GATE.format(loss=quoted, ledger=ledger) if loss else ""
    own = next((f" {words}" for name, words in OWN.items() if (folder / name).is_file()), "")
    workflow = WORKFLOW.format(requirement=requirement, own=own, test=test, gate=gate)
    files = {test: TEST, ".github/workflows/parity.yml": workflow} | ({ledger: LEDGER} if loss else {})
    for name, text in files.items():
        file = folder / name
        if file.exists():
            click.echo(f"{name} is there already")
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
        click.echo(f"wrote {name}")
    click.echo(f"the workflow installs {requirement}: change that line if pip cannot get it from there")
    click.echo(f"next: python -m pytest {test}")
    if loss:
        click.echo(f"      parity run --implementation {quoted} --ledger {ledger}")


def _check(folder: Path, loss: str) -> None:
    """Refuse what a workflow could not name, and a function that is not there."""
    file, _, name = loss.rpartition(":")
    if not re.fullmatch(r"[\w./ -]+\.py", file) or Path(file).is_absolute() or ".." in Path(file).parts:
        raise UsageError(f"{loss}: expected FILE.py:NAME of a file below {folder}, without signs that a shell reads")
    if not (folder / file).is_file():
        raise UsageError(f"{loss}: expected FILE.py:NAME of a function in {folder}")
    if not re.search(
        rf"^(def|class) {re.escape(name)}\b|^{re.escape(name)}\s*[:=]", (folder / file).read_text(), re.MULTILINE
    ):
        raise UsageError(f"{loss}: {file} defines no {name}")


def _requirement(extra: str) -> str:
    """How pip gets what runs here: from the repository that it was installed from, or that it stands in. Where that has no
    address, OWNER stands for it: the name is not published."""
    try:
        told = importlib.metadata.distribution("llm-parity").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        told = None
    source = json.loads(told or "{}")
    if "vcs_info" in source:
        return f"'llm-parity{extra} @ git+{source['url']}@{source['vcs_info']['commit_id']}'"
    folder = Path(source.get("url", "").removeprefix("file://") or Path(__file__).parents[2])
    origin = ""
    if (folder / ".git").exists():  # else that of a repository around site-packages
        asked = ["git", "-C", str(folder), "remote", "get-url", "origin"]
        origin = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    origin = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]|^https://[^/@]*@([^/]+)/", r"https://\1\2/", origin)
    return f"'llm-parity{extra} @ git+{origin if origin.startswith('https://') else UNKNOWN}'"
