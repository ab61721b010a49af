"""What a trainer check is: a function that drives a real trainer on a tiny real model and says what it measured.

A check has a name, one or more trainers, and settings. A case of it is a `Case` whose family is the trainer
("grpo-trainer") and whose setting `check` is the check's name: it can be frozen, replayed, bisected and put into the ledger
as any other. It runs on several paths (`PATHS`): the trainer as released, with its fused loss, or with parity.fixes. Each
path is an implementation in rows, such as "grpo-trainer.released".
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from parity.case.case import Case
from parity.case.inputs import Setting
from parity.compare.result_rows import size
from parity.errors import UsageError
from parity.judge.gates import Judgement
from parity.trainers.specs import SPECS, TRAINERS, TrainerSpec

Made = TypeVar("Made")

PATHS = {
    "released": "the trainer as the installed version ships it",
    "fused": "the installed version's Liger path (use_liger_loss, use_liger_kernel), model layers unchanged",
    "fixed": "the same after parity.fixes.apply(trainer)",
}


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One judged quantity of a check.

    Attributes:
        quantity: "kl", "loss", "gradient of model.layers.0.mlp.up_proj.weight", …
        gates: gate -> headroom (error ÷ allowed; above 1 disagrees, NaN and infinity too).
        value: what the trainer gave; of a tensor its norm.
        exact: what the definition gives.
        message: what differs, first parameter, layer or module first; shown when it disagrees.
        worst: at most five entries, as in the results contract.
        max_abs, max_rel: largest error, absolute and relative.
        kind: "logic" or "precision", the class of a disagreement.
    """

    quantity: str
    gates: Mapping[str, float]
    value: float | None = None
    exact: float | None = None
    message: str = ""
    worst: tuple[Mapping[str, Any], ...] = ()
    max_abs: float | None = None
    max_rel: float | None = None
    kind: str = "logic"

    @property
    def agrees(self) -> bool:
        """Whether every gate holds."""
        return all(h <= 1.0 for h in self.gates.values())


def bounded(quantity: str, value: float, exact: float, allowed: float, message: str = "") -> CheckResult:
    """|value - exact| ≤ allowed, `allowed` a derived bound; a NaN disagrees."""
    error = abs(value - exact)
    headroom = 0.0 if error == 0.0 else error / allowed if allowed > 0.0 else math.inf
    return CheckResult(quantity, {"bound": headroom}, value, exact, message, max_abs=error)


def holds(
    quantity: str,
    condition: bool,
    message: str = "",
    gate: str = "structure",
    value: float | None = None,
    exact: float | None = None,
) -> CheckResult:
    """A yes-or-no quantity: headroom 0 when it holds, infinite when it does not."""
    return CheckResult(quantity, {gate: 0.0 if condition else math.inf}, value, exact, "" if condition else message)


def judged(quantity: str, j: Judgement, value: Any, exact: Any, message: str = "") -> CheckResult:
    """A quantity judged by the gates of `parity.judge.gates`; tensors show as their norm."""
    return CheckResult(
        quantity,
        j.gates,
        size(value),
        size(exact),
        "; ".join(filter(None, [j.message, message])),
        max_abs=j.max_abs,
        max_rel=j.max_rel,
    )


@dataclasses.dataclass(frozen=True)
class CheckCall:
    """A case of a check on one path: what a check function is given.

    `user_class`: a user's trainer, driven instead of the TRL class that it extends.
    """

    case: Case
    settings: SimpleNamespace
    path: str
    device: str
    user_class: type | None = None

    @property
    def trainer(self) -> str:
        """Class name of the trainer in TRL, "GRPOTrainer"."""
        return self.spec.upstream

    @property
    def spec(self) -> TrainerSpec:
        """What there is to know of the trainer."""
        return SPECS[self.case.family]


_SHARED: dict[tuple[str, str], Any] = {}


def shared(call: CheckCall, name: str, make: Callable[[], Made]) -> Made:
    """What every path of a case is compared with, made once: a definition, its replicas. Only the last case's is kept."""
    key = (call.case.id, name)
    if key not in _SHARED:
        for other in [k for k in _SHARED if k[0] != call.case.id]:
            del _SHARED[other]
        _SHARED[key] = make()
    return _SHARED[key]


CheckCase = tuple[str, Mapping[str, Any]]
"""A case of a check as it is listed: the trainer, and the settings away from their default."""

CheckCases = Callable[[str, int], Iterable[CheckCase]]
"""Profile and seed -> the cases of a check in that profile."""


def by_profile(
    quick: Sequence[CheckCase] = (), pr: Sequence[CheckCase] = (), covered: Callable[[CheckCase], bool] | None = None
) -> Callable[[Callable[[int], Iterable[CheckCase]]], CheckCases]:
    """Make `CheckCases` of a function of the seed, which is asked in nightly and soak; the short profiles have a few fixed ones.

    `covered`: pr has `covering` too, of those for which it is true.
    """

    def decorate(longer: Callable[[int], Iterable[CheckCase]]) -> CheckCases:
        @functools.wraps(longer)
        def cases(profile: str, seed: int) -> Iterable[CheckCase]:
            if profile == "pr":
                return [*pr, *(covering(filter(covered, longer(seed)), pr) if covered else ())]
            return quick if profile == "quick" else longer(seed)

        return cases

    return decorate


def covering(cases: Iterable[CheckCase], listed: Sequence[CheckCase] = ()) -> Iterator[CheckCase]:
    """A part of the cases with which, beside the listed ones, each trainer has every value of every setting; greedy.

    Of cases with as many new values, the one with the most new pairs of values away from default. Then, for each value that
    these have only beside more settings than some case needs, the smallest such case: a path may refuse what stands beside it.
    """
    by_trainer: dict[str, list[Mapping[str, Any]]] = {}
    for trainer, settings in cases:
        by_trainer.setdefault(trainer, []).append(settings)
    for trainer, every in by_trainer.items():
        names = sorted({name for settings in every for name in settings})

        def values(settings: Mapping[str, Any], names: Sequence[str] = names) -> frozenset[tuple[str, str]]:
            return frozenset((name, repr(settings.get(name, "default"))) for name in names)

        def pairs(settings: Mapping[str, Any]) -> set[frozenset[tuple[str, str]]]:
            return set(map(frozenset, itertools.combinations(((n, repr(v)) for n, v in settings.items()), 2)))

        have = [s for t, s in listed if t == trainer]
        left = set().union(*map(values, every)).difference(*map(values, have))
        met = set().union(*map(pairs, have))
        while left:
            best = max(every, key=lambda s: (len(values(s) & left), len(pairs(s) - met)))
            yield trainer, best
            have.append(best)
            left, met = left - values(best), met | pairs(best)
        for value in sorted({(n, repr(v)) for settings in every for n, v in settings.items()}):
            smallest = min((s for s in every if value in values(s)), key=len)
            if all(len(s) > len(smallest) for s in have if value in values(s)):
                yield trainer, smallest
                have.append(smallest)


@dataclasses.dataclass(frozen=True)
class Check:
    """A registered check.

    Attributes:
        name: as in the setting `check`.
        trainers: families of `TRAINERS` it is about.
        settings: its dimensions with their defaults.
        cases: (profile, seed) -> (trainer, settings away from default) of that profile.
        run: a call of the check -> what was measured. Raises `parity.errors.Unsupported` with the reason where nothing is to be
            judged; any other exception is a verdict (refused, crashed).
        paths: the paths of `PATHS` on which it is run.
        doc: first line of the function's docstring, for listings.
        drives: whether it drives the trainer's class in this process, so that a user's own can take its place; else it
            looks at functions beside the class, or starts processes of its own.
        moves: whether it hands the device of its call to what it runs; the others run on the CPU whatever the run's device is.
    """

    name: str
    trainers: tuple[str, ...]
    settings: Mapping[str, Setting]
    cases: CheckCases
    run: Callable[[CheckCall], Iterator[CheckResult]]
    paths: tuple[str, ...] = ("released", "fixed")
    doc: str = ""
    drives: bool = True
    moves: bool = False


CHECKS: dict[str, Check] = {}


def check(
    name: str,
    trainers: Iterable[str],
    settings: Mapping[str, Setting],
    cases: CheckCases,
    paths: tuple[str, ...] = ("released", "fixed"),
    drives: bool = True,
    moves: bool = False,
) -> Callable[[Callable[[CheckCall], Iterator[CheckResult]]], Callable[[CheckCall], Iterator[CheckResult]]]:
    """Register a function as `Check(name, …)`.

    Raises:
        UsageError: for a trainer or a path that does not exist, or a name that is taken by another module.
    """
    wanted = tuple(trainers)
    for one, known in [*((t, TRAINERS) for t in wanted), *((w, PATHS) for w in paths)]:
        if one not in known:
            raise UsageError(f"check {name}: {one!r} is unknown, choose from {', '.join(known)}")

    def register(run: Callable[[CheckCall], Iterator[CheckResult]]) -> Callable[[CheckCall], Iterator[CheckResult]]:
        other = CHECKS.get(name)
        if other is not None and other.run.__module__ != run.__module__:
            raise UsageError(f"check {name!r} is registered by {other.run.__module__} and {run.__module__}")
        doc = (run.__doc__ or "").strip().partition("\n")[0]
        CHECKS[name] = Check(name, wanted, settings, cases, run, paths, doc, drives, moves)
        return run

    return register


def pairwise(settings: Mapping[str, Setting], seed: int) -> Iterator[dict[str, Any]]:
    """CheckCases that cover every pair of values of every two settings with choices, greedily; the order follows the seed.

    Settings without choices stay at their default. Yields complete cases, defaults included.
    """
    axes = {name: s.choices for name, s in settings.items() if s.choices is not None}
    names, shuffled = list(axes), random.Random(seed)
    open_pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    while open_pairs:
        best: dict[str, Any] = {}
        covered: set[Any] = set()
        first = shuffled.choice(sorted(open_pairs, key=repr))
        for _ in range(40):
            case = {name: shuffled.choice(axes[name]) for name in names}
            case[first[0]], case[first[2]] = first[1], first[3]
            pairs = {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)} & open_pairs
            if len(pairs) > len(covered):
                best, covered = case, pairs
        open_pairs -= covered
        yield best
