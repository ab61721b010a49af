"""The first hour on a new GPU box: `make cuda-first` runs its steps in order and writes what came out to docs/results/.

Each step is worth something alone and ends within ten minutes; one that fails or hangs stops none that follows.
"""

import collections
import dataclasses
import datetime
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from parity.results.report import measured
from parity.results.row import Row
from parity.running import gpu
from parity.running.provenance import header

LIMIT = 600.0
NOTHING = 3
REPORTS = Path("reports/cuda-first")
PLAIN = ("-o", "addopts=--import-mode=importlib -ra -p no:cacheprovider")
"""Where a plugin of the tests is missing, its options are no error."""
FROZEN = ("one-token", "policy-window", "divergence-window")


@dataclasses.dataclass(frozen=True)
class FirstHourCommand:
    """A command of the first hour and what it is for; `results` names the folder of its rows, if it writes any."""

    name: str
    command: tuple[str, ...]
    results: Path | None = None


@dataclasses.dataclass(frozen=True)
class Done:
    """A step, how it ended (None: it ran past its limit), how long it took, and the end of what it said."""

    step: FirstHourCommand
    code: int | None
    seconds: float
    said: str


def steps() -> tuple[FirstHourCommand, ...]:
    """The hour in order: what is there, three frozen cases, each family and a trainer, what only CUDA has, benchmarks."""
    parity = (sys.executable, "-m", "parity")
    out = [FirstHourCommand("doctor", (*parity, "doctor"))]
    out += [FirstHourCommand(f"replay {case}", (*parity, "replay", case, "--device", "cuda")) for case in FROZEN]
    for name in ("logprobs", "policy", "divergence", "grpo-trainer"):
        folder = REPORTS / name
        run = (*parity, "run", "--profile", "quick", "--device", "cuda", "--family", name, "--reports", str(folder))
        out.append(FirstHourCommand(f"quick {name}", run, folder / "results.ndjson"))
    pytest = (sys.executable, "-m", "pytest", "-q", *PLAIN)
    out += [
        FirstHourCommand(
            " ".join(words), (*pytest, f"cases/cuda/test_{words[0]}.py", *(("-k", words[1]) if words[1:] else ()))
        )
        for words in (
            ["faults"],
            ["soak"],
            ["large", "vocabularies"],
            ["large", "beyond"],
            ["large", "lock"],
            ["contexts"],
        )
    ]
    for name in ("replicas", "losses", "step"):
        words = (f"cases/bench/test_{name}.py", "--benchmark-only")
        out.append(FirstHourCommand(f"bench {name}", (*pytest, *words)))
    return tuple(out)


def run(step: FirstHourCommand, limit: float = LIMIT) -> Done:
    """Run a step; what it raises or exceeds is its result."""
    begun = time.monotonic()
    try:
        done = subprocess.run(step.command, capture_output=True, text=True, timeout=limit, errors="replace")
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, said = None, f"no end in {limit:.0f} s\n{(error.stdout or b'')[-2000:]!r}"
    except OSError as error:
        code, said = None, str(error)
    return Done(step, code, time.monotonic() - begun, "\n".join(said.splitlines()[-30:]))


def quantiles(rows: Iterable[Row]) -> list[str]:
    """Headroom of every implementation and gate that was compared on CUDA: median, 99th percentile, worst; as Markdown."""
    found = collections.defaultdict(list)
    for row in rows:
        if row.device == "cuda" and row.gate and row.headroom is not None:
            found[(row.implementation, row.gate)].append(row.headroom)
    out = []
    for (name, gate), values in sorted(found.items()):
        values.sort()
        half, most = values[len(values) // 2], values[min(len(values) - 1, len(values) * 99 // 100)]
        out.append([name, gate, str(len(values)), *(f"{v:.2g}" for v in (half, most, values[-1]))])
    return measured.table(["implementation", "gate", "rows", "median", "99 %", "worst"], out)


def page(about: dict[str, object], done: Sequence[Done], rows: Sequence[Row]) -> str:
    """What a reader must know of the hour: where it ran, what was compared there, what is new, each step's end."""
    on_gpu = {(r.implementation, r.case) for r in rows if r.device == "cuda" and r.judged}
    on_cpu = {(r.implementation, r.case) for r in rows if r.device == "cpu" and r.judged}
    new = collections.Counter((r.implementation, r.quantity, r.cls, r.message[:100]) for r in rows if r.new)
    facts = ([name, str(value)] for name, value in about.items())
    lines = [f"# First hour on {about['device_name']}", "", *measured.table(["", ""], facts)]
    lines += ["", f"Compared on CUDA: {len(on_gpu)} implementation-cases; on the CPU: {len(on_cpu)}.", "", "## New", ""]
    lines += [f"- {count} × {' · '.join(map(str, what))}" for what, count in new.most_common(40)] or ["Nothing."]
    lines += ["", "## Headroom", "", *quantiles(rows), "", "## Steps", ""]
    for one in done:
        end = "ran past its limit" if one.code is None else f"exit code {one.code}"
        lines += [f"### {one.step.name}: {end}, {one.seconds:.0f} s", "", f"`{' '.join(one.step.command[1:])}`", ""]
        lines += ["```", one.said.replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def described() -> dict[str, Any]:
    """The header of a run, or where the device does not even answer the probes, what it said."""
    try:
        found: dict[str, Any] = header("cuda-first", "cuda", "quick", 0).to_json()["header"]
        return found
    except RuntimeError as error:
        return {"device_name": "cuda", "error": str(error).replace("\n", " ")}


def main(folder: Path = Path("docs/results")) -> int:
    """0 when the page is written, whatever the steps came to; 3 on a machine without a usable GPU, which it says."""
    import torch

    if not torch.cuda.is_available():
        print(gpu.unusable() or "no CUDA device here: nothing of the first hour can be run", file=sys.stderr)
        return NOTHING
    from parity.results.report.rows import read

    about = described()
    done: list[Done] = []
    rows: list[Row] = []
    today = datetime.datetime.now(datetime.UTC).date()
    path = folder / f"{re.sub('[^a-z0-9]+', '-', str(about['device_name']).lower())}-{today}.md"
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps():
        done.append(run(step))
        print(f"{step.name}: {done[-1].code}, {done[-1].seconds:.0f} s", flush=True)
        if step.results is not None and step.results.exists():
            rows += read(step.results)[1]
        path.write_text(page(about, done, rows), encoding="utf-8")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
