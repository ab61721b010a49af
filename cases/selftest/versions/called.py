"""Run by an environment's python: every adapter and trainer there called once or more; each call is a line on standard output.

Each loss's adapter is called on the plain case and with one setting moved, and from each of the bases (Triton's kernels run on
the plain one alone), each trainer's ways run one cell. Nothing is compared with the definition.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from parity.compare.one_case import skip_reason
from parity.process import prepare
from parity.protocol.call import execute
from parity.registry import load, loss_families, loss_family, run_case
from parity.sampling.capabilities import BASES, DECIDING
from parity.trainers import catalogue
from parity.trainers.specs import TRAINERS

MARK = "called "


def cases(name, dtype):
    """Label -> case of a loss family: the plain ones, then each setting that decides what is computed moved on each of them."""
    family = loss_family(name)
    out: dict[str, Any] = {}
    for base in ({}, *BASES.get(name, ())):
        full = {n: s.default for n, s in family.settings.items()} | dict(base)
        for more in ({}, *_moved(family, {*DECIDING[name]} - {"lengths"})):
            case = family.case(0, dtype, family.canonical(dtype, full | more))
            if more.items() <= vars(family.full_settings(case)).items():
                out.setdefault(_label(case.settings), case)
    return out


def _moved(family, names) -> Iterator[dict[str, Any]]:
    """Each of the settings at every other choice; a number at another value."""
    for name in sorted(names):
        setting = family.settings[name]
        whole = isinstance(setting.default, int)
        others = setting.choices or ((setting.default + 3) if whole else (setting.default or 0.3) * 0.7,)
        yield from ({name: value} for value in others if value != setting.default)


def _label(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "plain"


def calls() -> Iterator[dict[str, Any]]:
    """Every call in this process's own environment, each implementation in the first dtype that it takes."""
    there = [i for i in load().values() if i.library and i.missing() is None and not i.opt_in]
    for name in loss_families():
        ran: set[str] = set()
        for dtype in ("fp32", "fp16"):
            left = [i for i in there if i.family == name and i.id not in ran]
            made = {label: loss_family(name).build(case) for label, case in cases(name, dtype).items()} if left else {}
            for implementation in left:
                for label, x in made.items():
                    with contextlib.nullcontext() if label == "plain" else _kernels_skipped():
                        verdict, message, blame = _called(implementation, x)
                    ran |= {implementation.id} if verdict == "ran" else set()
                    yield _told(implementation, f"{dtype}, {label}", verdict, message, blame)
    for name in TRAINERS:
        in_family = {i.id: i for i in there if i.family == name}
        listed = catalogue.cases(name, "pr", 0) or catalogue.cases(name, "nightly", 0)
        case = min(listed, key=lambda case: len(case.settings))
        for row in run_case(case, in_family.values()):
            ran_by = in_family[row.implementation]
            yield _told(ran_by, case.settings["check"], row.verdict or "", row.message, row.blame)


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


def _called(implementation, x):
    family = loss_family(implementation.family)
    reason = skip_reason(family, implementation, x.case, x.settings, "cpu")
    if reason:
        return "unsupported", str(reason), None
    wanted = {n: g for n, g in x.cotangents.items() if n not in family.optional or n in implementation.outputs}
    tried = execute(implementation, dataclasses.replace(x, cotangents=wanted))
    return tried.verdict, tried.message, tried.blame


def _told(implementation, case, verdict, message, blame):
    names = {"implementation": implementation.id, "version": str(implementation.version()), "case": case}
    return names | {"verdict": verdict, "message": message, "blame": blame}


if __name__ == "__main__":
    prepare("cpu")
    for call in calls():
        print(f"\n{MARK}{json.dumps(call)}", flush=True)
