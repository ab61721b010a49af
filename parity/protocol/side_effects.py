"""Side effects (the protocol gate) and exact relations: what a call must not change, and identities without tolerance."""

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.case.layouts import like
from parity.implementations.implementation import Implementation, Outputs
from parity.judge import protocol
from parity.judge.protocol import Values
from parity.protocol.call import backward, differentiated, execute, forward, fresh, gradients, guarded, surroundings
from parity.protocol.exceptions import Outcome

Part = Callable[["AdapterCalls"], list[str]]
"""A part of the protocol: what does not hold of it."""


def left_again(implementation: Implementation, inputs: Inputs, leaks: list[str]) -> list[str]:
    """Those of the leaks of a first call that the second shows too (a first one imports and caches), and all rebound names."""
    again = execute(implementation, inputs).leaks
    kept = [leak for leak in leaks if leak in again or leak.startswith("rebound")]
    return kept + [leak for leak in again if leak.startswith("rebound") and leak not in leaks]


@dataclasses.dataclass(frozen=True)
class AdapterCalls(protocol.Calls[Inputs]):
    """Calls of an adapter; `agree` says of outputs that differ in bits whether they are right too, which `exact` ones may not."""

    implementation: Implementation
    values: Inputs
    other: Inputs
    agree: Callable[[Outcome], bool] = lambda outcome: False
    exact: bool = False

    def fresh(self, other: bool = False) -> Inputs:
        """Leaves on the case's own tensors; with other values in memory of their own, laid out like the case's."""
        if not other:
            return fresh(self.values)
        tensors = {n: None if t is None else like(t, t) for n, t in self.values.tensors.items()}
        x = fresh(self.values.replace(**tensors))
        self.write(x, False, self.other)
        return x

    def write(self, x: Inputs, through_data: bool, values: Inputs | None = None) -> None:
        """The case's own values unless others are given; none of another shape, nor where entries share memory."""
        given = (self.values if values is None else values).tensors
        with torch.no_grad():
            for name, tensor in x.tensors.items():
                new = given.get(name)
                if tensor is not None and new is not None and new.shape == tensor.shape and all(tensor.stride()):
                    (tensor.data if through_data else tensor).copy_(new)

    def inputs(self, x: Inputs) -> Iterable[torch.Tensor]:
        return (t for t in x.tensors.values() if t is not None)

    def leaves(self, x: Inputs) -> dict[str, torch.Tensor]:
        return {n: t for n in x.leaves if (t := x.tensors[n]) is not None}

    def forward(self, x: Inputs) -> Outputs:
        return forward(self.implementation, x)

    def on_leaves(self, x: Inputs, leaves: Mapping[str, torch.Tensor]) -> Inputs:
        return x.replace(**leaves)

    upstream = staticmethod(differentiated)
    backward = staticmethod(backward)
    gradients = staticmethod(gradients)

    def differ(self, values: Values, expected: Values) -> list[str]:
        found = [n for n, v in values.items() if not _close_bits(v, expected[n])]
        right = bool(found) and self.agree(Outcome("ran", {n: values[n] for n in found}))
        return [] if right and not self.exact else found

    def held(self, part: Part, fails: str | None) -> list[str]:
        """What a part of the protocol finds, or how the calls end that it makes, which `fails` names; and what they rebound.
        None: what they end with says nothing, nor what they rebound."""
        found: list[str] = []

        def run() -> Outcome:
            with surroundings(self.implementation, self.values):
                found.extend(part(self))
            return Outcome("ran")

        then = guarded(self.implementation, run, self.values, self.other)
        if fails is None:
            return found if then.verdict == "ran" else []
        found = found if then.verdict == "ran" else [f"{fails}{then.verdict}: {then.message}"]
        return found + [leak for leak in then.leaks if leak.startswith("rebound")]

    def broken(self, first: Values) -> list[str]:
        """What of the protocol (`parity.judge.protocol`) does not hold beside a first call that gave `first`.

        By the case's id: how many other forwards come before a backward, one to four. Under no_grad and inference_mode the
        outputs may `agree` with the definition instead; a loss that takes its gradients in the forward pass cannot be called
        under inference_mode, and torch says so.
        """
        exact = dataclasses.replace(self, exact=True)
        others = 1 + share(self.values.case, "forwards") % 4
        found = exact.held(lambda c: protocol.repeated(c, first), "second call of the same inputs ")
        fails = "a second forward before the backward of the first: "
        found += exact.held(lambda c: protocol.interleaved(c, first, others), fails)
        found += exact.held(lambda c: _alone(c, first), "the gradient of one leaf alone: ")
        found += exact.held(protocol.accumulation, "a second backward with retain_graph=True ")
        if self.values.context != "compile":  # each mode compiles anew, for seconds
            found += self.held(lambda c: protocol.unrecorded(c, first), "the call fails under no_grad: ")
            found += self.held(lambda c: protocol.unrecorded(c, first, torch.inference_mode), None)
        if self.values.context == "plain":
            found += [line for fails, part in self._ways(first) for line in self.held(part, fails)]
        return found

    def _ways(self, first: Values) -> list[tuple[str, Part]]:
        """Calls of other kinds: under another default dtype, a checkpoint that is not reentrant. Both for a user's function, one
        by the case's id for others."""
        parts: list[tuple[str, Part]] = [
            ("the call fails under another default dtype: ", lambda c: protocol.other_default(c, first)),
            ("the call fails under a checkpoint that is not reentrant: ", lambda c: protocol.recomputed(c, first)),
        ]
        parts = parts if self.values.leaves else parts[:1]
        own = self.implementation.is_function
        return parts if own else [parts[share(self.values.case, "ways") % len(parts)]]


def share(case: Case, what: str) -> int:
    """A number of a case's id; a CRC is linear, so its bits are bound to the same ones of any other share (`shard.repeated`)."""
    return zlib.crc32(f"{what}/{case.id}".encode()) >> 16


def _close_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal, or apart by no more than a change of summation order (threads and atomics may reorder)."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = 4 * torch.finfo(a.dtype).eps if a.is_floating_point() else 0
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    scale = torch.maximum(a.abs(), b.abs()).amax() if a.numel() else torch.zeros(())
    return bool(((a - b).abs() <= tolerance * scale).all())


def _alone(calls: AdapterCalls, first: Values) -> list[str]:
    """The gradient of one leaf is the same whether the others are asked for or not."""
    found: dict[str, torch.Tensor] = {}
    names = calls.values.leaves
    for name in names if len(names) > 1 else ():  # each through a graph of its own
        x = calls.fresh()
        found |= protocol.asked(calls, x, calls.forward(x), {name: calls.leaves(x)[name]})
    found = {n: g for n, g in found.items() if first.get(n) is not None}
    differ = calls.differ(found, {n: first[n] for n in found})
    return [f"the gradient of {n.removeprefix('grad_')} alone is not that beside the others" for n in differ]


def relations(
    family: Family, implementation: Implementation, inputs: Inputs, first: Outcome
) -> dict[str, tuple[bool, str]]:
    """Exact relations that apply: name -> (holds, message). A factor is a power of two, so equality is to the last bit.

    Of every family: a NaN shows, and settings that mean nothing beside the others change nothing (libraries: one case in 4).
    """
    out: dict[str, tuple[bool, str]] = {}
    for name, relation in family.relations.items():
        changed_inputs = relation.change(inputs)
        doubles = any(f not in (0.0, 1.0) for f in relation.factor.values())
        if changed_inputs is None or (doubles and inputs.product_dtype == "fp16"):
            continue  # a subnormal float16 does not double exactly
        then = execute(implementation, changed_inputs)
        if then.verdict != "ran":
            out[name] = (False, f"{then.verdict} on the changed inputs: {then.message}")
            continue
        out[name] = _related(first, then, relation.factor, relation.why)
    if inputs.context == "plain" and inputs.leaves:
        calls = AdapterCalls(implementation, inputs, inputs)
        found = calls.held(lambda c: protocol.shown(c, first.quantities), "with a NaN among the inputs: ")
        found = [line for line in found if not line.startswith("rebound")]
        out["NaN"] = not found, "; ".join(found)
    moved = unused(family, inputs) if implementation.is_function or share(inputs.case, "unused") % 4 == 0 else {}
    if moved:
        holds, message = _unmoved(implementation, inputs, first, moved)
        alone = {} if holds else {n: _unmoved(implementation, inputs, first, {n: v}) for n, v in moved.items()}
        out["unused settings"] = next((found for found in alone.values() if not found[0]), (holds, message))
    return out


def _unmoved(
    implementation: Implementation, inputs: Inputs, first: Outcome, moved: Mapping[str, Any]
) -> tuple[bool, str]:
    """Whether these settings change nothing; one that a library refuses has a meaning there."""
    settings = SimpleNamespace(**vars(inputs.settings) | {**moved})
    then = execute(implementation, dataclasses.replace(inputs, settings=settings))
    why = f"{', '.join(moved)} mean{'s' * (len(moved) == 1)} nothing beside the other settings"
    return (True, "") if then.verdict != "ran" else _related(first, then, {}, why)


def unused(family: Family, inputs: Inputs) -> dict[str, Any]:
    """Other values of what means nothing beside the other settings: `canonical` has it at its default, nobody needs it."""
    dtype, s = inputs.case.dtype, vars(inputs.settings)

    def silent(name: str, other: Any) -> bool:
        moved = dataclasses.replace(inputs, settings=SimpleNamespace(**s | {name: other}))
        reset = family.canonical(dtype, s | {name: other}) == family.canonical(dtype, dict(s))
        return reset and name not in family.needed(moved)

    others = {n: _other(family.settings[n].default) for n in s if n in family.settings and n not in family.shapes}
    return {n: other for n, other in others.items() if other not in (None, s[n]) and silent(n, other)}


def _other(default: Any) -> Any:
    """Another value; None of a word, which says how tensors are made."""
    if isinstance(default, bool | str):
        return None if isinstance(default, str) else not default
    return 1.5 if default is None else default + 1 if isinstance(default, int) else default / 2 + 0.3


def _related(first: Outcome, then: Outcome, factors: Mapping[str, float], why: str) -> tuple[bool, str]:
    for quantity, value in first.quantities.items():
        now = then.quantities.get(quantity)
        if value is None or now is None or (quantity not in factors and factors):
            continue
        factor = factors.get(quantity, 1.0)
        if factor == 1.0 and bool((torch.isfinite(value) & ~torch.isfinite(now)).any()):
            return False, f"{quantity} is no longer finite: {why}"
        expected = torch.zeros_like(value) if factor == 0.0 else value * factor
        comparable = torch.isfinite(value) & torch.isfinite(expected)  # what is not finite is a finding of its own
        differs = comparable & (now != expected)
        if factor != 0.0:
            comparable &= torch.isfinite(now)
            tiny = torch.finfo(value.dtype).smallest_normal * 4 if value.is_floating_point() else 0
            differs &= comparable & ((now.double().abs() > tiny) | (expected.double().abs() > tiny))
            if value.dtype != torch.float16:  # what a subnormal on the way lost does not double
                differs &= (now.double() - expected.double()).abs() > torch.finfo(torch.float32).smallest_normal
            if _close_bits(torch.where(comparable, now, 0), torch.where(comparable, expected, 0)):
                continue
        if bool(differs.any()):
            worst = float((now.double() - expected.double()).abs().nan_to_num().amax())
            return False, f"{quantity} differs by up to {worst:.3g}: {why}"
    return True, ""
