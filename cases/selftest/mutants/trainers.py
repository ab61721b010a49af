"""Mutants of whole trainers (`trainers.toml`): TRL's class with one passage of one method changed.

They are edits of the installed release: a passage that it does not have is an error, so that no mutant is lost unseen.
Each goes through the released way of its trainer's checks, case by case, until a quantity disagrees that the class itself
has right.
"""

import dataclasses
import importlib
import inspect
import itertools
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from cases.selftest.mutants.matrix import Fate, dead
from parity import data
from parity.case.case import Case
from parity.implementations.implementation import Implementation
from parity.registry import facts, run_case, select
from parity.results.ledger import Ledger
from parity.trainers import catalogue
from parity.trainers.rig import drive
from parity.trainers.specs import TRAINERS

PROFILES = ("pr", "nightly")
DEADLY = ("disagree", "nondeterministic", "crashed")


@dataclasses.dataclass(frozen=True)
class Edit:
    """A mistake in a trainer: in the source of `method`, `old` becomes `new`, once."""

    name: str
    mistake: str
    method: str
    old: str
    new: str


EDITS: dict[str, tuple[Edit, ...]] = {
    family: tuple(
        Edit(name, row[0], method, *row[1:]) for method, rows in methods.items() for name, row in rows.items()
    )
    for family, methods in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""Family of the trainer -> its mutants."""


def released(family: str) -> type:
    """The class that the mutants of a family are edits of."""
    return drive.trl_class(TRAINERS[family])


def mutated(family: str, edit: Edit) -> type:
    """A subclass of the released class with the edit in its method.

    Raises:
        LookupError: where the method of the installed release does not have the passage.
    """
    kind = released(family)
    base = next(b for b in kind.__mro__ if edit.method in vars(b))
    source = textwrap.dedent(inspect.getsource(vars(base)[edit.method]))
    if edit.old not in source:
        raise LookupError(f"{family}.{edit.name}: {edit.method} has no {edit.old!r}")
    source = source.replace(edit.old, edit.new, 1).replace("super()", "super(_base, self)")
    made: dict[str, Any] = {}
    text = f"def _made(_base):\n{textwrap.indent(source, '    ')}\n    return {edit.method}\n"
    module = sys.modules.get(base.__module__) or importlib.import_module(base.__module__)
    exec(compile(text, f"<{family}.{edit.name}>", "exec"), vars(module), made)  # its names, as they are when called
    return type(kind.__name__, (kind,), {edit.method: made["_made"](base), "__module__": __name__})


def cases(family: str, seed: int) -> list[Case]:
    """The cases of a trainer that drive its class in this process: those of profile pr first, then the others of nightly."""
    found = {case.id: case for profile in PROFILES for case in catalogue.cases(family, profile, seed)}
    return [case for case in found.values() if catalogue.family(family).check(case).drives]


def fates(family: str, seed: int, budget: int, device: str = "cpu") -> list[Fate]:
    """The fate of each mutant of a trainer and of the class itself, the control, on at most `budget` cases.

    The control sees those that the mutants need.
    """
    implementation = next(i for i in select(()) if i.id == f"{family}.released")
    ledger = Ledger.load(data.ledger_file())
    kinds = {e.name: mutated(family, e) for e in EDITS[family]}
    kinds["correct"] = type("Same", (released(family),), {"__module__": __name__})
    mistakes = {e.name: e.mistake for e in EDITS[family]}
    fates = {name: Fate(family, name, mistakes.get(name, ""), seed, 0, 0) for name in kinds}
    for case in itertools.islice(cases(family, seed), budget):
        if not any(f.mistake and not f.killed for f in fates.values()):
            break
        for name, fate in fates.items():
            if not fate.killed:
                with drive.using(kinds[name]):
                    fates[name] = _judged(case, implementation, fate, ledger, device)
    return [*fates.values()]


def _judged(case: Case, implementation: Implementation, fate: Fate, ledger: Ledger, device: str) -> Fate:
    """Dead of the first quantity that disagrees, or of a crash; not of what the ledger knows of the released class."""
    found = list(run_case(case, [implementation], device))
    judged = fate.judged + sum(row.quantity is not None for row in found)
    fate = dataclasses.replace(fate, cases=fate.cases + 1, judged=judged)
    for row in found:
        if row.verdict in DEADLY and ledger.match(row, facts(case)) is None:
            return dead(fate, case, row.gate or row.verdict, row.quantity or "", row.message)
    return fate
