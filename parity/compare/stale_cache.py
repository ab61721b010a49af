"""What a call keeps by shape: a second call of the same shapes with other settings must not find the first's.

`protocol.repeated` calls again with other values at the same settings. A temperature, a mask's dtype or an upstream
gradient that is kept by shape is right there, and wrong as soon as a caller changes it: in a schedule, in evaluation, for a
second model. So a share of the cases is followed by a second one, judged as any case is.
"""

from __future__ import annotations

import dataclasses

import torch

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.judge.oracle import gradient_name
from parity.judging.assess import CaseOracle, confirmed
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.protocol.side_effects import share

LARGEST = 1 << 16
"""Entries of the largest tensor of a case that a second one follows: its replicas cost as much as the case's own."""
MOVED = 0.75
"""Factor of a number: a temperature stays positive, a share stays one, what is switched off stays off."""
ZEROS = 3
"""Columns of zeros that make other shapes of the same case."""
ONE_IN, ONE_IN_FUNCTION = 8, 1
"""Of the cases with repeated calls, by the case's id; more for a user's own function, about which nothing is known."""


def calls(family: Family, case: Case) -> tuple[Case, Case] | None:
    """Two cases of the same shapes and other seeds, the second to be judged after the first.

    In turn, by the case's id: the case, then all but the shapes at its default and in float32; the case, then every number
    moved that is not at its default (what is off by default may be kept only while it is on); the defaults, then the case,
    in shapes of their own, for the case's have been seen. None for large cases, and where there is nothing to move.
    """
    kind = number(case) // ONE_IN % 3
    s = family.full_settings(case)
    rows, length = family.sizes(s)
    if rows * length > LARGEST or case.tensors is not None:
        return None
    shapes = {n: getattr(s, n) for n in family.shapes if hasattr(s, n)}
    if kind == 0:
        return case, family.case(case.seed + 1, "fp32", shapes)
    if kind == 1:
        numbers = {n: v for n, v in case.settings.items() if isinstance(v, float) and n not in shapes}
        moved = {n: float(f"{v * MOVED:.4g}") for n, v in numbers.items()}
        later = family.case(case.seed + 1, case.dtype, family.canonical(case.dtype, vars(s) | moved))
        return (case, later) if moved else None
    own = {family.shapes[-1]: shapes.get(family.shapes[-1], 0) + 1}
    later = family.case(case.seed + 1, case.dtype, vars(s) | own)
    return family.case(case.seed + 2, case.dtype, shapes | own), later


def number(case: Case) -> int:
    return share(case, "kept")


def _built(whole: CaseOracle) -> tuple[Case, Inputs | None, CaseOracle] | None:
    """The two calls that belong to a case: the first, its inputs unless it is the one that was judged, and the second's
    oracle; None where there are none."""
    family, case, device = whole.family, whole.inputs.case, whole.inputs.device.type
    try:
        if (pair := calls(family, case)) is None:
            return None
        first = None if pair[0] == case else CaseOracle.of(family, pair[0], device).inputs
        return pair[0], first, CaseOracle.of(family, pair[1], device)
    except UsageError:  # what was moved does not fit the rest
        return None


def stale(whole: CaseOracle, implementation: Implementation) -> list[str]:
    """What disagrees with the definition in a call right after one of the same shapes, and agrees in others. What an
    implementation refuses says nothing, and what is wrong in any shape has findings of its own."""
    one_in = ONE_IN_FUNCTION if implementation.is_function else ONE_IN
    if number(whole.inputs.case) % one_in:
        return []
    if (built := whole.once("second call", lambda: _built(whole))) is None:
        return []
    before, first, oracle = built
    oracle = oracle.offered(implementation)
    if not {before.dtype, oracle.inputs.case.dtype} <= implementation.dtypes:
        return []
    if first is not None and execute(implementation, first).verdict != "ran":
        return []
    wrong = _wrong(oracle, implementation, execute(implementation, oracle.inputs))
    if not wrong or _wrong(oracle, implementation, _wider(oracle, implementation)) != []:
        return []
    after = _changes(before, oracle.inputs.case)
    return [f"{', '.join(wrong)} wrong in a call right after one of the same shapes, right in others: {after}"]


def _wrong(oracle: CaseOracle, implementation: Implementation, outcome: Outcome) -> list[str] | None:
    """The quantities that disagree; None where the call did not come to its end."""
    if outcome.verdict != "ran":
        return None
    return [name for name, j in confirmed(oracle, implementation, outcome).items() if not j.agrees]


def _wider(oracle: CaseOracle, implementation: Implementation) -> Outcome:
    """The same case with columns of zeros beside its hidden states and head, which change no logit."""
    inputs, letters = oracle.inputs, oracle.family.stored
    names = [n for n, t in inputs.tensors.items() if t is not None and letters.get(n, "").endswith("H")]
    wider = {n: torch.nn.functional.pad(inputs.tensors[n], (0, ZEROS)) for n in names}
    outcome = execute(implementation, inputs.replace(**wider))
    cut = {gradient_name(n) for n in names}
    found = {n: v[..., :-ZEROS] if n in cut and v is not None else v for n, v in outcome.quantities.items()}
    return dataclasses.replace(outcome, quantities=found)


def _changes(first: Case, then: Case) -> str:
    """What the second call has otherwise."""

    def shown(case: Case, name: str) -> str:
        return repr(case.settings[name]) if name in case.settings else "default"

    names = sorted(n for n in {*first.settings, *then.settings} if first.settings.get(n) != then.settings.get(n))
    moved = [f"{n} {shown(first, n)} → {shown(then, n)}" for n in names]
    moved += [f"{first.dtype} → {then.dtype}"] if first.dtype != then.dtype else []
    return ", ".join([*moved, f"seed {first.seed} → {then.seed}"])
