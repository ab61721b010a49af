"""Run a family's oracle: once exactly, and as replicas stacked along a leading dimension."""

import math
from collections.abc import Collection

import torch

from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.judge.monte_carlo import MonteCarlo
from parity.judge.oracle import LARGEST_STACK, Quantities, doubled, gradient_name, stacked, with_gradients
from parity.judge.recipe import Recipe


def to_double(inputs: Inputs, stack: int | None = None) -> Inputs:
    """The same inputs in float64, leaves fresh; with `stack`, the `Inputs.replicated` ones repeated along a new
    dimension. What the oracle rounds is repeated whether its gradient is asked for or not: a frozen head that all
    replicas shared would be rounded once for all of them, and the spread would be one sample."""
    tensors: dict[str, torch.Tensor | None] = {}
    for name, tensor in inputs.tensors.items():
        if tensor is not None and tensor.is_floating_point():
            own = inputs.replicated is None or name in inputs.replicated
            tensor = doubled(tensor, name in inputs.leaves, stack if own else None)
        tensors[name] = tensor
    return inputs.replace(**tensors)


def largest(family: Family, inputs: Inputs) -> int:
    """Entries of the largest tensor that each replica has of its own: the logits (`Family.sizes`), a head, a teacher's, …"""
    held = inputs.replicated
    own = (t.numel() for n, t in inputs.tensors.items() if t is not None and (held is None or n in held))
    return max(math.prod(family.sizes(inputs.settings)), *own, 1)


def _run(family: Family, x: Inputs, mode: MonteCarlo | None = None, gradients: bool = True) -> Quantities:
    outputs = family.oracle(x)
    if not gradients:
        return {name: value.detach() for name, value in outputs.items()}
    if mode is not None:
        mode.backward = True
    leaves = {name: leaf for name in x.leaves if (leaf := x.tensors[name]) is not None}
    upstream = x.cotangents if mode is None else mode.upstream(x.cotangents, outputs)
    out = with_gradients(outputs, leaves, upstream, again=mode is None)
    named = [name for name in x.cotangents if name in outputs]
    if mode is None and "_logps" in outputs and outputs["_logps"].requires_grad and named:
        (slope,) = torch.autograd.grad(outputs[named[0]], outputs["_logps"], allow_unused=True)
        out["_slope"] = torch.zeros_like(outputs["_logps"]) if slope is None else slope
    return out


def exact(family: Family, inputs: Inputs) -> Quantities:
    """Outputs and gradients of the definition in float64, computed where `inputs` are and handed out on the CPU. `_slope`
    is ∂loss/∂logps where the family has a loss."""
    return {name: value.cpu() for name, value in _run(family, to_double(inputs)).items()}


def replicas(
    family: Family,
    inputs: Inputs,
    recipe: Recipe,
    numbers: range,
    seed: int,
    gradients: bool = True,
    own_grids: int = 1,
    keep: Collection[str] | None = None,
) -> Quantities:
    """Replicas of these numbers, of every quantity under the recipe's rounding, stacked on the CPU: (n, …); of those to `keep`
    alone, or of none of the `gradients`. The first `own_grids` of all round to the numbers that a dtype has, the others
    to a grid stretched at random."""

    def stack(width: int, first: int) -> Quantities:
        with MonteCarlo(recipe, inputs.case.dtype, seed * 1009 + first, own_grids - first) as mode:
            found = _run(family, to_double(inputs, width), mode, gradients)
        late = {gradient_name(n) for n in inputs.leaves} if mode.recipe.upstream < 1.0 else set()
        found = {n: value * mode.recipe.upstream if n in late else value for n, value in found.items()}
        return {name: value.cpu() for name, value in found.items() if keep is None or name in keep}

    # an output that no leaf reaches has no replica dimension; it is the same for all
    return stacked(numbers, LARGEST_STACK // largest(family, inputs), stack, keep)
