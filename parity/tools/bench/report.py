"""Records of pytest-benchmark -> the tables, the decisions and the plot of docs/performance.md, as a page of docs/measured.

`python -m parity.tools.bench.report reports/benchmark.json [--plot docs/measured/performance.svg]`
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity.results.report import measured

OURS = {"logprobs": "fixes.selective_log_probs", "policy": "fixes.FusedLinearGRPOLoss", "step": "ours"}
INEXACT = ("cce.default",)  # drops gradients below its filter, so it is no peer to be as fast as
TRITON = ("cce.unfiltered", "trl.ChunkedLogProbFunction", "trl.GRPOTrainer", "liger.triton_grpo_loss")
"""Peers that run Triton kernels of their own on CUDA; on the CPU they are interpreted or take a torch path."""


@dataclass(frozen=True)
class Benchmark:
    """One implementation at one size: seconds by round, peak bytes, peaks and seconds of phases, or why there are none."""

    table: str
    size: str
    dtype: str
    name: str
    seconds: dict[int, float]
    peak: int | None
    peaks: dict[str, int]
    phases: dict[str, float]
    why: str | None
    device: str = "cpu"
    errors: dict[str, float] = field(default_factory=dict)

    def as_accurate_as(self, other: Benchmark) -> bool:
        """Whether no error is more than twice the other's or twice a float32's rounding: another order, no narrower dtype."""
        limits = {name: 2 * max(other.errors.get(name, 0.0), 2**-23) for name in self.errors}
        return bool(limits) and all(self.errors[name] <= limit for name, limit in limits.items())

    def on_or_below(self, other: Benchmark) -> bool:
        """Whether it needs no more memory and, in the median of the rounds, no more time, both within 2 %."""
        ratio = self.ratio(other)
        return ratio is not None and ratio[0] <= 1.02 and (self.peak or 0) <= 1.02 * (other.peak or 0)

    def ratio(self, ours: Benchmark) -> tuple[float, float, float] | None:
        """Seconds over ours in the rounds that both were in (a run may be interrupted): median, least, greatest.

        None without such a round, as where ours ran out of memory.
        """
        each = [value / ours.seconds[turn] for turn, value in self.seconds.items() if turn in ours.seconds]
        return (statistics.median(each), min(each), max(each)) if each else None


def benchmarks(records: Iterable[dict[str, Any]]) -> list[Benchmark]:
    """One for each implementation, size and dtype of pytest-benchmark's records, in their order."""
    grouped: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        info = record["extra_info"]
        grouped.setdefault(tuple(info[k] for k in ("table", "size", "dtype", "name")), []).append(record)
    found = []
    for (table, size, dtype, name), rounds in grouped.items():
        info = rounds[0]["extra_info"]
        timed = {} if info["why"] else {r["extra_info"]["turn"]: r["stats"]["mean"] for r in rounds}
        by_phase = [r["extra_info"].get("seconds", {}) for r in rounds]
        phases = {p: statistics.median(s[p] for s in by_phase) for p in by_phase[0]}
        peak, peaks = info.get("peak"), info.get("peaks", {})
        where, errors = info.get("device", "cpu"), info.get("errors", {})
        found.append(Benchmark(table, size, dtype, name, timed, peak, peaks, phases, info["why"], where, errors))
    return found


def tables(found: Sequence[Benchmark]) -> str:
    """Markdown: one table for each size and dtype."""
    out = []
    for table, size, dtype in dict.fromkeys((c.table, c.size, c.dtype) for c in found):
        group = [c for c in found if (c.table, c.size, c.dtype) == (table, size, dtype)]
        ours = next(c for c in group if c.name == OURS[table])
        out += [f"**{table}, {size}, {dtype}**", ""]
        phases = list(next((c.phases for c in group if c.phases), ()))
        errors = list(ours.errors)
        head = ["", ">time ÷ ours", ">seconds", ">peak ÷ ours", ">peak MB", *(f">error of the {e}" for e in errors)]
        head += [f">{p}: s, MB" for p in phases]
        rows = (
            _cells(benchmark, ours, phases, errors) for benchmark in sorted(group, key=lambda c: c.name != ours.name)
        )
        out += [*measured.table(head, rows), ""]
    return "\n".join(out)


def decisions(found: Sequence[Benchmark]) -> str:
    """Markdown: ours against the fastest and the leanest correct peer, the frontier, and whether a Triton path would pay.

    The frontier: peers that none of our points (plain, `memory_budget`, `narrow_products`) of their accuracy is on or below.

    A Triton path pays where a peer's Triton kernel was faster than our torch path in every round, it does not where it was slower
    in every round; else the rounds disagree and more of them are needed.
    """
    head = ["", "fastest peer: our time ÷ its", "leanest peer: our peak ÷ its", "below ours"]
    head.append("a Triton path of our own")
    out = []
    for table, size, dtype in dict.fromkeys((c.table, c.size, c.dtype) for c in found if c.table != "step"):
        group = [c for c in found if (c.table, c.size, c.dtype) == (table, size, dtype) and not c.why]
        ours = next((c for c in group if c.name == OURS[table]), None)
        where = f"{table}, {size}, {dtype}"
        if ours is None:
            out.append([where, "ours was not measured", "", "", ""])
            continue
        own = [c for c in group if c.name.startswith("fixes.")]
        peers = [(c, r) for c in group if c not in own and c.name not in INEXACT and (r := c.ratio(ours))]
        below = [c.name for c, _ in peers if not any(o.as_accurate_as(c) and o.on_or_below(c) for o in own)]
        fast = min(peers, key=lambda peer: peer[1][0], default=None)
        lean = min((c for c, _ in peers if c.peak), key=lambda c: c.peak or 0, default=None)
        kernels = [(c, r) for c, r in peers if c.name in TRITON and c.device == "cuda"]
        row = [where, "no peer" if fast is None else f"{fast[0].name}: {1 / fast[1][0]:.2f}"]
        row.append("no peer" if lean is None else f"{lean.name}: {(ours.peak or 0) / (lean.peak or 1):.2f}")
        row.append((", ".join(below) or "none") if ours.errors else "no reference")
        out.append([*row, _pays(min(kernels, key=lambda peer: peer[1][0], default=None))])
    return "\n".join([*measured.table(head, out), ""])


def _pays(kernel: tuple[Benchmark, tuple[float, float, float]] | None) -> str:
    if kernel is None:
        return "not decided: no Triton kernel was timed"
    benchmark, (median, least, greatest) = kernel
    sentence = f"{benchmark.name} takes {median:.2f} ({least:.2f} to {greatest:.2f}) of our torch path's time"
    return f"{'pays' if greatest < 1 else 'does not pay' if least > 1 else 'rounds disagree'}: {sentence}"


def _cells(benchmark: Benchmark, ours: Benchmark, phases: Sequence[str], errors: Sequence[str]) -> list[str]:
    if benchmark.why:
        return [benchmark.name, benchmark.why, *[""] * (3 + len(phases) + len(errors))]
    ratio, seconds = benchmark.ratio(ours), statistics.median(benchmark.seconds.values())
    assert benchmark.peak is not None
    out = [benchmark.name, "" if ratio is None else "{:.2f} ({:.2f} to {:.2f})".format(*ratio), f"{seconds:.3g}"]
    out += [f"{benchmark.peak / ours.peak:.2f}" if ours.peak else "", f"{benchmark.peak / 1e6:,.0f}"]
    out += [f"{benchmark.errors[e]:.1e}" if e in benchmark.errors else "" for e in errors]
    return out + [f"{benchmark.phases[p]:.2f}, {benchmark.peaks.get(p, 0) / 1e6:,.0f}" for p in phases]


COLOURS = ("#1b6ca8", "#c0392b", "#27864e", "#8e44ad", "#b9770e", "#555555", "#0e7c7b", "#a04000")
WIDTH, HEIGHT, MARGIN, LIMIT = 760, 420, 60, 16.0


def plot(found: Sequence[Benchmark]) -> str:
    """SVG: time against peak memory, both over ours and logarithmic; ours is the point (1, 1). Step tables left out."""
    points = [
        (c, ratio[0], (c.peak or 0) / (ours.peak or 1))
        for c in found
        if c.table != "step" and not c.why
        for ours in found
        if (ours.table, ours.size, ours.dtype, ours.name) == (c.table, c.size, c.dtype, OURS[c.table])
        if (ratio := c.ratio(ours))
    ]
    names = list(dict.fromkeys(c.name for c, _, _ in points))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 220} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16):
        x, y = _x(tick), _y(tick)
        colour = "#888" if tick == 1 else "#ddd"
        label = f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}"
        out.append(f'<path d="M{x:.0f} {MARGIN / 2}V{HEIGHT - MARGIN}M{MARGIN} {y:.0f}H{WIDTH}" stroke="{colour}"/>')
        out.append(f'<text x="{x:.0f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{label}</text>')
        out.append(f'<text x="{MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{label}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 20}" text-anchor="middle">time ÷ ours</text>')
    out.append(
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">peak memory ÷ ours</text>'
    )
    for benchmark, time, memory in points:
        colour = COLOURS[names.index(benchmark.name) % len(COLOURS)]
        fill = colour if benchmark.dtype == "fp32" else "none"
        title = f"{benchmark.name}, {benchmark.size}, {benchmark.dtype}: time {time:.2f}, memory {memory:.2f}"
        circle = f'<circle cx="{_x(time):.1f}" cy="{_y(memory):.1f}" r="5" fill="{fill}" stroke="{colour}">'
        out.append(f"{circle}<title>{title}</title></circle>")
    for i, name in enumerate([*names, "filled: fp32, open: bf16"]):
        colour = COLOURS[i % len(COLOURS)] if i < len(names) else "#000"
        out.append(f'<text x="{WIDTH + 14}" y="{MARGIN + 20 * i}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


def _x(ratio: float) -> float:
    return MARGIN + (WIDTH - MARGIN) * _place(ratio)


def _y(ratio: float) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 1.5 * MARGIN) * _place(ratio)


def _place(ratio: float) -> float:
    """0 at 1/8, 1 at 16; what lies beyond sits on the edge."""
    low, high = math.log2(1 / 8), math.log2(LIMIT)
    return (min(max(math.log2(ratio), low), high) - low) / (high - low)


def main() -> None:
    """Prints tables and decisions of a pytest-benchmark JSON file; `--plot FILE` writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    data = json.loads(options.records.read_text())
    found = benchmarks(data["benchmarks"])
    machine = data["machine_info"]
    print(measured.head("Time and memory of the fixes", "python -m parity.tools.bench.report", "performance.md"))
    print(f"{machine['cpu'].get('brand_raw', machine['processor'])}, {data['datetime'][:10]}\n")
    print(tables(found))
    print(decisions(found))
    if options.plot:
        options.plot.write_text(plot(found))


if __name__ == "__main__":
    main()
