"""Mutants by machine: small wrong edits of correct code, a random sample of all, on the cases that profile pr draws.

An edit stands in place of a function's body, in one implementation that runs it. One that is alive after `EARLY` cases
runs beside the original in float64 on `DOUBLES` other cases: where no result moves, it is equivalent. The others see
every case of the profile.
"""

import contextlib
import dataclasses
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.inputs import Inputs
from parity.case.layouts import elsewhere
from parity.case.profiles import PROFILES
from parity.implementations.implementation import Implementation
from parity.judging.assess import CaseOracle, confirmed, judge_all
from parity.judging.compare import _rows
from parity.judging.execute import Outcome, _both, execute, fresh
from parity.process import prepare
from parity.registry import loss_family, oracle_of
from parity.running.shard import repeated
from parity.selftest.mutants import FAMILIES
from parity.selftest.mutants.laboratory import Laboratory, Mutated, claims
from parity.selftest.mutants.matrix import DTYPES, PROFILE, drawn

CERTAIN, SAME = 10.0, 2.0**-24
"""Headroom that needs no further replicas (as `settle.CERTAIN`, ten times less: the original agrees on the case); largest
relative change in float64 of an equivalent: float32's unit roundoff."""
EARLY, DOUBLES, BATCH = 25, 200, 240
"""Cases before the float64 comparison; cases of that comparison; mutants that share the oracle of a case."""


class Hunt:
    """One case: the unedited results, and the verdict on each mutant."""

    def __init__(self, laboratory: Laboratory, case: Case):
        self.laboratory, self.oracle = laboratory, oracle_of(case)
        self._unedited: dict[str, Outcome | None] = {}
        self._steady: dict[str, bool] = {}

    def unedited(self, id: str) -> Outcome | None:
        """What the unedited implementation gives, None where it is not judged, or does not run."""
        if id not in self._unedited:
            i = self.laboratory.implementations[id]
            outcome = execute(i, self.oracle.offered(i).inputs) if claims(i, self.oracle) else None
            self._unedited[id] = outcome if outcome and outcome.verdict == "ran" and not outcome.leaks else None
        return self._unedited[id]

    def judge(self, mutated: Mutated) -> None:
        """Run it on this case, which it counts."""
        unedited, i = self.unedited(mutated.implementation), self.laboratory.implementations[mutated.implementation]
        if unedited is None:
            return
        oracle, mutated.cases = self.oracle.offered(i), mutated.cases + 1
        with self.laboratory.edited(mutated):
            outcome = execute(i, oracle.inputs)
        if outcome.verdict != "ran":
            mutated.fate = "crashed" if mutated.cases == 1 else "killed"
            mutated.gate = outcome.verdict
        elif outcome.leaks:
            mutated.fate, mutated.gate = "killed", "protocol"
        elif not (outcome.same_as(unedited) and unedited.same_as(outcome)):  # a missing result differs too
            self._held(oracle, i, mutated, outcome, unedited)
        if (
            mutated.fate == "alive"
            and mutated.cases <= 8
            and repeated(i, oracle.inputs.case, PROFILES[PROFILE].thorough)
        ):
            self._thorough(oracle, i, mutated)

    def _held(
        self, oracle: CaseOracle, i: Implementation, mutated: Mutated, outcome: Outcome, unedited: Outcome
    ) -> None:
        recipe = i.recipe_for(oracle.inputs)
        judged = judge_all(oracle, i, outcome, recipe)
        if all(j.agrees for j in judged.values()):
            return
        if not any(not j.agrees and not j.headroom < CERTAIN and not j.overflows for j in judged.values()):
            judged = confirmed(oracle, i, outcome)
        wrong = [n for n, j in judged.items() if not j.agrees]
        right = judge_all(oracle, i, unedited, recipe, only=wrong)
        for name in wrong:
            if name not in right or right[name].agrees:
                mutated.fate, mutated.quantity, mutated.gate = "killed", name, judged[name].gate
                return

    def _thorough(self, oracle: CaseOracle, i: Implementation, mutated: Mutated) -> None:
        with self.laboratory.edited(mutated):
            row = next((r for r in _rows(oracle, i, True) if r.failing and r.gate in ("protocol", "relation")), None)
        if row is not None:
            if i.id not in self._steady:
                self._steady[i.id] = not any(r.failing for r in _rows(oracle, i, True))
            if self._steady[i.id]:
                mutated.fate, mutated.gate, mutated.quantity = "killed", row.gate or "", row.quantity or ""


def double(inputs: Inputs) -> Inputs:
    """The same values in float64, called plainly."""
    case = dataclasses.replace(inputs.case, dtype="fp64")
    floating = {n: t for n, t in inputs.tensors.items() if t is not None and t.is_floating_point()}
    wide = inputs.replace(**{n: elsewhere(t, dtype=torch.float64) for n, t in floating.items()})
    settings = type(inputs.settings)(**vars(inputs.settings) | {"context": "plain"})
    return dataclasses.replace(wide, case=case, settings=settings)


@contextlib.contextmanager
def no_float32() -> Iterator[None]:
    """What asks for float32 gets float64."""
    before = torch.Tensor.float, torch.float32
    torch.Tensor.float, torch.float32 = torch.Tensor.double, torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before[1])
        torch.Tensor.float, torch.float32 = before


def compare(laboratory: Laboratory, alive: list[Mutated], drawn_cases: Iterable[Case]) -> None:
    """The largest relative change of a result in float64; what no case reaches is marked."""
    lines: set[tuple[str, int]] = set()
    for case in drawn_cases:
        oracle = CaseOracle(loss_family(case.family), loss_family(case.family).build(case), {})
        wide, known = double(oracle.inputs), dict[str, Outcome]()
        for mutated in (m for m in alive if m.moved <= SAME):
            i = laboratory.implementations[mutated.implementation]
            if not claims(i, oracle):
                continue
            with no_float32():
                if i.id not in known:
                    with traced(laboratory, lines):
                        known[i.id] = plainly(i, wide)
                with laboratory.edited(mutated):
                    mutated.moved = max(mutated.moved, change(known[i.id], plainly(i, wide)))
    for mutated in alive:
        if mutated.moved <= SAME:
            mutated.fate = "equivalent" if (mutated.edit.module, mutated.edit.line) in lines else "unreached"


@contextlib.contextmanager
def traced(laboratory: Laboratory, lines: set[tuple[str, int]]) -> Iterator[None]:
    """Add the lines of the edited modules that run."""
    files = {m.__file__: n for n, m in laboratory.modules.items()}

    def local(frame: Any, event: str, arg: Any) -> Callable[..., Any]:
        lines.add((files[frame.f_code.co_filename], frame.f_lineno))
        return local

    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in files else None)
    try:
        yield
    finally:
        sys.settrace(None)


def plainly(implementation: Implementation, inputs: Inputs) -> Outcome:
    """Both passes, without the watch over side effects."""
    try:
        return _both(implementation, fresh(inputs))
    except Exception as error:
        return Outcome("crashed", message=repr(error))


def change(a: Outcome, b: Outcome) -> float:
    """The largest relative change of a quantity."""
    if a.verdict != b.verdict:
        return math.inf
    worst = 0.0
    for name, x in a.quantities.items():
        y = b.quantities.get(name)
        if (x is None) != (y is None) or (x is not None and y is not None and x.shape != y.shape):
            return math.inf
        if x is not None and y is not None and not torch.equal(x, y):
            u, v = x.double().nan_to_num(), y.double().nan_to_num()
            worst = max(worst, float((u - v).norm() / u.norm().clamp(min=1e-300)))
    return worst


def others(family: str, seed: int) -> Iterator[Case]:
    """Cases that are not those of the hunt."""
    return draws(cases(loss_family(family), DTYPES, PROFILE), f"machine/{seed}/{family}", DOUBLES)


def decide(laboratory: Laboratory, mutants: Sequence[Mutated], seed: int) -> None:
    """The fate of a batch."""
    laboratory.compile(mutants)
    for mutated in mutants:
        if laboratory.empty(mutated):
            mutated.fate = "equivalent"
    for family in FAMILIES:
        of = [m for m in mutants if m.family == family]
        stream = drawn(family, seed)

        def hunt(count: int, of: list[Mutated] = of, stream: Iterator[Case] = stream) -> None:
            for case in itertools.islice(stream, count):
                alive = [m for m in of if m.fate == "alive"]
                if not alive:
                    return
                at = Hunt(laboratory, case)
                for mutated in alive:
                    at.judge(mutated)

        hunt(EARLY)
        alive = [m for m in of if m.fate == "alive"]
        if alive:
            compare(laboratory, alive, others(family, seed))
        hunt(loss_family(family).drawn[PROFILE] - EARLY)
        for mutated in of:
            mutated.fate = "survived" if mutated.fate == "alive" else mutated.fate


def run(source: str, seed: int, count: int, path: Path) -> Iterator[list[Mutated]]:
    """A sample, decided batch by batch; each is written to `path`, and what stands there is not run again."""
    warnings.simplefilter("ignore")
    prepare("cpu", threads=1)
    laboratory = Laboratory(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {_key(m): m for m in read(path)}
    found: list[Mutated] = []
    chosen = laboratory.sample(seed, count)
    for at in range(0, len(chosen), BATCH):
        part = chosen[at : at + BATCH]
        new = [m for m in part if _key(m) not in known]
        if new:
            decide(laboratory, new, seed)
            with path.open("a") as file:
                file.writelines(msgspec.json.encode(m).decode() + "\n" for m in new)
        found += [known.get(_key(m), m) for m in part]
        yield found


def _key(mutated: Mutated) -> tuple[str, int, int]:
    return mutated.edit.module, mutated.edit.number, mutated.digest


def read(path: Path) -> list[Mutated]:
    """What `run` wrote."""
    return msgspec.json.Decoder(Mutated).decode_lines(path.read_bytes()) if path.exists() else []
