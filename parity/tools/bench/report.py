"""The records of cases/bench, which pytest-benchmark writes, as the tables and the picture of docs/measured/performance.md.

`python -m parity.tools.bench.report reports/benchmark.json [--plot docs/measured/performance.svg]`
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.results.report import measured

OURS = {"logprobs": "fixes.selective_log_probs", "policy": "fixes.FusedLinearGRPOLoss", "step": "ours"}
INEXACT = ("cce.default",)  # drops gradients below its filter, so it is no peer to be as fast as
WITHIN = 1.02
"""What counts as no more time and no more memory."""


@dataclass(frozen=True)
class Benchmark:
    """One implementation at one size: seconds by round, and of the first round what cases/bench told besides."""

    table: str
    size: str
    dtype: str
    name: str
    seconds: dict[int, float]
    phases: dict[str, float]
    told: dict[str, Any]

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.told.get("peak") or 0

    @property
    def errors(self) -> dict[str, float]:
        """Of the value and of the gradient; empty where nothing was compared."""
        return self.told.get("errors", {})

    def as_accurate_as(self, other: Benchmark) -> bool:
        """Whether no error is more than twice the other's or twice a float32's rounding: another order, no narrower dtype."""
        limits = {name: 2 * max(other.errors.get(name, 0.0), 2**-23) for name in self.errors}
        return bool(limits) and all(self.errors[name] <= limit for name, limit in limits.items())

    def on_or_below(self, other: Benchmark) -> bool:
        """Whether it needs no more memory and, in the median of the rounds, no more time."""
        ratio = self.ratio(other)
        return ratio is not None and ratio[0] <= WITHIN and self.peak <= WITHIN * other.peak

    def ratio(self, ours: Benchmark) -> tuple[float, float, float] | None:
        """Seconds over ours in the rounds that both were in (a run may be interrupted): median, least, greatest.

        None without such a round, as where ours ran out of memory.
        """
        each = [value / ours.seconds[turn] for turn, value in self.seconds.items() if turn in ours.seconds]
        return (statistics.median(each), min(each), max(each)) if each else None


def benchmarks(records: Iterable[dict[str, Any]]) -> list[Benchmark]:
    """One for each implementation, size and dtype that pytest-benchmark has records of, in their order."""
    grouped: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        if "table" not in (info := record["extra_info"]):
            continue
        grouped.setdefault((info["table"], info["size"], info["dtype"], info["name"]), []).append(record)
    found = []
    for key, rounds in grouped.items():
        told = rounds[0]["extra_info"]
        timed = {} if told["why"] else {r["extra_info"]["turn"]: r["stats"]["mean"] for r in rounds}
        by_phase = [r["extra_info"].get("seconds", {}) for r in rounds]
        phases = {p: statistics.median(s[p] for s in by_phase) for p in by_phase[0]}
        found.append(Benchmark(*key, timed, phases, told))
    return found


def groups(found: Sequence[Benchmark]) -> Iterator[tuple[Benchmark, list[Benchmark]]]:
    """(ours, all of them) of each size and dtype, ours first."""
    for key in dict.fromkeys((c.table, c.size, c.dtype) for c in found):
        group = [c for c in found if (c.table, c.size, c.dtype) == key]
        ours = next(c for c in group if c.name == OURS[key[0]])
        yield ours, sorted(group, key=lambda c: c is not ours)


def tables(found: Sequence[Benchmark]) -> str:
    """Markdown, loss by loss; a peer that no point of ours of its accuracy is on or below is marked."""
    out = []
    for table in dict.fromkeys(c.table for c in found):
        of_table = [*groups([c for c in found if c.table == table])]
        phases = next((list(c.phases) for _, group in of_table for c in group if c.phases), [])
        errors = next((list(ours.errors) for ours, _ in of_table if ours.errors), [])
        head = ["size", "dtype", "", ">time ÷ ours", ">seconds", ">peak ÷ ours", ">peak MB"]
        head += [*(f">error of the {e}" for e in errors), *(f">{p}: s, MB" for p in phases)]
        rows = [
            [ours.size, ours.dtype, *_cells(one, ours, errors, phases, one in below(group))]
            for ours, group in of_table
            for one in group
        ]
        out += [f"## {table}", "", *measured.table(head, rows), ""]
    return "\n".join(out)


def below(group: Sequence[Benchmark]) -> list[Benchmark]:
    """The peers that none of our points (plain, `memory_budget`, `narrow_products`) of their accuracy is on or below."""
    own = [c for c in group if c.name.startswith("fixes.") and c.errors]
    peers = [c for c in group if c not in own and c.name not in INEXACT and not c.told["why"]]
    return [c for c in peers if own and not any(o.as_accurate_as(c) and o.on_or_below(c) for o in own)]


def _cells(one: Benchmark, ours: Benchmark, errors: Sequence[str], phases: Sequence[str], is_below: bool) -> list[str]:
    if one.told["why"]:
        return [one.name, one.told["why"], *[""] * (3 + len(errors) + len(phases))]
    ratio, seconds = one.ratio(ours), statistics.median(one.seconds.values())
    out = [
        f"{one.name} (below ours)" if is_below else one.name,
        "" if ratio is None else "{:.2f} ({:.2f} to {:.2f})".format(*ratio),
        f"{seconds:.3g}",
    ]
    out += [f"{one.peak / ours.peak:.2f}" if ours.peak else "", f"{one.peak / 1e6:,.0f}"]
    out += [f"{one.errors[e]:.1e}" if e in one.errors else "" for e in errors]
    return out + [f"{one.phases[p]:.2f}, {one.told.get('peaks', {}).get(p, 0) / 1e6:,.0f}" for p in phases]


def plot(found: Sequence[Benchmark], path: Path) -> None:
    """Time against peak memory, both over ours and logarithmic; ours is the point (1, 1). Steps left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for ours, group in groups([c for c in found if c.table != "step"]):
        for one in group:
            if (ratio := one.ratio(ours)) and ours.peak:
                points.setdefault((one.name, one.dtype), []).append((ratio[0], one.peak / ours.peak))
    names = list(dict.fromkeys(name for name, _ in points))
    for (name, dtype), each in points.items():
        colour = f"C{names.index(name) % 10}"
        fill = colour if dtype == "fp32" else "none"
        axes.plot(*zip(*each, strict=True), "o", color=colour, label=f"{name}, {dtype}", markerfacecolor=fill)
    axes.set(xlabel="time ÷ ours", ylabel="peak memory ÷ ours")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Prints the tables of a pytest-benchmark JSON file; `--plot FILE` writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    data = json.loads(options.records.read_text())
    found, machine = benchmarks(data["benchmarks"]), data["machine_info"]
    print(measured.head("Time and memory of the fixes", "python -m parity.tools.bench.report", "performance.md"))
    print(f"{machine['cpu'].get('brand_raw', machine['processor'])}, {data['datetime'][:10]}\n")
    print(tables(found))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
