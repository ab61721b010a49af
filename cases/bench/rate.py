"""Comparisons per CPU second by family, beside two fixed yardsticks.

`python -m cases.bench.rate [--profile quick] [--family NAME …]`

A comparison is one implementation on one case, forward and backward, held against float64. CPU time is that of `parity run`
with all its processes, imports and the frozen cases included; what g++ compiles, too.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cases.bench.measure import short
from parity.registry import NAMES
from parity.results.report import measured
from parity.results.report.findings import about_run
from parity.results.report.rows import read
from parity.running.outcome import cases_compared
from parity.running.provenance import revision

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "import torch; torch.set_num_threads(1); x = torch.ones(1024, 1024, dtype=torch.float64)\nfor _ in range(8): x @ x"
)
YARDSTICKS = {"import of torch": "import torch", "8 products of 1,024 x 1,024 matrices in float64": PRODUCT}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--family", action="append", default=[])
    args = parser.parse_args()
    print(measured.head("Comparisons per CPU second", "python -m cases.bench.rate"))
    seconds = {
        name: statistics.median(cpu([sys.executable, "-c", code], ROOT) for _ in range(3))
        for name, code in YARDSTICKS.items()
    }
    seconds["8 products of 1,024 x 1,024 matrices in float64"] -= seconds["import of torch"]
    print("Yardsticks, CPU seconds: " + ", ".join(f"{n} {short(s)}" for n, s in seconds.items()) + ".\n")
    heads = [f"profile {args.profile}", "revision", ">comparisons", ">CPU seconds", ">per CPU second"]
    print("\n".join(measured.table(heads, [])))
    for family in args.family or NAMES:
        print(row(family, str(revision()), *rate(ROOT, family, args.profile)), flush=True)
    return 0


def row(family: str, revision: str, count: int, seconds: float) -> str:
    return f"| {family} | {revision} | {count:,} | {short(seconds)} | {short(count / seconds)} |"


def cpu(command: list[str], root: Path) -> float:
    """CPU seconds of a command and all that it started, run with the package of the tree `root`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=root, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rate(root: Path, family: str, profile: str, run: Callable[[list[str], Path], float] = cpu) -> tuple[int, float]:
    """Comparisons of a run of one worker, and its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.ndjson"
        words = ["run", "--profile", profile, "--family", family, *"--workers 1 --device cpu --reports".split(), folder]
        seconds = run([sys.executable, "-m", "parity", *words, "--results", str(results)], root)
        if not results.exists():
            sys.exit(f"{root}: parity {' '.join(words)} wrote no results")
        return cases_compared(row for row in read(results)[1] if not about_run(row)).total(), seconds


if __name__ == "__main__":
    sys.exit(main())
