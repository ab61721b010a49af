"""One case through every implementation: oracle and replicas once, then a row for each judged quantity."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import context_of
from parity.implementations.implementation import Implementation
from parity.judge.escalation import settle
from parity.judge.gates import Judgement
from parity.judge.recipe import IEEE_FP32
from parity.judge.timings import within
from parity.judging import diagnose
from parity.judging.assess import CaseOracle, classify, confirmed, followed_variant, judge_all
from parity.judging.kept import Calls
from parity.judging.rows import Blame, empty_row, flaky, size
from parity.judging.undeclared import undeclared
from parity.protocol import process_state, side_effects
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.results.row import Row, finite


def run_case(
    family: Family,
    case: Case,
    implementations: Iterable[Implementation],
    device: str = "cpu",
    thorough: bool | Callable[[Implementation], bool] = True,
    announce: Callable[[Implementation], None] = lambda implementation: None,
) -> Iterator[Row]:
    """Rows of a case for each implementation, the reference first.

    `thorough` (or what it says of an implementation) adds the repeated calls of the protocol gate and the exact
    relations; `announce` is called with each
    implementation before it runs, so that the supervisor knows which one to blame if the process dies.
    """
    oracle = CaseOracle.of(family, case, device)
    blame = Blame()
    for implementation in sorted(implementations, key=lambda i: i.role != "reference"):
        if process_state.broken():  # a fresh process goes on from here: `parity.running.shard.Retired`
            return
        announce(implementation)
        deep = thorough if isinstance(thorough, bool) else thorough(implementation)
        with within("implementation", implementation.id):
            rows = list(_rows(oracle, implementation, deep))
        yield from map(blame.decide, rows)


def skip_reason(family: Family, implementation: Implementation, case: Case, settings: Any, device: str) -> str | None:
    """Why an implementation does not claim this case, before it is called."""
    missing = implementation.missing()
    if missing:
        return missing
    if case.dtype not in implementation.dtypes:
        return f"dtype {case.dtype} is not among {', '.join(sorted(implementation.dtypes))}"
    context = context_of(settings)
    if (context if context != "tf32" else "plain") not in implementation.contexts:
        return f"context {context} is not supported"
    return interpreter_limit(family, case, settings) if implementation.interpreted and device == "cpu" else None


INTERPRETER_BLOCKS = 400


def interpreter_limit(family: Family, case: Case, settings: Any) -> str | None:
    """Why Triton's interpreter cannot judge a kernel on this case: probed, or too many blocks for its pace."""
    from parity.implementations import interpreter

    interpreter.patching_by_name()
    if (case.dtype == "bf16" or context_of(settings) == "autocast") and interpreter.truncates_bfloat16():
        return "Triton's interpreter truncates to bfloat16 where hardware rounds"
    rows, length = family.sizes(settings)
    blocks = rows * (1 + length // 512)
    if blocks > INTERPRETER_BLOCKS or length > 4 * 4096:
        return f"{blocks} blocks are too many for Triton's interpreter (at most {INTERPRETER_BLOCKS}): run it on CUDA"
    return None


def _rows(whole: CaseOracle, implementation: Implementation, thorough: bool) -> Iterator[Row]:
    oracle = whole.offered(implementation)
    inputs = oracle.inputs
    recipe = implementation.recipe_for(inputs)
    base = empty_row(
        oracle.family,
        inputs.case,
        implementation.id,
        inputs.device.type,
        role=implementation.role,
        recipe=recipe.describe(),
        undecided=inputs.undecided,
    )
    reason = skip_reason(oracle.family, implementation, inputs.case, inputs.settings, inputs.device.type)
    if reason:
        yield replace(base, message=reason)
        return
    with within("stage", "first call"):
        outcome = execute(implementation, inputs)
    leaks = list(outcome.leaks)
    unfit = process_state.broken()
    if unfit and outcome.verdict == "ran":  # nothing in this process can be believed, least of all the replicas
        yield _logic_row(base, "protocol", "protocol", False, "; ".join(leaks + unfit))
        return
    if leaks and not unfit:
        leaks = side_effects.left_again(implementation, inputs, leaks)
    if outcome.verdict != "ran":
        yield replace(base, verdict=outcome.verdict, message=outcome.message, blame=outcome.blame)
        return
    returned = implementation.outputs | (oracle.family.optional & set(outcome.quantities))
    if implementation.is_function and returned != implementation.outputs:  # what it returns is judged, declared or not
        implementation = dataclasses.replace(implementation, outputs=implementation.outputs | outcome.differentiable)
        if whole.offered(implementation) is not oracle:
            oracle = whole.offered(implementation)
            inputs = oracle.inputs
            outcome = execute(implementation, inputs)
        implementation = dataclasses.replace(implementation, outputs=returned)
    with within("stage", "judgement"):
        judged = confirmed(oracle, implementation, outcome)
    failing = [name for name, j in judged.items() if not j.agrees]
    variant = followed_variant(oracle, implementation, outcome, failing) if failing else None

    def again() -> dict[str, bool]:
        second = execute(implementation, inputs)
        if outcome.same_as(second):
            return dict.fromkeys(failing, False)
        found = confirmed(oracle, implementation, second) if second.verdict == "ran" else {}
        return {name: j.agrees for name, j in found.items()}

    with within("stage", "second call"):
        unsteady = flaky(failing, again)
    if thorough and not failing and recipe.describe() != "fp32":
        finer = judge_all(oracle, implementation, outcome, dataclasses.replace(IEEE_FP32, output=recipe.output))
        base.recipe_measured = "fp32" if all(j.agrees for j in finer.values()) else recipe.describe()
    classes = classify(oracle, implementation, failing) if failing else {}
    rounded = undeclared(oracle, implementation, outcome, failing) if "precision" in classes.values() else None
    for name, j in judged.items():
        row = _judged_row(base, oracle, name, j, outcome)
        if not j.agrees:
            row.verdict = "nondeterministic" if name in unsteady else "disagree"
            row.cls = classes[name]
            row.variant = variant
            row.message = "; ".join(filter(None, [j.message, *diagnose.hints(oracle, name, outcome), rounded]))
            rounded = None  # said once
        yield row
    if thorough:
        other = oracle.beside
        with process_state.together(implementation.id):
            leaks += side_effects.repeated(implementation, inputs, other, outcome)
            leaks += side_effects.interleaved(implementation, inputs, other, outcome)
            leaks += side_effects.accumulation(implementation, inputs)
            leaks += side_effects.unrecorded(
                implementation, inputs, outcome, functools.partial(_agree, oracle, implementation)
            )
            leaks += side_effects.unneeded(implementation, inputs)
            related = side_effects.relations(oracle.family, implementation, inputs, outcome)
        leaks += [] if failing else Calls.of(whole).stale(implementation)  # its oracle knows no patch of what it judges
        for name, (holds, message) in related.items():
            yield _logic_row(base, f"relation: {name}", "relation", holds, message)
    leaks += process_state.broken()
    base.unjudged = list(outcome.unknown)
    yield _logic_row(base, "protocol", "protocol", not leaks, "; ".join(leaks))


def _agree(oracle: CaseOracle, implementation: Implementation, outcome: Outcome) -> bool:
    """Whether whatever outputs there are agree with the definition."""
    recipe, only = implementation.recipe_for(oracle.inputs), frozenset(outcome.quantities)
    judged = settle(functools.partial(judge_all, oracle, implementation, outcome, recipe, only=only), together=True)
    return all(j.agrees for j in judged.values())


def _judged_row(base: Row, oracle: CaseOracle, name: str, j: Judgement, outcome: Outcome) -> Row:
    return replace(
        base,
        quantity=name,
        verdict="agree" if j.agrees else "disagree",
        gate=j.gate,
        headroom=finite(j.headroom),
        gates={k: finite(v) for k, v in j.gates.items()},
        undecided=oracle.inputs.undecided + j.undecided,
        value=finite(size(outcome.quantities.get(name))),
        value_oracle=finite(size(oracle.exact.get(name))),
        max_abs=finite(j.max_abs),
        max_rel=finite(j.max_rel),
        dist=finite(j.dist),
        allclose=j.allclose,
        atol=finite(j.atol),
        rtol=finite(j.rtol),
        worst=[] if j.agrees else [_entry(oracle, name, *w) for w in j.worst],
        slope=finite(j.slope),
        message=j.message,
    )


def _logic_row(base: Row, quantity: str, gate: str, holds: bool, message: str) -> Row:
    headroom = 0.0 if holds else None
    return replace(
        base,
        quantity=quantity,
        verdict="agree" if holds else "disagree",
        cls=None if holds else "logic",
        gate=gate,
        headroom=headroom,
        gates={gate: headroom},
        message=message,
    )


def _entry(
    oracle: CaseOracle, name: str, index: tuple[int, ...], value: float, truth: float, error: float
) -> dict[str, Any]:
    """One of the worst entries, with what it belongs to (`Family.place`): sequence, position, token id and mask of a token."""
    out = {"index": list(index), "value": finite(value), "oracle": finite(truth), "error": finite(error)}
    return out | oracle.family.place(oracle.inputs, name, index)
