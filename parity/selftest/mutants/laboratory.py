"""Where mutants by machine are made: whose code is edited, which implementation runs an edit, and the edit in force."""

import collections
import contextlib
import dataclasses
import importlib
import itertools
import random
import signal
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from parity.implementations.implementation import Implementation
from parity.judging.assess import CaseOracle
from parity.judging.compare import skip_reason
from parity.judging.execute import execute
from parity.registry import load, oracle_of
from parity.selftest.controls import controls_of
from parity.selftest.mutants import FAMILIES
from parity.selftest.mutants.edits import Edit, Place, bodies, edits, exchanged
from parity.selftest.mutants.matrix import drawn

SOURCES = {
    "controls": ("honest.", tuple(f"parity.selftest.controls.{name}" for name in FAMILIES)),
    "fixes": ("fixes.", tuple(f"parity.fixes.{name}" for name in "chunked logprobs grpo".split())),
    "trl": (
        "trl.",
        ("trl.trainer.grpo_trainer", "trl.trainer.utils", "trl.trainer.distillation_trainer")
        + ("trl.experimental.gkd.gkd_trainer", "trl.kernels.chunked_divergence"),
    ),
}
"""Whose code is edited: how the implementations that run it are called, and its files."""
SECONDS, REACH = 10, 12
"""CPU time of a call; cases of a family that tell who runs a function."""


@dataclasses.dataclass
class Mutated:
    """An edit, who runs it, and what became of it.

    Attributes:
        fate: alive, killed, crashed (in the first case: no mutant at all), equivalent, unreached (as equivalent, but no case
            ran its line) or survived.
        cases: cases that its implementation was judged on, until the kill.
        moved: the largest relative change of a result in float64.
        digest: of the edited file: an edit is told by its number in there.
    """

    edit: Edit
    implementation: str
    family: str
    digest: int
    fate: str = "alive"
    cases: int = 0
    gate: str = ""
    quantity: str = ""
    moved: float = 0.0


class Laboratory:
    """The edits of a sample, compiled, and the implementations that run them."""

    def __init__(self, source: str):
        prefix, names = SOURCES[source]
        known = itertools.chain(*map(controls_of, FAMILIES), load().values())
        own = [i for i in known if i.id.startswith(prefix) and i.family in FAMILIES and i.library != "liger-kernel"]
        self.implementations = {i.id: i for i in own if not (i.interpreted or i.opt_in or i.missing())}
        self.modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
        self._swaps: dict[tuple[str, int], list[tuple[FunctionType, CodeType]]] = {}

    def reached(self) -> dict[str, dict[Place, list[str]]]:
        """Module -> function -> the implementations that run it on the first cases of their family."""
        files = {m.__file__: n for n, m in self.modules.items()}
        found: dict[str, dict[Place, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        for family in FAMILIES:
            oracles = [oracle_of(c) for c in itertools.islice(drawn(family, 0), REACH)]
            for i in (i for i in self.implementations.values() if i.family == family):
                seen: set[CodeType] = set()
                sys.setprofile(lambda frame, event, arg, seen=seen: seen.add(frame.f_code))  # type: ignore[misc]
                try:
                    for oracle in (b for b in oracles if claims(i, b)):
                        execute(i, oracle.offered(i).inputs)
                finally:
                    sys.setprofile(None)
                for code in seen:
                    if name := files.get(code.co_filename):
                        found[name][code.co_qualname, code.co_firstlineno].append(i.id)
        return found

    def sample(self, seed: int, count: int) -> list[Mutated]:
        """A random sample of the edits of functions that are run, each in a random one of the implementations."""
        order, reached, out = random.Random(seed), self.reached(), []
        for name, module in self.modules.items():
            digest = zlib.crc32(Path(str(module.__file__)).read_bytes())
            for edit, _ in edits(module):
                if who := reached[name].get(edit.place):
                    chosen = order.choice(sorted(who))
                    out.append(Mutated(edit, chosen, self.implementations[chosen].family, digest))
        print(f"{len(out)} edits of functions that are run", file=sys.stderr)
        order.shuffle(out)
        return out[:count]

    def compile(self, mutants: Sequence[Mutated]) -> None:
        """Have the bodies of these ready."""
        self._swaps = {}
        for name, module in self.modules.items():
            wanted = {m.edit.number for m in mutants if m.edit.module == name}
            for edit, tree in edits(module) if wanted else ():
                if edit.number in wanted:
                    try:
                        self._swaps[name, edit.number] = exchanged(module, bodies(module, tree))
                    except SyntaxError:  # a statement left out was the only one that bound a name
                        self._swaps[name, edit.number] = []

    @contextlib.contextmanager
    def edited(self, mutated: Mutated) -> Iterator[None]:
        """The functions with the edit's bodies, and calls limited in time."""
        swaps = self._swaps[mutated.edit.module, mutated.edit.number]
        before = [(f, f.__code__) for f, _ in swaps]
        for function, code in swaps:
            function.__code__ = code
        try:
            with limited(SECONDS):
                yield
        finally:
            for function, code in before:
                function.__code__ = code

    def empty(self, mutated: Mutated) -> bool:
        """Whether the edit leaves the compiled code as it is, or cannot be compiled."""
        return not self._swaps[mutated.edit.module, mutated.edit.number]


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds of CPU time."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def claims(implementation: Implementation, oracle: CaseOracle) -> bool:
    """Whether an implementation is judged on a case: neither skipped nor compiled, which takes seconds."""
    inputs = oracle.inputs
    reason = skip_reason(oracle.family, implementation, inputs.case, inputs.settings, "cpu")
    return reason is None and inputs.context != "compile"
