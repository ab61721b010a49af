"""A definition on some inputs: its exact values in float64, its replicas by recipe, and the unit of each quantity."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from parity.judge.escalation import CERTAIN, REPLICAS, escalate, ladder
from parity.judge.gates import Judgement, Unit, judge
from parity.judge.recipe import Recipe

Quantities = dict[str, torch.Tensor]
Draw = Callable[[Recipe, range, int, bool, int, Collection[str] | None], Mapping[str, torch.Tensor]]
"""(resolved recipe, numbers, seed, whether with gradients, own grids, quantities to keep) -> replicas of these numbers, (n, …),
or {} where there are no more. A quantity that no input reaches may come without the leading dimension."""
ALL_QUANTITIES = 1 << 27
"""Entries of replicas up to which all quantities are kept for whoever asks next, and not only those that were asked for."""


LARGEST_STACK = 1 << 22
"""Entries of the largest input, output or gradient in one stack of replicas; beyond it a stack is split."""
LARGEST_WITHIN = 1 << 24
"""The same of all other tensors on the way, as attention's scores: 128 MiB each."""


def gradient_name(leaf: str) -> str:
    """The quantity that holds the gradient of a leaf."""
    return f"grad_{leaf}"


def doubled(x: torch.Tensor, leaf: bool, stack: int | None = None) -> torch.Tensor:
    """A fresh tensor in float64, `stack` of it in front."""
    x = x.detach().double()
    return (x if stack is None else x.expand(stack, *x.shape)).detach().requires_grad_(leaf)


def with_gradients(
    outputs: Mapping[str, torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    cotangents: Mapping[str, torch.Tensor],
    again: bool = False,
) -> Quantities:
    """Outputs, and the gradient of each leaf under the upstream gradients, 0 where none reaches it; `again`: the graph stays."""
    reached = [n for n in cotangents if n in outputs and leaves and outputs[n].requires_grad]
    found: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    if reached:
        upstream = [cotangents[n].to(outputs[n]).expand_as(outputs[n]) for n in reached]
        inputs = list(leaves.values())
        found = torch.autograd.grad(
            [outputs[n] for n in reached], inputs, upstream, allow_unused=True, retain_graph=again
        )
    out = {name: value.detach() for name, value in outputs.items()}
    for (name, leaf), g in zip(leaves.items(), found, strict=True):
        out[gradient_name(name)] = torch.zeros_like(leaf) if g is None else g.detach()
    return out


def stacked(
    numbers: range, width: int, stack: Callable[[int, int], Mapping[str, torch.Tensor]], keep: Collection[str] | None
) -> Quantities:
    """Replicas of these numbers, at most `width` at a time, or one, by `stack(width, first number)`; of those to `keep`."""
    parts, width = [], max(1, width)
    for first in numbers[::width]:
        part = stack(min(width, numbers.stop - first), first)
        parts.append({name: value for name, value in part.items() if keep is None or name in keep})
    return {
        n: torch.cat([p[n] for p in parts]) if x.dim() else torch.stack([p[n] for p in parts])
        for n, x in parts[0].items()
    }


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What a result is compared with; replicas and units are computed once."""

    exact: Quantities  # quantity -> its value, float64. Names with a leading underscore are internal.
    draw: Draw  # draws replicas
    # (quantity, replicas) -> the fields of `Unit` besides exact, replicas and compute
    kind: Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, Any]]
    seed: int  # of the replicas
    # entries of a replica's largest tensor, or of what takes as long to make, where no quantity is as large
    size: int = 0
    _replicas: dict[tuple[Recipe, int, bool, bool, frozenset[str] | None], Quantities] = dataclasses.field(
        default_factory=dict, repr=False
    )
    _units: dict[Any, Unit] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def steps(self) -> tuple[int, ...]:
        """How many replicas a verdict takes, one after the other."""
        return ladder(max(self.size, *(x.numel() for x in self.exact.values())))

    def entries(self, count: int, finer: bool = False) -> int:
        """Of all quantities of so many replicas."""
        return (3 if finer else 1) * count * sum(x.numel() for x in self.exact.values())

    def replicas(
        self, recipe: Recipe, count: int, finer: bool = False, names: Collection[str] | None = None
    ) -> Quantities:
        """Replicas under a resolved recipe; with `finer` as many more that store nothing in 16 bits, and as many on the
        dtypes' own numbers.

        Only `names` (None: all) need be there: without gradients none is taken, and where all would be large no other is kept.
        """
        # What is returned is stored after all that a replica rounds.
        recipe = dataclasses.replace(recipe, output="any")
        gradients = names is None or any(name.startswith("grad_") for name in names)
        large = self.entries(count, finer) > ALL_QUANTITIES
        keep = frozenset(names) | {"_logps"} if names is not None and large else None
        whole, key = (recipe, count, finer, True, None), (recipe, count, finer, gradients, keep)
        if whole in self._replicas:
            return self._replicas[whole]
        if key not in self._replicas:
            sets: list[Mapping[str, torch.Tensor]]
            if finer:
                sets = [self.replicas(r, count, False, names) for r in (recipe, recipe.stored_wide())]
                sets.append(self.draw(recipe, range(count), self.seed + 1, gradients, count, keep))
            else:  # those of the step before, and more
                start = max(n for n in self.steps if n < count)
                sets = [self.replicas(recipe, start, False, names)] if start else []
                sets.append(self.draw(recipe, range(start, count), self.seed, gradients, 1, keep))
            self._replicas[key] = self._concatenated([s for s in sets if s])
            if not finer and len(sets) > 1 and sets[-1]:
                self._share(recipe, start, self._replicas[key])
        return self._replicas[key]

    def _share(self, recipe: Recipe, start: int, latest: Quantities) -> None:
        """Those that the latest begin with, up to `start`, are views of it from now on, and take no memory of their own."""
        for (of, count, finer, *_), found in self._replicas.items():
            if of == recipe and not finer and count <= start and count in self.steps:
                own = {n for n, x in found.items() if n in latest and x.dim() > self.exact[n].dim()}
                found |= {n: latest[n][:count] for n in own}

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """What is computed within is not kept, as of recipes that are tried once."""
        before, units = {key: dict(found) for key, found in self._replicas.items()}, {*self._units}
        try:
            yield
        finally:
            self._replicas.clear()
            self._replicas.update(before)
            for key in self._units.keys() - units:
                del self._units[key]

    def _concatenated(self, sets: Sequence[Mapping[str, torch.Tensor]]) -> Quantities:
        """All of these replicas, of the quantities that each of them has."""
        names = [name for name in self.exact if all(name in found for found in sets)]
        return {
            n: torch.cat([found[n] for found in sets]) if sets[0][n].dim() > self.exact[n].dim() else sets[0][n]
            for n in names
        }

    def unit(
        self,
        name: str,
        recipe: Recipe,
        count: int = REPLICAS,
        finer: bool = False,
        names: Collection[str] | None = None,
    ) -> Unit:
        """The unit in which quantity `name` is judged under a recipe, beside others of `names` (None: all).

        `count` 0: its dtype's own precision alone.
        """
        key = (name, recipe, count, finer)
        if key not in self._units:
            value = self.exact[name]
            found = self.replicas(recipe, count, finer, names) if count else {n: x[None] for n, x in self.exact.items()}
            stack = found[name]
            if stack.dim() == value.dim():  # no leaf reaches it: one value for all replicas
                stack = stack.expand(count, *value.shape)
            self._units[key] = Unit(value, stack, recipe.elementwise, **self.kind(name, found))
        return self._units[key]

    def judge(self, values: Mapping[str, torch.Tensor | None], recipe: Recipe) -> dict[str, Judgement]:
        """The gates on values that are one result, in their own dtypes: all again with more replicas where those may mend it."""

        def judge_with(count: int, finer: bool, names: Collection[str] | None) -> dict[str, Judgement]:
            return {
                name: judge(value, self.unit(name, recipe, count), torch.float32 if value is None else value.dtype)
                for name, value in values.items()
            }

        return escalate(judge_with, self.steps, certain=CERTAIN)
