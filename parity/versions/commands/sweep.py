"""`parity list --sweep`: what became of every implementation in every release that it claims.

Each loss's adapter is called on the plain case and on each case of an audit with one setting moved (Triton's kernels run on
the plain one alone), each trainer's ways run one cell; the calls of losses are not compared with the definition.
`python -m parity.versions.commands.sweep` does that for the environment that it runs in and prints one line for each call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from packaging.version import Version

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.decoding import save_json, saved
from parity.implementations.implementation import Implementation
from parity.judging.compare import skip_reason
from parity.judging.execute import execute
from parity.process import prepare
from parity.registry import load, loss_families, loss_family, run_case
from parity.results.report import measured
from parity.results.report.markdown import code, escape
from parity.results.turns import NOT_RUN, RIGHT, WRONG, Turns
from parity.trainers import catalogue
from parity.versions.commands.matrix import folder
from parity.versions.commands.probe import print_json, printed, ran
from parity.versions.env.client import EnvironmentUnusable
from parity.versions.env.environment import Environment

RELEASES = {
    "trl": "0.14.0 0.15.2 0.17.0 0.20.0 0.22.2 0.24.0 0.26.2 0.28.0 0.29.1 1.1.0 1.5.0 1.6.0 1.9.2 1.10.0 1.13.0 1.14.2 1.16.0",
    "liger-kernel": "0.4.0 0.4.1 0.5.0 0.5.3 0.5.4 0.5.5 0.5.6 0.5.7 0.5.10 0.6.3 0.6.4 0.7.0 0.8.1 0.8.3 0.8.5",
    "cut-cross-entropy": "24.11.3 25.1.1",
    "unsloth-zoo": "2025.2.7 2025.5.11 2025.11.6 2026.1.4 2026.9.9 2026.10.9",
}
"""Releases whose environments are made; each brings the others of its era, which are judged too.

The first and the last of each library, and the releases where the signature of something in `Implementation.sources` changed
(read from every wheel of Liger and cut-cross-entropy, the last of each minor of TRL and of each second month of
unsloth-zoo). TRL's configs change with every minor: there the functions alone decide, and the releases where a failure of
`parity history` begins or ends.
"""
STATES = ("unknown", "judged", "refused", "absent", "nothing")
"""What a call needs that its adapter does not know; it ran; the library said no; no such function; no case for it here."""
MARKS = dict(zip(STATES, ("**U**", "✓", "R", "–", "·"), strict=True))
_ABSENT = re.compile(r"installed version|trl \S+ has no |this version of TRL has no |is not installed")
_LINE = "parity-sweep "
LIMIT = 900.0
"""Seconds of CPU time in one environment."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an adapter, or one cell of a trainer; `library`: what it belongs to, with its version there."""

    implementation: str
    library: str
    version: str
    case: str
    verdict: str
    message: str
    blame: str | None


@dataclasses.dataclass(frozen=True)
class SweptCell:
    """An implementation in a release: the state of its calls, how many ran out of how many, and why not."""

    state: str
    ran: int
    asked: int
    why: str


def cell(calls: Sequence[Call]) -> SweptCell:
    """The state of an implementation from all its calls, the plain case first."""
    ran = [c for c in calls if c.verdict not in ("unsupported", "refused") and c.blame != "harness"]
    unknown = [c for c in calls if c.blame == "harness"]
    refused = [c for c in calls if c.verdict == "refused"]
    absent = [c for c in calls if _ABSENT.search(c.message)]
    groups = (unknown, ran, refused, absent, calls)
    state, reasons = next((state, group[0]) for state, group in zip(STATES, groups, strict=True) if group)
    why = "" if state == "judged" else f"{reasons.case}: {reasons.message}"
    return SweptCell(state, len(ran), len(calls), why)


def sweep(
    specs: Sequence[str], say: Callable[[str], None], turns: Turns | None = None
) -> tuple[dict[str, dict[str, dict[str, SweptCell]]], list[str]]:
    """library -> implementation -> version -> cell, versions oldest first, and the environments that could not be used."""
    found: dict[tuple[str, str, str], list[Call]] = {}
    unusable = []
    turns = turns or Turns()
    for spec in turns.order(specs):
        turns.begin(spec)
        try:
            calls = run(Environment.of(spec.split()))
        except EnvironmentUnusable as error:
            turns.end(spec, NOT_RUN)
            unusable.append(f"{spec}: {error}")
            say(unusable[-1])
            continue
        for call in calls:
            found.setdefault((call.library, call.implementation, call.version), []).append(call)
        unknown = {c.implementation for c in calls if c.blame == "harness"}
        turns.end(spec, WRONG if unknown else RIGHT)
        say(f"{spec}: {len(calls)} calls" + (f", UNKNOWN to {', '.join(sorted(unknown))}" if unknown else ""))
    out: dict[str, dict[str, dict[str, SweptCell]]] = {}
    for library, implementation, version in sorted(found, key=lambda key: (key[0], key[1], Version(key[2]))):
        cells = out.setdefault(library, {}).setdefault(implementation, {})
        cells[version] = cell(found[library, implementation, version])
    return out, unusable


def run(made: Environment) -> list[Call]:
    """The calls in an environment, which are kept; EnvironmentUnusable where they do not come to an end."""
    file = folder("sweep", made.name) / "calls.json"
    known: list[Call] | None = saved(list[Call], file)
    if known is not None:
        return known
    done = ran(made, "parity.versions.commands.sweep", "", LIMIT, "cpu", TORCHDYNAMO_DISABLE="1")
    found = [msgspec.json.decode(line, type=Call) for line in printed(done, _LINE)]
    save_json(file, found)
    return found


def cases(name: str, dtype: str) -> dict[str, Case]:
    """Label -> case of a loss family: the plain ones, then each setting of an audit moved by itself on each of them."""
    family = loss_family(name)
    probes = [probe for probe in family.audited() if not probe.data]
    plain = [dict(base) for probe in probes for base in probe.bases] or [{}]
    out: dict[str, dict[str, Any]] = {"plain": {}} | {_label(base): base for base in plain}
    for probe in probes:
        for base in probe.bases:
            moved = {**base, **probe.among, probe.setting: probe.value}
            out[_label(moved)] = moved
    return {label: family.case(0, dtype, settings) for label, settings in out.items()}


def _label(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "plain"


def calls() -> Iterator[Call]:
    """Every call in this process's own environment, each implementation in the first dtype that it takes."""
    there = [i for i in load().values() if i.library and i.missing() is None and not i.opt_in]
    for name in loss_families():
        family = loss_family(name)
        done: dict[str, list[Call]] = {}
        for dtype in ("fp32", "fp16"):
            left = [i for i in there if i.family == name and not any(c.verdict == "ran" for c in done.get(i.id, ()))]
            made = {label: family.build(case) for label, case in cases(name, dtype).items()} if left else {}
            for i in left:
                tried = []
                for label, x in made.items():
                    with contextlib.nullcontext() if label == "plain" else _kernels_skipped():
                        tried.append(_call(family, i, label, x))
                if i.id not in done or any(c.verdict == "ran" for c in tried):
                    done[i.id] = tried
        yield from (call for tried in done.values() for call in tried)
    for name in catalogue.names():
        in_family = [i for i in there if i.family == name]
        listed = catalogue.cases(name, "pr", 0) or catalogue.cases(name, "nightly", 0)
        for case in [min(listed, key=lambda case: len(case.settings))]:
            for row in run_case(case, in_family):
                version = str(next(i for i in in_family if i.id == row.implementation).version())
                yield Call(
                    row.implementation, "trl", version, case.settings["check"], row.verdict, row.message, row.blame
                )


@contextlib.contextmanager
def _kernels_skipped() -> Iterator[None]:
    """Triton's interpreter runs no program: whether the arguments of a call fit shows without its numbers."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    run = GridExecutor.__call__
    GridExecutor.__call__ = lambda self, *args, **options: None
    try:
        yield
    finally:
        GridExecutor.__call__ = run


def _call(family: Family, implementation: Implementation, label: str, x: Inputs) -> Call:
    reason = skip_reason(family, implementation, x.case, x.settings, "cpu")
    wanted = {n: g for n, g in x.cotangents.items() if n not in family.optional or n in implementation.outputs}
    tried = None if reason else execute(implementation, dataclasses.replace(x, cotangents=wanted))
    answer = (tried.verdict, tried.message, tried.blame) if tried else ("unsupported", str(reason), None)
    return Call(implementation.id, implementation.library, str(implementation.version()), label, *answer)


def markdown(found: Mapping[str, Mapping[str, Mapping[str, SweptCell]]], unusable: Sequence[str]) -> str:
    """A table for each library, and below it why a cell is not judged."""
    lines = ["✓ judged, – absent, R refused by the library, · no case for it on a CPU, **U** unknown to the adapter."]
    for library, implementations in found.items():
        versions = sorted({v for cells in implementations.values() for v in cells}, key=Version)
        marks = (
            [code(name), *(MARKS[cells[v].state] if v in cells else "" for v in versions)]
            for name, cells in implementations.items()
        )
        lines += ["", f"## {library}", "", *measured.table(["implementation", *versions], marks), ""]
        for name, cells in implementations.items():
            reasons: dict[tuple[str, str], list[str]] = {}
            for version, one in cells.items():
                if one.state != "judged" and (one.state != "absent" or "-trainer." in name):
                    reasons.setdefault((one.state, one.why), []).append(version)
            lines += [f"- {code(name)} {', '.join(on)}: {s}: {escape(why)}" for (s, why), on in reasons.items()]
    every = [one for table in found.values() for cells in table.values() for one in cells.values()]
    counts = ", ".join(f"{sum(one.state == state for one in every)} {state}" for state in STATES)
    return "\n".join([*lines, "", f"{counts}.", *(f"Not used: {text}" for text in unusable)])


def exit_code(found: Mapping[str, Mapping[str, Mapping[str, SweptCell]]], unusable: Sequence[str]) -> int:
    """1 when an adapter does not know a release, 3 when an environment could not be used, else 0."""
    every = [one for table in found.values() for cells in table.values() for one in cells.values()]
    return 1 if any(one.state == "unknown" for one in every) else 3 if unusable or not every else 0


def command(releases: Sequence[str], turns: Path | None = None) -> int:
    """Print the table of some releases, by default `RELEASES`, and how far it is on stderr; the exit code."""
    specs = releases or [f"{package}=={v}" for package, versions in RELEASES.items() for v in versions.split()]
    found, unusable = sweep(specs, lambda line: click.echo(line, err=True), Turns.read(turns))
    click.echo(f"{measured.head('Implementations by release', 'parity', 'sweep.md')}\n{markdown(found, unusable)}")
    return exit_code(found, unusable)


def main() -> int:
    """Prints the calls of this environment."""
    prepare("cpu", threads=1)
    for call in calls():
        print_json(_LINE, dataclasses.asdict(call))
    return 0


if __name__ == "__main__":
    sys.exit(main())
