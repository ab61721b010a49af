"""The checks of trainers by name, each trainer as a family, each path of one as an implementation, and a case of one as rows.

A check is one function under the decorator `parity.trainers.check.check`, in a module of `parity/trainers/checks` that
`MODULES` names. TRL, transformers and PEFT are imported inside functions, so that this module loads without them.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Literal

from msgspec.structs import replace

from parity.case.case import Case
from parity.case.inputs import Setting, filled
from parity.case.profiles import PROFILES
from parity.compare.result_rows import empty_row, flaky, size
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.judge.gates import Judgement
from parity.protocol.call import guarded
from parity.protocol.exceptions import Outcome
from parity.results.row import VALUE, Row, finite
from parity.trainers.check import CHECKS, PATHS, Check, CheckCall, Quantity
from parity.trainers.rig import drawn, drive
from parity.trainers.specs import SPECS, TRAINERS

MODULES = (
    "step_one config_values advantages twins processes losses metrics variations sampler twin_windows distillation"
    " self_distillation update architecture generation weight_sync asynchronous conversations reward_model plain_trainer"
).split()
ALONE, MODEL_ALONE = "sft-trainer", "architecture"
"""The family and the check of the models by themselves."""


def load() -> dict[str, Check]:
    """Every check by name, in the order of `MODULES`, whichever was imported first; then checks from elsewhere."""
    names = [importlib.import_module(f"parity.trainers.checks.{name}").__name__ for name in MODULES]
    place = {name: number for number, name in enumerate(names)}
    return dict(sorted(CHECKS.items(), key=lambda item: place.get(item[1].run.__module__, len(place))))


def path_of(implementation: Implementation) -> str:
    """The path of `PATHS` on which an implementation is run; a user's own trainer runs as a released one does."""
    return "released" if implementation.user_class else implementation.id.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class TrainerFamily:
    """What cases, ledger and reports ask of a family, for the checks of one trainer."""

    name: str
    shapes: tuple[str, ...] = ("B", "T", "V", "H")

    @property
    def checks(self) -> dict[str, Check]:
        return {c.name: c for c in load().values() if self.name in c.trainers}

    @property
    def settings(self) -> dict[str, Setting]:
        """`check` and the settings of every check of this trainer."""
        checks = self.checks
        out = {"check": Setting(None, "which check", tuple(checks))}
        for one in checks.values():
            out |= one.settings
        return out

    def full_settings(self, case: Case) -> SimpleNamespace:
        """Every setting of the case's check, defaults filled in. Raises UsageError for a check that this trainer does not
        have, a setting that the check does not have, or a value outside its choices."""
        found = self.check(case)
        if case.tensors:
            raise UsageError(f"case {case.id}: a check of a trainer does not store tensors")
        table = {"check": Setting(None, "which check", (found.name,)), **found.settings}
        return filled(case, table, f"check {found.name}")

    def check(self, case: Case) -> Check:
        """The check of a case. Raises UsageError, naming the checks that this trainer has."""
        checks = self.checks
        if case.settings.get("check") not in list(checks):  # a list compares what cannot be hashed
            raise UsageError(
                f"case {case.id}: check={case.settings.get('check')!r} is unknown to {self.name}, "
                f"choose from {', '.join(checks) or 'none'}"
            )
        return checks[case.settings["check"]]

    def case(self, seed: int, dtype: Any, settings: Mapping[str, Any]) -> Case:
        """A case without the settings that are at their check's default."""
        table = self.checks[settings["check"]].settings
        kept = {k: v for k, v in settings.items() if k == "check" or v != table[k].default}
        return Case(self.name, seed, dtype, kept)

    def features(self, case: Case) -> dict[str, Any]:
        return {}


def is_trainer(name: str) -> bool:
    return name in TRAINERS


def family(name: str) -> TrainerFamily:
    """The trainer called `name`, as a family. Raises UsageError, naming the trainers that have checks."""
    if name not in TRAINERS:
        raise UsageError(f"trainer {name!r} is unknown, choose from {', '.join(TRAINERS)}")
    return TrainerFamily(name)


def implementations() -> dict[str, Implementation]:
    """Every path of every trainer that some check is run on, by id."""
    out = {}
    for trainer in TRAINERS:
        paths = {w for c in family(trainer).checks.values() for w in c.paths}
        for path in (w for w in PATHS if w in paths):
            id = f"{trainer}.{path}"
            out[id] = _implementation(id, trainer, "reference" if path == "released" else "candidate")
    return out


def of_user(kind: type, id: str) -> Implementation:
    """The checks of the nearest TRL trainer that `kind` extends, on `kind`, FILE.py:NAME. Raises UsageError where it
    extends no trainer that has checks."""
    families = {spec.upstream: name for name, spec in SPECS.items() if spec.library == "trl"}
    extended = (b.__name__ for b in kind.__mro__ if b.__module__.startswith("trl."))
    name = next((families[n] for n in extended if n in families), None)
    if name is None:
        raise UsageError(
            f"implementation {id!r}: a class must extend one of TRL's trainers {', '.join(families)}; of a "
            "module name an instance"
        )
    return _implementation(id, name, "candidate", user_class=kind, extends=f"{name}.released")


def _implementation(id: str, trainer: str, role: Literal["reference", "candidate"], **more: Any) -> Implementation:
    call: Any = functools.partial(measured, more.get("user_class"))
    library = SPECS[trainer].library
    if library != "trl" and id.endswith(".fused"):
        library = "liger-kernel"
    return Implementation(id, trainer, role, call, library=library, dtypes=frozenset({"fp32"}), **more)


def measured(user_class: type | None, call: CheckCall) -> Iterator[Quantity]:
    """The call of a trainer's implementation: what the case's check measures of it, `user_class` in the place of TRL's."""
    with drive.using(user_class), drive.tiled(getattr(call.settings, "tile", 0)):
        yield from family(call.case.family).check(call.case).run(call)


def cases(name: str, profile: str, seed: int, asked: bool = False, own: bool = False) -> list[Case]:
    """The cases of a trainer in a profile, those of every check of it, without doubles. `own`: for a user's class too.

    In quick a user's trainer has those of pr, and so has one without cases there that was `asked` for by name.
    """
    if own and profile == "quick":
        return cases(name, "pr", seed, own=own)
    fam = family(name)
    out: dict[str, Case] = {}
    for one in fam.checks.values():
        more = one.of_user if own else ()
        for trainer, settings in (*one.listed(profile, seed), *more):
            if trainer == name:
                case = fam.case(0 if PROFILES[profile].derandomised else seed, "fp32", {"check": one.name, **settings})
                fam.full_settings(case)
                out.setdefault(case.id, case)
    if profile == "quick" and asked and not out:
        return cases(name, "pr", seed)
    return list(out.values())


def chosen(names_or_none: Iterable[str], have: Collection[str]) -> tuple[str, ...]:
    """The trainers among the wanted families (none named: all) that some chosen implementation belongs to."""
    wanted = tuple(names_or_none) or TRAINERS
    return tuple(n for n in wanted if n in TRAINERS and n in have)


def runs(case: Case, implementation: Implementation) -> bool:
    """Whether the check of a case is run on the path of an implementation. Raises UsageError as `full_settings`."""
    fam = family(case.family)
    fam.full_settings(case)
    return path_of(implementation) in fam.check(case).paths


def rows_of(
    case: Case,
    implementation: Implementation,
    device: str = "cpu",
    compared: bool = False,
    known: Callable[[Row], bool] = lambda row: False,
) -> list[Row]:
    """Rows of one implementation of the case's trainer; `compared`: whether the trainer as released was judged on the case.
    `known`: whether a failing row need not fail a second time."""
    fam = family(case.family)
    found = fam.check(case)
    used = device if found.moves else "cpu"  # the row tells the device that was used
    call = CheckCall(case, fam.full_settings(case), path_of(implementation), used)
    with drawn.of_case(case.seed):
        return list(_rows(found, call, implementation, compared, known))


def _rows(
    found: Check, call: CheckCall, implementation: Implementation, compared: bool, known: Callable[[Row], bool]
) -> Iterator[Row]:
    """A user's class that cannot be judged where the trainer as released was `compared` failed."""
    about = {"role": implementation.role, "recipe": "fp32"}
    base = empty_row(family(call.case.family), call.case, implementation.id, call.device, **about)
    missing = implementation.missing()
    if implementation.user_class and not found.drives:
        missing = f"check {found.name} does not drive the trainer's class in this process: it cannot drive yours"
    if missing:
        yield replace(base, message=missing)
        return
    outcome, results = attempt(call, implementation)
    if outcome.verdict != "ran":
        failed = implementation.user_class and compared and outcome.verdict == "unsupported" and not outcome.elsewhere
        verdict: Any = "crashed" if failed else outcome.verdict
        yield replace(base, verdict=verdict, message=outcome.message, blame=outcome.blame)
        return
    rows = [_row(base, quantity, j) for quantity, j in results]
    failing = [row for row in rows if row.failing]
    again = {str(row.quantity) for row in failing if not all(map(known, failing))}
    unsteady = flaky(again, lambda: {q.name: j.agrees for q, j in attempt(call, implementation)[1]})
    yield from (replace(row, verdict="nondeterministic") if row.quantity in unsteady else row for row in rows)


def of_model(case: Case, known: Callable[[Row, Case], object]) -> str:
    """What is wrong of a case's model by itself, without a trainer, and not `known`: the fault is then not the trainer's, or
    not its alone."""
    settings = family(case.family).full_settings(case)
    model, alone = getattr(settings, "model", "llama"), family(ALONE).checks[MODEL_ALONE].settings["model"].choices
    if settings.check == MODEL_ALONE or model not in (alone or ()):
        return ""
    own, failing = _alone(model, case.seed)
    wrong = [row.quantity or row.message for row in failing if not known(row, own)]
    return f"without a trainer the model is wrong too (check {MODEL_ALONE}: {'; '.join(wrong)})" if wrong else ""


@functools.cache
def _alone(model: str, seed: int) -> tuple[Case, list[Row]]:
    case = family(ALONE).case(seed, "fp32", {"check": MODEL_ALONE, "model": model})
    return case, [row for row in rows_of(case, implementations()[f"{ALONE}.released"]) if row.failing]


def attempt(call: CheckCall, implementation: Implementation) -> tuple[Outcome, list[tuple[Quantity, Judgement]]]:
    """Call the implementation once; what it raised as an outcome. A check that measured nothing is a fault of the harness."""
    results: list[tuple[Quantity, Judgement]] = []

    def run() -> Outcome:
        driven: Any = implementation.call
        results.extend((quantity, judge(quantity)) for quantity in driven(call))
        return Outcome("ran") if results else Outcome("unsupported", message="nothing was measured", blame="harness")

    return guarded(implementation, run), results


def judge(quantity: Quantity) -> Judgement:
    """The judgement of what a check measured, with all that is told of it where it disagrees."""
    j = quantity.judged
    message = "; ".join(filter(None, [j.message, quantity.message]))
    return j if j.agrees else dataclasses.replace(j, message=message)


def _row(base: Row, quantity: Quantity, j: Judgement) -> Row:
    return replace(
        base,
        quantity=quantity.name,
        verdict="agree" if j.agrees else "disagree",
        cls=None if j.agrees else "logic",
        gate=j.gate,
        headroom=finite(j.headroom),
        gates={k: finite(v) for k, v in j.gates.items()},
        value=finite(_size(quantity.value), VALUE),
        value_oracle=finite(_size(quantity.exact), VALUE),
        max_abs=finite(j.max_abs),
        worst=[] if j.agrees else list(j.worst),
        message="" if j.agrees else j.message,
    )


def _size(x: Any) -> float | None:
    """A number's value, a tensor's norm, that of all tensors together."""
    return math.hypot(*(size(t) or 0.0 for t in x.values())) if isinstance(x, Mapping) else size(x)
