"""Many replicas of a model's step at once: its definition under `torch.vmap`, with weights that have a replica dimension.

A tiny model's step is a thousand small operations, and twelve replicas of it one after the other cost twelve times as much
as one with tensors twelve times as large.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.judge.operations import OwnConstants
from parity.judge.recipe import IEEE_FP32, Recipe
from parity.trainers.definitions.step_rounding import Double, StepRounding

Results = dict[str, Tensor]


class Replicas:
    """What a definition says of a model, in float64 and in as many replicas as were asked for.

    `define`: model -> name -> 0-dim tensor; the gradients of the one named `differentiated`, by parameter, are among the
    results. `rounding` is the arithmetic of a replica.
    """

    def __init__(
        self,
        model: Any,
        define: Callable[[Any], Mapping[str, Tensor]],
        rounding: type[StepRounding] = StepRounding,
        differentiated: str | None = None,
    ):
        self._defined, self._rounding, self._differentiated = _Defined(model, define), rounding, differentiated
        self.at_once = True
        self._made: dict[tuple[Recipe, int], Results] = {}

    def _recorded(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self._differentiated is not None)

    def exact(self) -> Results:
        """Without rounding."""
        with Double(), self._recorded():
            return self._with_gradients(self._defined(), self._defined.leaves())

    def first(self, count: int, recipe: Recipe = IEEE_FP32, seed: int = 0) -> Results:
        """The first `count` replicas of each result, (count, …): more of them begin with the same."""
        stacks = [self._made[recipe, seed]] if (recipe, seed) in self._made else []
        made = len(next(iter(stacks[0].values()))) if stacks else 0
        if made < count:
            stacks += self._more([seed + 7919 * (1 + i) for i in range(made, count)], recipe)
            self._made[recipe, seed] = {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}
        return {name: stack[:count] for name, stack in self._made[recipe, seed].items()}

    def _more(self, seeds: list[int], recipe: Recipe) -> list[Results]:
        modes = (self._rounding(recipe, "fp32", seed) for seed in seeds)
        if self._rounding.vectorised and self.at_once:
            try:
                return [self._together(len(seeds), self._rounding(recipe, "fp32", seeds[0]))]
            except RuntimeError:  # what is wrong with the definition itself shows again below
                self.at_once = False
        return [self._alone(mode) for mode in modes]

    def _alone(self, mode: StepRounding) -> Results:
        with self._recorded(), mode.casts(), mode:
            values = self._defined()
            mode.backward = True
            results = self._with_gradients(values, self._defined.leaves())
        return {name: x.unsqueeze(0) for name, x in results.items()}

    def _together(self, count: int, mode: StepRounding) -> Results:
        """One run of `torch.vmap`.

        Raises:
            RuntimeError: where the path through the model depends on its values (a router that sends tokens to experts), or
                an operation has no batched form: such a model takes one replica at a time.
        """
        apart, state, leaves = OwnConstants(count), {}, {}
        for name, x in (*self._defined.named_parameters(), *self._defined.named_buffers()):
            if x.is_floating_point():
                state[name] = copies = x.detach().expand(count, *x.shape)
                if x.requires_grad and self._differentiated:
                    leaves[name] = state[name] = copies.clone().requires_grad_()

        def one(state: dict[str, Tensor], each: Tensor) -> Mapping[str, Tensor]:
            apart.each = each
            try:
                return dict(torch.func.functional_call(self._defined, state, ()))
            finally:
                apart.each = None

        with self._recorded(), apart, mode.casts(), mode:
            values = torch.vmap(one, randomness="different")(state, apart.every)
            mode.backward = True
            return self._with_gradients(values, leaves)

    def _with_gradients(self, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Results:
        out = {name: x.detach() for name, x in values.items()}
        if self._differentiated:
            total = values[self._differentiated].sum()
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            for (name, p), g in zip(leaves.items(), found, strict=True):
                out[name.removeprefix(_Defined.PREFIX)] = torch.zeros_like(p) if g is None else g
        return out


class _Defined(torch.nn.Module):
    """A definition of a model as the forward pass of a module that holds the model."""

    PREFIX = "model."

    def __init__(self, model: Any, define: Callable[[Any], Mapping[str, Tensor]]):
        super().__init__()
        self.model, self._define = model, define

    def forward(self) -> Mapping[str, Tensor]:
        return self._define(self.model)

    def leaves(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.named_parameters() if p.requires_grad}
