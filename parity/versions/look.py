"""Run cases inside an environment and return result rows, or the answer of one case, for history, its recall, bisect and compare.

`python -m parity.versions.look PLAN SEEN` writes what it saw as a plan (JSON) asks for it; `look` is the caller's side.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from parity import data
from parity.case.case import Case
from parity.decoding import decode, save_json
from parity.errors import Unsupported, UsageError
from parity.process import environment, prepare
from parity.registry import facts, run_case, select
from parity.results.ledger import Ledger
from parity.results.row import Row
from parity.running.child import LimitExceeded
from parity.sampling.capabilities import nearest
from parity.sampling.find import followed
from parity.trainers.specs import TRAINERS
from parity.upstream import trl
from parity.versions.bisect import Measurement
from parity.versions.client import EnvironmentUnusable, one_line
from parity.versions.environment import Environment

PLAIN, MADE = bool | int | float | str | None, "made"
CPU_LIMIT = 600.0  # seconds of CPU time of a probe, its children included; on the clock `child.BACKSTOP` times as many


class Look(msgspec.Struct, frozen=True):
    """What a probe saw: result rows; the defaults of each trainer's config class, by its name (empty if not asked for)."""

    rows: list[Row]
    configs: dict[str, dict[str, Any]]


def look(
    made: Environment,
    cases: Sequence[Case],
    implementations: Sequence[str],
    *,
    configs: bool = False,
    near: bool = False,
    clock: float | None = None,
    device: str = "cpu",
) -> Look:
    """Every case through the named implementations and the references of its family, in the environment.

    `near`: also, where one of the named does not take a case of a loss there, the nearest case that it takes.

    Failing rows carry the id of the ledger entry that they fall under, in `known`.
    One thread, without repeated calls and relations: the same cases, the same rows, wherever it runs.
    EnvironmentUnusable when the process dies, with its last line, or is ended: after `CPU_LIMIT` seconds of CPU time, or
    `clock` on the clock, by default `child.BACKSTOP` times as many; the message says which.
    """
    plan = {"cases": [c.to_json() for c in cases], "implementations": list(implementations)}
    settings = environment(device) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    with tempfile.TemporaryDirectory() as folder:
        asked, seen = Path(folder, "asked.json"), Path(folder, "seen.json")
        save_json(asked, plan | {"configs": configs, "near": near, "device": device})
        command = ["python", "-W", "ignore", "-m", "parity.versions.look", str(asked), str(seen)]
        try:
            done = made.run(command, settings=settings, capture=True, cpu_limit=CPU_LIMIT, clock=clock)
            if not done.returncode:
                found: Look = decode(Look, seen.read_bytes(), "what it saw")
                return found
        except (LimitExceeded, OSError, UsageError) as error:
            raise EnvironmentUnusable(f"environment {made.name}: {error}") from None
    last = one_line(done.stderr.rstrip().rpartition("\n")[2]) or f"python ended with status {done.returncode}"
    raise EnvironmentUnusable(f"environment {made.name}: {last}")


def main(asked: str, seen: str) -> None:
    """Runs the plan in this process."""
    plan, shown = json.loads(Path(asked).read_text()), Look([], {})
    prepare(plan["device"])
    ledger = Ledger.load(data.ledger_file())
    wanted = select(plan["implementations"])
    references = [one for one in select(()) if one.role == "reference"]
    cases = {case.id: case for case in map(Case.from_json, plan["cases"])}
    if plan["near"]:
        pairs = [(i, case) for i in wanted for case in cases.values() if i.family == case.family and not i.is_trainer]
        cases |= {found.id: found for i, case in pairs if (found := nearest(i, case, plan["device"]))}
    for case in cases.values():
        chosen = {one.id: one for one in (*references, *wanted) if one.family == case.family}
        for row in run_case(case, chosen.values(), plan["device"], thorough=False):
            if row.failing:
                row.known = ledger.match(row, facts(case))
            shown.rows.append(row)
    if plan["configs"]:
        shown.configs.update(defaults())
    save_json(Path(seen), shown)


def defaults() -> dict[str, dict[str, Any]]:
    """The fields of each config class of the installed TRL with their defaults: one that is no plain value as Python writes
    it, one that is made anew each time as `MADE`."""
    found = {}
    for trainer in TRAINERS.values():
        with contextlib.suppress(Unsupported):
            config = trl.config_of(trainer)
            found[config.__name__] = {
                name: MADE if v is dataclasses.MISSING else v if isinstance(v, PLAIN) else repr(v)
                for name, v in trl.fields(config).items()
            }
    return found


@dataclasses.dataclass(frozen=True)
class CaseCheck:
    """A case, an implementation, and which of its quantities count (patterns; by default all). `failure`: the verdict that
    counts as wrong when a search asks."""

    name: str
    case: Case
    implementation: str
    quantities: tuple[str, ...] = ("*",)
    failure: str = "disagree"
    device: str = "cpu"

    @property
    def about(self) -> str:
        """What is followed, on one line."""
        only = "" if self.quantities == ("*",) else f", {', '.join(self.quantities)}"
        where = "" if self.device == "cpu" else f", on {self.device}"
        return f"{self.name}, {self.implementation}{only}{where}"

    def measure(self, made: Environment) -> Measurement:
        """The answer of `judged` in an environment; EnvironmentUnusable when the process dies there."""
        return self.judged(look(made, [self.case], [self.implementation], device=self.device).rows)

    def judged(self, found: Iterable[Row]) -> Measurement:
        """`answer`, with this check's own failure read as a disagreement."""
        answer = self.answer(found)
        return dataclasses.replace(answer, verdict="disagree") if answer.verdict == self.failure else answer

    def answer(self, found: Iterable[Row]) -> Measurement:
        """agree when every quantity that counts agrees, disagree with the greatest headroom when one does not. A
        verdict about the whole case (refused, unsupported, crashed, …) is the answer, with its message."""
        mine = [r for r in found if r.case == self.case.id and r.implementation == self.implementation]
        if whole := next((r for r in mine if r.quantity is None), None):
            return Measurement(whole.verdict, message=whole.message)
        mine = [r for r in mine if any(fnmatchcase(str(r.quantity), p) for p in self.quantities)]
        if not mine:
            lacks = f"{self.implementation} hands out no {', '.join(self.quantities)}"
            return Measurement("unsupported", message=lacks)
        failing = [r for r in mine if r.verdict != "agree"]
        said = [f"{r.quantity} {amount(r.value)} instead of {amount(r.value_oracle)}" for r in failing[:3]]
        sizes = [r.headroom for r in failing or mine]
        size = None if None in sizes else max(filter(None, sizes), default=0.0)
        return Measurement(failing[0].verdict if failing else "agree", size, message="; ".join(said))


def amount(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def only_implementation(case: Case, named: Sequence[str], found_with: str | None) -> str:
    """The one implementation that a search follows: named, or that the case was found with. Raises UsageError for several."""
    chosen = followed(named, found_with, case)
    if len(chosen) != 1:
        had = "no implementation" if not chosen else f"{len(chosen)} implementations"
        raise UsageError(f"case {case.id}: a search follows one, got {had}; name it with --implementation")
    return chosen[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
