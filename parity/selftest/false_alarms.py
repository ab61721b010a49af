"""False alarms: correct implementations on drawn cases, which must never be called wrong.

    python -m parity.selftest.false_alarms --cases 1500 --seed 0

prints how many disagree and the worst headroom by (family, quantity, gate, dtype). Oracle and replicas of a case are
shared by the implementations, so that twenty thousand implementation-cases take minutes.
"""

import argparse
import bisect
import collections
import contextlib
import dataclasses
import json
import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator

import torch

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import PROFILES
from parity.compare.one_case import skip_reason
from parity.implementations.implementation import Implementation
from parity.judge.gates import Judgement
from parity.judging.assess import CaseOracle, confirmed, judge_all
from parity.process import prepare
from parity.protocol.call import execute
from parity.registry import loss_families, loss_family, oracle_of, resolved
from parity.results.report import measured
from parity.running.provenance import resolve_device
from parity.selftest.controls import controls_of
from parity.selftest.controls.wrong import WRONG, Wrong

PROGRESS = 100
EDGES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

Key = tuple[str, str, str, str]


@dataclasses.dataclass
class Spread:
    """Headroom of one gate on one quantity: how often in each interval of `EDGES`, the worst, and where."""

    counts: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(EDGES) + 1))
    worst: float = 0.0
    where: str = ""

    def add(self, headroom: float, where: str) -> None:
        """Count one headroom; NaN counts as beyond every edge."""
        headroom = math.inf if math.isnan(headroom) else headroom
        self.counts[bisect.bisect_left(EDGES, headroom)] += 1
        if headroom > self.worst:
            self.worst, self.where = headroom, where


@dataclasses.dataclass
class Soak:
    """What a soak found.

    Attributes:
        judged: implementation-cases judged, by (family, dtype).
        spreads: headroom by (family, quantity, gate, dtype), of the first judgement with its few replicas.
        first: implementation-cases whose first judgement disagreed.
        alarms: those that the confirmation upheld: (implementation, quantity, gate, headroom, case).
        silent: implementation-cases that did not run, by (implementation, verdict, message).
    """

    judged: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    spreads: dict[Key, Spread] = dataclasses.field(default_factory=lambda: collections.defaultdict(Spread))
    first: list[tuple[str, str, str, float, str]] = dataclasses.field(default_factory=list)
    alarms: list[tuple[str, str, str, float, str]] = dataclasses.field(default_factory=list)
    silent: collections.Counter[tuple[str, str, str]] = dataclasses.field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        """Implementation-cases judged."""
        return sum(self.judged.values())


def drawn(
    name: str, count: int, seed: int, dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16"), profile: str = "pr"
) -> Iterator[Case]:
    """`count` different cases of a family, drawn as a run of the profile draws them; nightly has the context `compile`."""
    return draws(cases(loss_family(name), dtypes, profile), f"soak/{seed}/{name}", count)


def judged(
    oracle: CaseOracle, implementation: Implementation
) -> tuple[dict[str, Judgement], dict[str, Judgement]] | str:
    """The first judgement and the one that counts, or why there is none."""
    oracle = oracle.offered(implementation)
    reason = skip_reason(
        oracle.family, implementation, oracle.inputs.case, oracle.inputs.settings, oracle.inputs.device.type
    )
    if reason:
        return f"unsupported: {reason}"
    outcome = execute(implementation, oracle.inputs)
    if outcome.verdict != "ran":
        return f"{outcome.verdict}: {outcome.message}"
    first = judge_all(oracle, implementation, outcome, implementation.recipe_for(oracle.inputs))
    # what autocast changes no bit of is held to more, by `confirmed`
    if all(j.agrees for j in first.values()) and oracle.inputs.context != "autocast":
        return first, first
    return first, confirmed(oracle, implementation, outcome)


def soak(
    chosen_cases: Iterable[Case], implementations: Iterable[Implementation] | None = None, device: str = "cpu"
) -> Soak:
    """Judge implementations, or else the correct ones of each family, on cases; an interrupt keeps what there is."""
    out, chosen = Soak(), None if implementations is None else list(implementations)
    with contextlib.suppress(KeyboardInterrupt):
        for number, case in enumerate(chosen_cases, 1):
            oracle = oracle_of(case, device)
            for implementation in chosen or controls_of(case.family):
                _add(out, oracle, implementation)
            if number % PROGRESS == 0:
                print(f"{number} cases, {out.total} judged, {len(out.alarms)} alarms", file=sys.stderr, flush=True)
    return out


def _add(out: Soak, oracle: CaseOracle, implementation: Implementation) -> None:
    case = oracle.inputs.case
    text = json.dumps(case.to_json())
    result = judged(oracle, implementation)
    if isinstance(result, str):
        verdict, message = result.split(": ", 1)
        out.silent[(implementation.id, verdict, message)] += 1
        return
    first, final = result
    out.judged[(case.family, case.dtype)] += 1
    for quantity, j in first.items():
        for gate, headroom in j.gates.items():
            out.spreads[(case.family, quantity, gate, case.dtype)].add(headroom, f"{implementation.id} {text}")
        if not j.agrees:
            out.first.append((implementation.id, quantity, j.gate, j.headroom, text))
    alarms = [(implementation.id, q, j.gate, j.headroom, text) for q, j in final.items() if not j.agrees]
    for alarm in alarms:
        print(*alarm, file=sys.stderr, flush=True)
    out.alarms += alarms


def sensitivity(wrong: Wrong, drawn_cases: Iterable[Case]) -> tuple[int, int, int, collections.Counter[str]]:
    """Cases in which a wrong implementation is caught, in which its edit changes anything, and all; catching gates."""
    caught = effective = total = 0
    gates: collections.Counter[str] = collections.Counter()
    for case in drawn_cases:
        oracle = oracle_of(case).offered(wrong.implementation)
        if skip_reason(oracle.family, wrong.implementation, case, oracle.inputs.settings, "cpu"):
            continue
        total += 1
        honest, outcome = (execute(i, oracle.inputs) for i in (wrong.base, wrong.implementation))
        if all(_same(honest.quantities[n], v) for n, v in outcome.quantities.items()) and outcome.verdict == "ran":
            continue
        effective += 1
        failing = [j for j in confirmed(oracle, wrong.implementation, outcome).values() if not j.agrees]
        caught += bool(failing) or outcome.verdict != "ran"
        gates.update({j.gate for j in failing})
    return caught, effective, total, gates


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))


def table(found: Soak) -> str:
    """The distribution as a Markdown table: share of judgements below each edge, and the worst."""
    heads = ["family", "quantity", "gate", "dtype", "judged", *(f"≤ {e:g}" for e in EDGES), "worst"]
    rows = []
    for key, spread in sorted(found.spreads.items()):
        if key[2] == "structure" or not any(spread.counts):
            continue
        total, seen = sum(spread.counts), 0
        shares = []
        for count in spread.counts[:-1]:
            seen += count
            shares.append(measured.share(seen, total))
        rows.append([*key, str(total), *shares, measured.headroom(spread.worst)])
    return "\n".join(measured.table(heads, rows))


def _print_sensitivity(count: int, seed: int) -> int:
    print("| wrong | dtypes | cases | edit has an effect | caught of those | gates |")
    print("|---|---|---|---|---|---|")
    missed = False
    for name, wrong in WRONG.items():
        found = sensitivity(wrong, drawn(wrong.implementation.family, count, seed, wrong.dtypes))
        caught, effective, total, gates = found
        share = f"{caught} ({100 * caught / max(effective, 1):.0f} %)"
        by_gate = ", ".join(f"{g} {n}" for g, n in gates.most_common(4))
        print(f"| {name} | {' '.join(wrong.dtypes)} | {total} | {effective} | {share} | {by_gate} |", flush=True)
        missed |= caught == 0
    return int(missed)


def main() -> int:
    """Command line: 0 when nothing disagreed, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=1500, help="cases of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", metavar="NAME|FILE.py:NAME")
    parser.add_argument("--profile", default="pr", choices=tuple(PROFILES), help="what is drawn; nightly also compiles")
    parser.add_argument("--device", default="cpu", help="where the implementations run: auto, cpu or cuda")
    parser.add_argument("--wrong", action="store_true", help="how often the wrong implementations are caught instead")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = resolve_device(options.device)
    prepare(device, threads=1)
    print(measured.head("False alarms", "python -m parity.selftest.false_alarms", "false-alarms.md"))
    if options.wrong:
        return _print_sensitivity(options.cases, options.seed)
    failed = False
    for name in map(resolved, options.family or loss_families()):
        start = time.monotonic()
        found = soak(drawn(name, options.cases, options.seed, profile=options.profile), device=device)
        seconds = time.monotonic() - start
        print(f"{name}: {found.total} implementation-cases in {seconds:.0f} s; {dict(found.judged)}")
        print(f"{name}: {len(found.first)} quantities beyond a gate at first, {len(found.alarms)} after confirmation")
        for alarm in found.alarms or found.first[:20]:
            print("  ", *alarm)
        for key, count in found.silent.most_common(10):
            print("  ", count, *key)
        print(table(found), flush=True)
        failed |= bool(found.alarms)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
