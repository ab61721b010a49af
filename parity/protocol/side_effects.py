"""Side effects (the protocol gate) and exact relations: what a call must not change, and identities without tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.case.layouts import like
from parity.implementations.implementation import Implementation, Outputs
from parity.judge.oracle import gradient_name
from parity.judge.timings import within
from parity.protocol.call import backward, differentiated, execute, forward, fresh, gradients, guarded, surroundings
from parity.protocol.exceptions import Outcome, same_bits


def left_again(implementation: Implementation, inputs: Inputs, leaks: list[str]) -> list[str]:
    """Those of the leaks of a first call that the second shows too: a first one imports and caches.

    What was rebound with nothing imported counts at once.
    """
    again = execute(implementation, inputs).leaks
    return [leak for leak in leaks if leak in again or leak.startswith("rebound")] + [
        leak for leak in again if leak.startswith("rebound") and leak not in leaks
    ]


@within("stage", "protocol")
def repeated(implementation: Implementation, inputs: Inputs, other: Inputs, first: Outcome) -> list[str]:
    """State that leaks from call to call (A, B, A), where B and the last A are the same tensors, written over in between.

    So an optimizer updates a parameter, and a CUDA graph's caller its inputs: nothing may be kept by shape or by address,
    and what the earlier call returned stays as it was.
    """
    found: list[str] = []
    memory = inputs.replace(**{n: None if t is None else like(t, t) for n, t in inputs.tensors.items()})

    def run() -> Outcome:
        with surroundings(implementation, memory) as x:
            _write(x, other)
            outputs = forward(implementation, x)
            theirs = dict(outputs) | _asked(x, outputs, x.leaves)
            kept = {n: v.detach().clone() for n, v in theirs.items()}
            _write(x, inputs)
            for name in x.leaves:
                x.tensors[name].grad = None  # type: ignore[union-attr]
            again = forward(implementation, x)
            backward(x, again)
        found.extend(
            f"{n} that an earlier call returned is changed by a later one"
            for n, v in theirs.items()
            if not same_bits(v.detach(), kept[n])
        )
        return Outcome("ran", {n: v.detach() for n, v in again.items()} | gradients(x))

    again = guarded(implementation, run, inputs, other)
    if again.verdict != first.verdict:
        return [f"second call of the same inputs {again.verdict}: {again.message}"]
    for name, value in first.quantities.items():
        if not _close_bits(value, again.quantities.get(name)):
            found.append(f"{name} differs when called again after other values in the same tensors")
    return found


def _write(x: Inputs, values: Inputs) -> None:
    """Write values into the tensors in place, but for those of another shape and those whose entries share memory."""
    with torch.no_grad():
        for name, tensor in x.tensors.items():
            new = values.tensors.get(name)
            if tensor is not None and new is not None and new.shape == tensor.shape and all(tensor.stride()):
                tensor.copy_(new)


def _asked(x: Inputs, outputs: Outputs, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Gradients of some leaves as `torch.autograd.grad` gives them; a reentrant checkpoint gives none in this way."""
    pairs = differentiated(x, outputs)
    if not pairs or not names:
        return {}
    outs, above = zip(*pairs.values(), strict=True)
    try:
        given = torch.autograd.grad(outs, [x.tensors[n] for n in names], above, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        return {}
    return {gradient_name(n): g for n, g in zip(names, given, strict=True) if g is not None}


@within("stage", "protocol")
def unrecorded(
    implementation: Implementation, inputs: Inputs, first: Outcome, agree: Callable[[Outcome], bool]
) -> list[str]:
    """Under no_grad and inference_mode the outputs are those of a training call, or `agree` with the definition too.

    A loss that takes its gradients in the forward pass cannot be called under inference_mode, and torch says so.
    """
    if inputs.context == "compile":  # each mode compiles anew, for seconds
        return []
    found = []
    for mode in (torch.no_grad, torch.inference_mode):

        def run(mode: Callable[[], AbstractContextManager[None]] = mode) -> Outcome:
            with surroundings(implementation, inputs) as x, mode():
                return Outcome("ran", dict(forward(implementation, x)))

        then = guarded(implementation, run, inputs)
        if then.verdict != "ran":
            found += [] if mode is torch.inference_mode else [f"under no_grad: {then.verdict}, {then.message}"]
        elif not all(_close_bits(v, first.quantities[n]) for n, v in then.quantities.items()) and not agree(then):
            found.append(f"under {mode.__name__} the outputs differ from those with gradients")
    return found


@within("stage", "protocol")
def interleaved(implementation: Implementation, inputs: Inputs, other: Inputs, first: Outcome) -> list[str]:
    """What is kept for the backward belongs to its call: forward A, forward B, backward A gives the gradients of A.

    A preference loss does so with its two halves, and so does every loss of two terms.
    """

    def run() -> Outcome:
        with surroundings(implementation, inputs) as a:
            outputs = forward(implementation, a)
            forward(implementation, fresh(other))
            backward(a, outputs)
        return Outcome("ran", gradients(a))

    then = guarded(implementation, run, inputs, other)
    if then.verdict != "ran":
        return [f"a second forward before the backward of the first: {then.verdict}, {then.message}"]
    both = [n for n, now in then.quantities.items() if now is not None and first.quantities.get(n) is not None]
    differ = [n for n in both if not _close_bits(first.quantities[n], then.quantities[n])]
    return [f"{n} differs when another forward comes before its backward" for n in differ]


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


@within("stage", "protocol")
def accumulation(implementation: Implementation, inputs: Inputs) -> list[str]:
    """Backward into an existing .grad adds, a second backward with retain_graph adds the same again, and the gradient of
    one leaf is the same whether the others are asked for or not."""
    found: list[str] = []

    def run() -> Outcome:
        alone: dict[str, torch.Tensor] = {}
        for name in inputs.leaves if len(inputs.leaves) > 1 else ():  # each through a graph of its own
            with surroundings(implementation, inputs) as x:
                alone |= _asked(x, forward(implementation, x), (name,))
        with surroundings(implementation, inputs) as x:
            outputs = forward(implementation, x)
            try:
                backward(x, outputs, retain_graph=True)
            except RuntimeError as error:
                if "donated buffers" not in str(error):
                    raise
                x = fresh(inputs)  # torch.compile frees what a backward pass has read, and says so: a graph for each
                backward(x, forward(implementation, x))
                outputs = forward(implementation, x)
            first = {n: g.clone() for n, g in gradients(x).items() if g is not None}
            backward(x, outputs)
        for name, now in gradients(x).items():
            if (grad := first.get(name)) is None:
                continue
            leaf = name.removeprefix("grad_")
            if name in alone and not _close_bits(alone[name], grad):
                found.append(f"the gradient of {leaf} alone is not that beside the others")
            if torch.isfinite(grad).all() and not _close_bits(now, grad + grad):
                found.append(f"a second backward into .grad of {leaf} does not add the same gradient")
        return Outcome("ran")

    outcome = guarded(implementation, run, inputs)
    if outcome.verdict != "crashed":
        return found
    kept = " with retain_graph=True" if "retain_graph" in outcome.message or "second time" in outcome.message else ""
    return [f"a second backward{kept} fails: {outcome.message}"]


@within("stage", "relations")
def relations(
    family: Family, implementation: Implementation, inputs: Inputs, first: Outcome
) -> dict[str, tuple[bool, str]]:
    """Exact relations that apply: name -> (holds, message). A factor is a power of two, so equality is to the last bit."""
    out: dict[str, tuple[bool, str]] = {}
    for name, relation in family.relations.items():
        changed_inputs = relation.change(inputs)
        doubles = any(f not in (0.0, 1.0) for f in relation.factor.values())
        if changed_inputs is None or (doubles and inputs.case.dtype == "fp16"):
            continue  # a subnormal float16 does not double exactly
        then = execute(implementation, changed_inputs)
        if then.verdict != "ran":
            out[name] = (False, f"{then.verdict} on the changed inputs: {then.message}")
            continue
        out[name] = _related(first, then, relation.factor, relation.why)
    return out


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
            differs &= comparable & ((now.abs() > tiny) | (expected.abs() > tiny))
            if value.dtype != torch.float16:  # what a subnormal on the way lost does not double
                differs &= (now.double() - expected.double()).abs() > torch.finfo(torch.float32).smallest_normal
            if _close_bits(torch.where(comparable, now, 0), torch.where(comparable, expected, 0)):
                continue
        if bool(differs.any()):
            worst = float((now.double() - expected.double()).abs().nan_to_num().amax())
            return False, f"{quantity} differs by up to {worst:.3g}: {why}"
    return True, ""
