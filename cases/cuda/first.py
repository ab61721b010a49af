"""The first minutes on a new GPU box: `make cuda-first` runs its steps and writes what came out to docs/results/.

Each step is worth something alone and ends within five minutes; one that fails or hangs stops none of the others. Compiling
kernels takes most of the time, so steps run side by side, but for planted faults and what is timed (`ALONE`).
"""

import collections
import concurrent.futures
import datetime
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from parity.nightly.steps import run
from parity.results.memory import CommandOutcome
from parity.results.report import measured
from parity.results.report.rows import read
from parity.results.row import Row
from parity.running import gpu
from parity.running.provenance import header

LIMIT = 300.0
TOGETHER = 8
ALONE = ("faults", "bench")
WORKERS = ("--workers", "3")
NOTHING = 3
REPORTS = Path("reports/cuda-first")
PLAIN = ("-o", "addopts=--import-mode=importlib -ra -p no:cacheprovider", "-o", "timeout=200")
"""Where a plugin of the tests is missing, its options are no error. A test that hangs fails, and the next one runs. Names
come as the tests run, so that a step that is cut short has told something."""
FROZEN = ("one-token", "policy-window", "divergence-window")


def steps() -> dict[str, tuple[str, ...]]:
    """What is there, three frozen cases, each family and a trainer, what only CUDA has, benchmarks."""
    out: dict[str, tuple[str, ...]] = {"doctor": ("doctor",)}
    out |= {f"replay {case}": ("replay", case, "--device", "cuda") for case in FROZEN}
    for name in ("logprobs", "policy", "divergence", "preference", "grpo-trainer", "transformers-trainer"):
        words = ("run", "--profile", "quick", "--device", "cuda", "--family", name, *WORKERS)
        out[f"quick {name}"] = (*words, "--reports", str(REPORTS / name))
    pytest = ("pytest", "-v", *PLAIN)
    for name in ("soak", "large vocabularies", "large beyond", "large lock", "contexts", "training", "faults"):
        file, _, word = name.partition(" ")
        out[name] = (*pytest, f"cases/cuda/test_{file}.py", *(("-k", word) if word else ()))
    out["faults"] += ("-x",)
    rooms = (f"cases/selftest/{name}" for name in ("judge", "fixes", "protocol", "watching"))
    out["tests"] = (*pytest, "-n", "4", *rooms)
    out |= {f"bench {n}": (*pytest, f"cases/bench/test_{n}.py", "--benchmark-only") for n in ("replicas", "losses")}
    return out


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


def page(about: dict[str, object], done: Sequence[CommandOutcome], rows: Sequence[Row]) -> str:
    """What a reader must know of the hour: where it ran, what was compared there, what is new, each step's end."""
    on_gpu = {(r.implementation, r.case) for r in rows if r.device == "cuda" and r.judged}
    on_cpu = {(r.implementation, r.case) for r in rows if r.device == "cpu" and r.judged}
    new = collections.Counter((r.implementation, r.quantity, r.cls, r.message[:100]) for r in rows if r.new)
    facts = ([name, str(value)] for name, value in about.items())
    lines = [f"# First minutes on {about['device_name']}", "", *measured.table(["", ""], facts)]
    lines += ["", f"Compared on CUDA: {len(on_gpu)} implementation-cases; on the CPU: {len(on_cpu)}.", "", "## New", ""]
    lines += [f"- {count} × {' · '.join(map(str, what))}" for what, count in new.most_common(40)] or ["Nothing."]
    lines += ["", "## Headroom", "", *quantiles(rows), "", "## Steps", ""]
    for one in done:
        end = "ran past its limit" if one.exit_code is None else f"exit code {one.exit_code}"
        lines += [f"### {one.name}: {end}, {one.seconds:.0f} s", "", f"`{one.command}`", ""]
        lines += ["```", one.tail.replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def described() -> dict[str, Any]:
    """The header of a run, or where the device does not even answer the probes, what it said."""
    try:
        found: dict[str, Any] = to_builtins(header("cuda-first", "cuda", "quick", 0).header)
        return found
    except RuntimeError as error:
        return {"device_name": "cuda", "error": str(error).replace("\n", " ")}


def main(folder: Path = Path("docs/results")) -> int:
    """0 when the page is written, whatever the steps came to; 3 on a machine without a usable GPU, which it says."""
    import torch

    if not torch.cuda.is_available():
        print(gpu.unusable() or "no CUDA device here: nothing of this can be run", file=sys.stderr)
        return NOTHING
    about = described()
    done: list[CommandOutcome] = []
    rows: list[Row] = []
    today = datetime.datetime.now(datetime.UTC).date()
    path = folder / f"{re.sub('[^a-z0-9]+', '-', str(about['device_name']).lower())}-{today}.md"
    folder.mkdir(parents=True, exist_ok=True)
    todo = steps()
    for width, alone in ((TOGETHER, False), (1, True)):
        some = {name: words for name, words in todo.items() if name.startswith(ALONE) == alone}
        with concurrent.futures.ThreadPoolExecutor(width) as pool:
            running = {pool.submit(run, n, words, REPORTS / f"{n}.log", LIMIT): words for n, words in some.items()}
            for future in concurrent.futures.as_completed(running):
                done.append(future.result())
                print(f"{done[-1].name}: {done[-1].exit_code}, {done[-1].seconds:.0f} s", flush=True)
                results = Path(running[future][-1]) / "results.ndjson"
                if running[future][0] == "run" and results.exists():
                    rows += read(results)[1]
                path.write_text(page(about, done, rows), encoding="utf-8")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
