"""One case through every implementation: oracle and replicas once, then each party judged, as result rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from parity.case.case import Case
from parity.case.family import AnyFamily, Family
from parity.case.inputs import context_of
from parity.implementations.implementation import Implementation
from parity.judging import diagnose, side_effects
from parity.judging.assess import Bench, classify, confirmed, followed_variant, judge_all
from parity.judging.execute import Outcome, execute
from parity.judging.gates import Judgement
from parity.recipe import IEEE_FP32

Row = dict[str, Any]


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
    relations; `announce` is told of each
    implementation before it runs, so that a watcher knows whom to blame if the process does not come back.
    """
    bench = Bench.of(family, case, device)
    kept = side_effects.copies(bench.inputs)
    reference: dict[str, Row] = {}
    against: str | None = None
    for implementation in sorted(implementations, key=lambda i: i.role != "reference"):
        announce(implementation)
        deep = thorough if isinstance(thorough, bool) else thorough(implementation)
        rows = list(_rows(bench.offered(implementation), implementation, deep))
        side_effects.damaged(
            bench.inputs, kept
        )  # put back what an implementation changed: the next one gets the same bits
        for row in rows:
            if implementation.role == "reference":
                if row["verdict"] == "disagree":
                    row["blame"] = row["blame"] or "reference"
                if row["verdict"] in ("agree", "disagree"):
                    reference[row["quantity"]] = row
                    against = implementation.id
            else:
                row["against"] = against
                beside = reference.get(row["quantity"])
                row["value_reference"] = beside["value"] if beside else None
                if row["verdict"] == "disagree" and row["variant"] is None:
                    row["blame"] = "both" if beside and beside["verdict"] == "disagree" else "candidate"
            yield row


def skip_reason(family: Family, implementation: Implementation, case: Case, settings: Any, device: str) -> str | None:
    """Why an implementation does not claim this case, before it is called."""
    missing = implementation.missing()
    if missing:
        return missing
    if case.dtype not in implementation.dtypes:
        return f"dtype {case.dtype} is not among {', '.join(sorted(implementation.dtypes))}"
    context = context_of(settings)
    if (context if context != "tf32" else "plain") not in implementation.contexts:
        return f"context {context} is not claimed"
    return interpreter_limit(family, case, settings) if implementation.interpreted and device == "cpu" else None


INTERPRETER_BLOCKS = 400


def interpreter_limit(family: Family, case: Case, settings: Any) -> str | None:
    """Why Triton's interpreter cannot judge a kernel on this case: probed, or too many blocks for its pace."""
    from parity.implementations.interpreter import truncates_bfloat16

    if case.dtype == "bf16" and truncates_bfloat16():
        return "Triton's interpreter truncates to bfloat16 where hardware rounds"
    rows, length = family.sizes(settings)
    blocks = rows * (1 + length // 512)
    if blocks > INTERPRETER_BLOCKS or length > 4 * 4096:
        return f"{blocks} blocks are too many for Triton's interpreter (at most {INTERPRETER_BLOCKS}): run it on CUDA"
    return None


def _rows(bench: Bench, implementation: Implementation, thorough: bool) -> Iterator[Row]:
    inputs = bench.inputs
    base = _base(bench, implementation)
    recipe = implementation.recipe_for(inputs)
    reason = skip_reason(bench.family, implementation, inputs.case, inputs.settings, inputs.device.type)
    if reason:
        yield base | {"verdict": "unsupported", "message": reason}
        return
    outcome, leaks = side_effects.watched(implementation, inputs)
    if leaks:  # a first call imports and caches; what an implementation leaves behind it leaves again
        leaks = [leak for leak in side_effects.watched(implementation, inputs)[1] if leak in leaks]
    if outcome.verdict != "ran":
        yield base | {"verdict": outcome.verdict, "message": outcome.message, "blame": outcome.blame}
        return
    judged = confirmed(bench, implementation, outcome)
    failing = [name for name, j in judged.items() if not j.agrees]
    variant = followed_variant(bench, implementation, outcome, failing) if failing else None
    again = None
    if failing:
        second = execute(implementation, inputs)
        again = confirmed(bench, implementation, second) if second.verdict == "ran" else {}
    if thorough and not failing and recipe.describe() != "fp32":
        finer = judge_all(bench, implementation, outcome, dataclasses.replace(IEEE_FP32, output=recipe.output))
        base["recipe_measured"] = "fp32" if all(j.agrees for j in finer.values()) else recipe.describe()
    classes = classify(bench, implementation, failing) if failing else {}
    for name, j in judged.items():
        row = base | _judged_row(bench, implementation, name, j, outcome)
        if not j.agrees:
            assert again is not None
            flaky = name not in again or again[name].agrees
            row["verdict"] = "nondeterministic" if flaky else "disagree"
            row["class"] = classes[name]
            row["variant"] = variant
            row["message"] = "; ".join(filter(None, [j.message, *diagnose.hints(bench, name, outcome)]))
        yield row
    if thorough:
        other = bench.beside()
        leaks += side_effects.repeated(implementation, inputs, other, outcome)
        leaks += side_effects.interleaved(implementation, inputs, other, outcome)
        leaks += side_effects.accumulation(implementation, inputs)
        for name, (holds, message) in side_effects.relations(bench.family, implementation, inputs, outcome).items():
            yield base | _logic_row(f"relation: {name}", "relation", holds, message)
    yield base | _logic_row("protocol", "protocol", not leaks, "; ".join(leaks))


def _base(bench: Bench, implementation: Implementation) -> Row:
    inputs = bench.inputs
    return empty_row(bench.family, inputs.case, implementation.id, inputs.device.type) | {
        "role": implementation.role,
        "recipe": implementation.recipe_for(inputs).describe(),
        "undecided": inputs.undecided,
    }


def empty_row(family: AnyFamily, case: Case, implementation: str, device: str) -> Row:
    """A row of the results contract in which nothing has been judged yet."""
    s = family.full_settings(case)
    shapes = {k: getattr(s, k) for k in family.shapes if hasattr(s, k)}
    return {
        "case": case.id,
        "family": case.family,
        "implementation": implementation,
        "role": "candidate",
        "against": None,
        "quantity": None,
        "dtype": case.dtype,
        "device": device,
        "verdict": None,
        "class": None,
        "blame": None,
        "gate": None,
        "headroom": None,
        "gates": {},
        "recipe": None,
        "recipe_measured": None,
        "variant": None,
        "undecided": 0,
        "value": None,
        "value_oracle": None,
        "value_reference": None,
        "max_abs": None,
        "max_rel": None,
        "dist": None,
        "allclose": None,
        "atol": None,
        "rtol": None,
        "slope": None,
        "worst": [],
        "known": None,
        "seed": case.seed,
        "settings": dict(case.settings) | shapes,
        "features": dict(family.features(case)),
        "message": "",
        "replay": f"parity replay {case.id} --implementation {implementation}",
    }


def _judged_row(bench: Bench, implementation: Implementation, name: str, j: Judgement, outcome: Outcome) -> Row:
    value = outcome.quantities.get(name)
    truth = bench.exact.get(name)
    return {
        "quantity": name,
        "verdict": "agree" if j.agrees else "disagree",
        "gate": j.gate,
        "headroom": _finite(j.headroom),
        "gates": {k: _finite(v) for k, v in j.gates.items()},
        "undecided": bench.inputs.undecided + j.undecided,
        "value": _size(value),
        "value_oracle": _size(truth),
        "max_abs": _finite(j.max_abs),
        "max_rel": _finite(j.max_rel),
        "dist": _finite(j.dist),
        "allclose": j.allclose,
        "atol": _finite(j.atol),
        "rtol": _finite(j.rtol),
        "worst": [] if j.agrees else [_entry(bench, name, *w) for w in j.worst],
        "slope": _finite(j.slope),
        "message": j.message,
    }


def _logic_row(quantity: str, gate: str, holds: bool, message: str) -> Row:
    return {
        "quantity": quantity,
        "verdict": "agree" if holds else "disagree",
        "class": None if holds else "logic",
        "gate": gate,
        "headroom": 0.0 if holds else None,
        "gates": {gate: 0.0 if holds else None},
        "message": message,
    }


def _size(value: torch.Tensor | None) -> float | None:
    """A scalar's value, a tensor's norm."""
    if value is None:
        return None
    value = value.detach().double()
    return _finite(float(value) if value.dim() == 0 else float(value.norm()))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _entry(bench: Bench, name: str, index: tuple[int, ...], value: float, truth: float, error: float) -> Row:
    """One of the worst entries, with what it belongs to (`Family.place`): sequence, position, token id and mask of a token."""
    out: Row = {"index": list(index), "value": _finite(value), "oracle": _finite(truth), "error": _finite(error)}
    return out | bench.family.place(bench.inputs, name, index)


def compared(row: Row) -> bool:
    """Whether a row is a judged comparison."""
    return row["verdict"] in ("agree", "disagree", "nondeterministic")
