"""Run one implementation on one set of inputs, forward and backward. An exception is a verdict."""

import collections
import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch

from parity.case.family import LARGEST_CASE
from parity.case.inputs import Inputs
from parity.case.layouts import elsewhere
from parity.errors import Returned, Unsupported
from parity.implementations.implementation import Implementation, Outputs
from parity.judge.oracle import gradient_name
from parity.judge.protocol import same_bits
from parity.judge.recipe import DTYPES
from parity.protocol import faults, process_state
from parity.protocol.exceptions import Outcome, ended_by
from parity.protocol.process_state import matmul_precision

SECONDS = collections.defaultdict[str, list[float]](list)
"""A user's function -> how long its calls took in this process, forward and backward."""


def fresh(inputs: Inputs) -> Inputs:
    """The same bits and strides, with leaves that have no history and no gradient."""
    tensors: dict[str, torch.Tensor | None] = {}
    for name, tensor in inputs.tensors.items():
        wanted = name in inputs.leaves
        if tensor is None:
            tensors[name] = None
        elif name in inputs.parameters:
            tensors[name] = torch.nn.Parameter(tensor.detach(), requires_grad=wanted)
        else:
            tensors[name] = tensor.detach().requires_grad_(wanted)
    return inputs.replace(**{**tensors, **{name: tensors[of] for name, of in inputs.shared.items()}})


@faults.running("forward pass")
def forward(implementation: Implementation, x: Inputs) -> Outputs:
    """Call the adapter in the call context of the case: plain, tf32, autocast, torch.compile region, reentrant checkpoint."""
    context = x.context
    if declared := implementation.refuses(x.settings, x.case.dtype, x.device.type):
        raise Unsupported(declared)

    def call(x: Inputs) -> Outputs:
        outputs = implementation.call(x)
        for name, value in outputs.items():
            _judgeable(name, value, x)
        return outputs

    if context in ("plain", "tf32"):
        return call(x)
    if x.autocast:
        with torch.autocast(x.device.type, dtype=DTYPES[x.autocast]):
            return call(x)
    names: list[str] = []

    def on_leaves(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = call(x.replace(**dict(zip(x.leaves, leaves, strict=True))))
        names[:] = list(out)
        return tuple(out.values())

    leaves = [x.tensors[name] for name in x.leaves]
    if context == "checkpoint":
        values = torch.utils.checkpoint.checkpoint(on_leaves, *leaves, use_reentrant=True)
    elif context == "compile":
        torch.compiler.reset()
        values = torch.compile(on_leaves, backend="aot_eager")(*leaves)
    else:
        raise Unsupported(f"context {context!r} is unknown")
    return dict(zip(names, values, strict=True))


def _judgeable(name: str, value: object, x: Inputs) -> None:
    """Refuse what cannot be compared: no dense tensor of torch's class or the inputs', on another device, or too large."""
    known = {torch.Tensor, torch.nn.Parameter, *map(type, x.tensors.values())}
    if not isinstance(value, torch.Tensor) or type(value) not in known:
        raise Returned(f"returned {type(value).__name__} as {name}, expected a tensor")
    if value.layout is not torch.strided or value.is_quantized or value.is_complex():
        raise Returned(f"returned {value.layout} {value.dtype} as {name}, expected a dense tensor of real numbers")
    if value.dim() and value.device.type != x.device.type:  # a logged number may be anywhere
        raise Returned(f"returned {name} on {value.device}, the inputs are on {x.device}")
    if value.numel() > LARGEST_CASE:
        raise Returned(f"returned {name} of shape {tuple(value.shape)}")


@contextlib.contextmanager
def surroundings(implementation: Implementation, inputs: Inputs) -> Iterator[Inputs]:
    """Fresh inputs in the context of both passes: the implementation's own, and tf32 products where the case says so."""
    x = fresh(inputs)
    before = matmul_precision()
    if x.context == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        with implementation.around():
            yield x
    finally:
        if x.context == "tf32" and matmul_precision() == "high":
            torch.set_float32_matmul_precision(before)  # what else is left behind is for the protocol gate to see


def upstream(g: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The cotangent in dtype and device of the output, in its own memory layout."""
    return elsewhere(g, dtype=output.dtype, device=output.device)


def differentiated(x: Inputs, outputs: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output and upstream gradient of every quantity that has one, and the right shape: the structure gate names the others."""
    given = {name: (outputs[name], g) for name, g in x.cotangents.items() if name in outputs}
    return {n: (v, upstream(g, v)) for n, (v, g) in given.items() if v.requires_grad and v.shape == g.shape}


@faults.running("backward pass")
def backward(x: Inputs, outputs: Mapping[str, torch.Tensor], retain_graph: bool = False) -> list[str]:
    """Accumulate the gradients of every output into the leaves; which upstream gradients were changed on the way."""
    pairs = differentiated(x, outputs)
    if not pairs or not x.leaves:
        return []
    torch.autograd.backward(*zip(*pairs.values(), strict=True), retain_graph=retain_graph)
    changed = [n for n, (out, g) in pairs.items() if not same_bits(g, upstream(x.cotangents[n], out))]
    return [f"upstream gradient of {name} was changed in place" for name in changed]


def gradients(x: Inputs) -> dict[str, torch.Tensor | None]:
    """`.grad` of every leaf, None included; a gradient where none was asked for shows as an extra quantity."""
    out = {gradient_name(name): x.tensors[name].grad for name in x.leaves}  # type: ignore[union-attr]
    for name, tensor in x.tensors.items():
        if tensor is not None and name not in (*x.leaves, *x.shared) and tensor.grad is not None:
            out[gradient_name(name)] = tensor.grad
    return out


def execute(implementation: Implementation, inputs: Inputs) -> Outcome:
    """Forward and backward on fresh leaves. Never raises for what the implementation does."""
    return guarded(implementation, lambda: _both(implementation, inputs), inputs)


def _both(implementation: Implementation, inputs: Inputs) -> Outcome:
    with surroundings(implementation, inputs) as x:
        begun = time.monotonic()
        outputs = forward(implementation, x)
        leaks = backward(x, outputs)
        if x.device.type == "cuda":  # an error of what was launched belongs to who launched it
            torch.cuda.synchronize()
        if implementation.is_function:
            SECONDS[implementation.id].append(time.monotonic() - begun)
    detached: dict[str, torch.Tensor | None] = {k: v.detach() for k, v in outputs.items()}
    differentiable = frozenset(k for k, v in outputs.items() if v.requires_grad)
    unknown = getattr(outputs, "unknown", ())
    return Outcome("ran", detached | gradients(x), leaks=tuple(leaks), unknown=unknown, differentiable=differentiable)


def copies(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Copies of every input tensor and upstream gradient ("d logps"), to compare with afterwards."""
    return {k: v.detach().clone() for k, v in _shared(inputs).items()}


def _shared(inputs: Inputs) -> dict[str, torch.Tensor]:
    named = {k: v for k, v in inputs.tensors.items() if v is not None}
    return named | {f"d {k}": v for k, v in inputs.cotangents.items()}


def damaged(inputs: Inputs, kept: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of inputs whose bits changed; they are put back."""
    out = []
    for name, now in _shared(inputs).items():
        old, storage = kept[name], now.untyped_storage()
        needed = sum((n - 1) * step for n, step in zip(now.shape, now.stride(), strict=True)) + now.storage_offset() + 1
        if now.numel() and storage.nbytes() < needed * now.element_size():  # freed: nothing to be compared
            storage.resize_(needed * now.element_size())
            with torch.no_grad():
                now.detach().zero_()
        if not same_bits(now, old):
            out.append(f"input {name} was changed in place")
            memory = tuple(slice(0, 1) if step == 0 else slice(None) for step in now.stride())  # expanded: one for all
            with torch.no_grad():
                now.detach()[memory].copy_(old[memory])
    return out


def guarded(implementation: Implementation, run: Callable[[], Outcome], *shared: Inputs) -> Outcome:
    """Run, restore the state of the process and the `shared` inputs, and turn any exception into a verdict."""
    if faults.lost():  # a call before this one lost the context: what another would say is about that
        return Outcome("crashed", message=faults.lost())
    kept = [(inputs, copies(inputs), dict(vars(inputs.settings))) for inputs in shared]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = process_state.take()
        inside = process_state.its_own(implementation.id)
        with faults.running("call"):
            try:
                outcome = run()
            except BaseException as error:
                outcome = ended_by(error, implementation)
        if faults.lost():  # nothing on the device can be read any more
            process_state.abandon(faults.lost())
            return outcome
        leaks = (inside or before).restore(implementation.id)
        if inside is not None:
            before.restore()
    for inputs, tensors, settings in kept:
        leaks += damaged(inputs, tensors)
        now = vars(inputs.settings)
        leaks += [f"setting {name} changed" for name, value in now.items() if settings.get(name) != value]
        now.clear()
        now.update(settings)
    return dataclasses.replace(outcome, leaks=(*outcome.leaks, *leaks))
