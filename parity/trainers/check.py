"""What a trainer check is: a function that drives a real trainer on a tiny real model and says what it measured.

A check has a name, one or more trainers, and settings. A case of it is a `Case` whose family is the trainer
("grpo-trainer") and whose setting `check` is the check's name: it can be frozen, replayed, bisected and put into the ledger
as any other. It runs on several paths (`PATHS`): the trainer as released, with its fused loss, or with parity.fixes. Each
path is an implementation in rows, such as "grpo-trainer.released".
"""

import dataclasses
import math
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from parity.case.case import Case, covering
from parity.case.inputs import Setting
from parity.errors import Unsupported, UsageError
from parity.judge.gates import Judgement
from parity.judge.oracle import Oracle
from parity.judge.problem import Problem
from parity.judge.recipe import IEEE_FP32
from parity.trainers.rig import drawn
from parity.trainers.specs import SPECS, TRAINERS, TrainerSpec

Made = TypeVar("Made")

PATHS = {
    "released": "the trainer as the installed version ships it",
    "fused": "the installed version's Liger path (use_liger_loss, use_liger_kernel), the model's layers as they are; of"
    " transformers' own Trainer with Liger's layers",
    "fixed": "the same after parity.fixes.apply(trainer)",
}
EVERY_PATH = tuple(PATHS)
_SHARED: dict[tuple[str, str], Any] = {}
CheckCase = tuple[str, Mapping[str, Any]]
"""A case of a check as it is listed: the trainer, and the settings away from their default."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """One thing that a check measured."""

    name: str  # "kl", "loss", "gradient", …
    value: Any  # what the trainer gave: a number, a tensor, or tensors by name
    exact: Any  # what it should be, as `value`; None where there is none to show
    judged: Judgement  # of the value by its definition
    message: str = ""  # what differs, first parameter or layer first


def entry(name: str, value: float | Tensor, oracle: Oracle, message: str = "", of: str = "") -> Quantity:
    """A value by the quantity of an oracle, the one `of` another name or of its own. A number of Python's is judged as the
    float32 that trainers compute."""
    of = of or name
    given = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
    found = dataclasses.replace(oracle.judge({of: given}, IEEE_FP32)[of], worst=())
    return Quantity(name, value, oracle.exact[of], found, message)


def summed(quantity: str, value: float, terms: Sequence[float], message: str = "") -> Quantity:
    oracle = Problem(lambda terms: {quantity: terms.sum()}, {"terms": torch.tensor(terms)}, {}, ()).oracle
    return entry(quantity, value, oracle, message)


def holds(
    quantity: str, condition: bool, message: str = "", value: float | None = None, exact: float | None = None
) -> Quantity:
    return Quantity(quantity, value, exact, Judgement({"exact": 0.0 if condition else math.inf}), message)


def same(found: Iterable[Any], wanted: Iterable[Any], quantity: str = "sequences") -> Quantity:
    """Every sequence that was wanted is there, as often as it should be, and no other one."""
    got, right = sorted(found), sorted(wanted)
    missing, other = [w for w in right if w not in got], [g for g in got if g not in right]
    message = f"{len(got)} came; {len(missing)} of {len(right)} are missing, first {missing[:1]}; others {other[:1]}"
    return holds(quantity, got == right, message, float(len(got)))


def tells(quantity: str, condition: bool, message: str, value: float | None = None) -> Quantity:
    """Whether the values of a case are such that it tests what it should; Unsupported where they are not, but under seed 0."""
    if not condition and drawn.seed():
        raise Unsupported(f"{message}: under this seed the case tests nothing")
    return holds(quantity, condition, f"{message}: the case tests nothing", value)


@dataclasses.dataclass(frozen=True)
class CheckCall:
    """A case of a check on one path: what a check function is given."""

    case: Case
    settings: SimpleNamespace
    path: str
    device: str

    @property
    def trainer(self) -> str:
        """Class name of the trainer in TRL, "GRPOTrainer"."""
        return self.spec.upstream

    @property
    def spec(self) -> TrainerSpec:
        return SPECS[self.case.family]


def shared(call: CheckCall, name: str, make: Callable[[], Made]) -> Made:
    """What every path of a case is compared with, made once: a definition, its replicas. Only the last case's is kept."""
    key = (call.case.id, name)
    if key not in _SHARED:
        for other in [k for k in _SHARED if k[0] != call.case.id]:
            del _SHARED[other]
        _SHARED[key] = make()
    return _SHARED[key]


def every_value(cases: Iterable[CheckCase], listed: Sequence[CheckCase] = ()) -> Iterator[CheckCase]:
    """A part of the cases with which, beside the listed ones, each trainer has every value of every setting, and each value
    beside no more settings than some case needs: a path may refuse what stands beside it."""
    by_trainer: dict[str, list[Mapping[str, Any]]] = {}
    for trainer, settings in cases:
        by_trainer.setdefault(trainer, []).append(settings)
    for trainer, every in by_trainer.items():
        names = sorted({name for settings in every for name in settings})
        least: dict[tuple[str, str], int] = {}
        for settings in every:
            for name, value in settings.items():
                least[name, repr(value)] = min(len(settings), least.get((name, repr(value)), len(settings)))

        def shown(settings: Mapping[str, Any], names: Sequence[str] = names, least: Any = least) -> set[Hashable]:
            values = {(name, repr(settings.get(name, "default"))) for name in names}
            return values | {(*value, "alone") for value in values if len(settings) <= least.get(value, 0)}

        met = set[Hashable]().union(*(shown(settings) for one, settings in listed if one == trainer))
        yield from ((trainer, settings) for settings in covering(every, shown, met))


def always(case: CheckCase) -> bool:
    """Every case, as `Check.covered`."""
    return True


@dataclasses.dataclass(frozen=True)
class Check:
    name: str  # as in the setting `check`
    trainers: tuple[str, ...]  # families of `TRAINERS` it is about
    settings: Mapping[str, Setting]  # its dimensions with their defaults
    cases: Callable[[int], Iterable[CheckCase]]  # seed -> all its cases, those of nightly and soak
    # a call of the check -> what was measured. Raises `parity.errors.Unsupported` with the reason where nothing is to be
    # judged; any other exception is a verdict (refused, crashed)
    run: Callable[[CheckCall], Iterator[Quantity]]
    quick: Sequence[CheckCase] = ()  # its cases in this profile
    pr: Sequence[CheckCase] = ()  # its cases in this profile
    of_user: Sequence[CheckCase] = ()  # more of its cases, but in quick, where a user's class is asked for
    covered: Callable[[CheckCase], bool] = lambda case: False  # pr has `every_value` of these `cases` too
    paths: tuple[str, ...] = ("released", "fixed")  # the paths of `PATHS` on which it is run
    # whether it drives the trainer's class in this process, so that a user's own can take its place; else it looks at
    # functions beside the class, or starts processes of its own
    drives: bool = True
    moves: bool = False  # whether it hands the device of its call to what it runs; the others run on the CPU always

    @property
    def doc(self) -> str:
        """First line of the function's docstring, for listings."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]

    def listed(self, profile: str, seed: int) -> Iterable[CheckCase]:
        if profile == "pr":
            return [*self.pr, *every_value(filter(self.covered, self.cases(seed)), self.pr)]
        return self.quick if profile == "quick" else self.cases(seed)


CHECKS: dict[str, Check] = {}


def check(
    name: str,
    trainers: Iterable[str],
    settings: Mapping[str, Setting],
    cases: Callable[[int], Iterable[CheckCase]],
    **more: Any,
) -> Callable[[Callable[[CheckCall], Iterator[Quantity]]], Callable[[CheckCall], Iterator[Quantity]]]:
    """Register a function as `Check(name, …)`; `more`: further attributes of it. Raises UsageError for a trainer or a
    path that does not exist, or a name that is taken by another module."""
    wanted = tuple(trainers)
    for one, known in [*((t, TRAINERS) for t in wanted), *((w, PATHS) for w in more.get("paths", ()))]:
        if one not in known:
            raise UsageError(f"check {name}: {one!r} is unknown, choose from {', '.join(known)}")

    def register(run: Callable[[CheckCall], Iterator[Quantity]]) -> Callable[[CheckCall], Iterator[Quantity]]:
        other = CHECKS.get(name)
        if other is not None and other.run.__module__ != run.__module__:
            raise UsageError(f"check {name!r} is registered by {other.run.__module__} and {run.__module__}")
        CHECKS[name] = Check(name, wanted, settings, cases, run, **more)
        return run

    return register


def pairwise(settings: Mapping[str, Setting], seed: int) -> Iterator[dict[str, Any]]:
    """Cases that cover every pair of values of every two settings with choices; which ones follows the seed."""
    from allpairspy import AllPairs

    axes = {name: list(s.choices) for name, s in settings.items() if s.choices is not None}
    shuffled = random.Random(seed)
    for values in axes.values():
        shuffled.shuffle(values)
    yield from (dict(zip(axes, case, strict=True)) for case in AllPairs(list(axes.values())))
