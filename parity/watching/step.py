"""A step of the optimizer: parameters that it does not have, a reference that it moves, weights that it leaves as they are."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

SAMPLE = 4096
"""Elements of a parameter that are compared, at most twice as many."""


def first(names: Sequence[str]) -> str:
    """Three of them, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _sample(x: Tensor) -> Tensor:
    """A copy of elements at equal distances; of a sharded tensor those of this rank."""
    here = (x.to_local() if hasattr(x, "to_local") else x).detach().flatten()
    return here[:: max(1, len(here) // SAMPLE)].clone()


def _moved(p: Tensor, before: Tensor) -> Tensor:
    """Which of the sampled elements are others now; bytes are compared, so that NaN is equal to itself."""
    return (_sample(p).view(torch.uint8) != before.view(torch.uint8)).view(len(before), -1).any(-1)


class Step:
    """What is known before a step; `faults` compares after it. Whoever keeps no gradients (DeepSpeed) has no faults here."""

    def __init__(self, model: torch.nn.Module, others: Sequence[torch.nn.Module], optimizer: Any):
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        sloped = [(n, p) for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())]
        self._lacking = [n for n, p in sloped if id(p) not in self._groups]
        given = [(p, self._groups[id(p)]) for _, p in sloped if id(p) in self._groups]
        self._lacking *= bool(given)  # none is known by identity where an optimizer has copies
        self._own = [(p, g, _sample(p), _sample(p.grad) != 0) for p, g in given if p.grad is not None]
        self._others = [(n, p, _sample(p)) for other in others for n, p in other.named_parameters()]
        rates = [(g["lr"], g.get("initial_lr", g["lr"])) for _, g in given]
        self.warm = all(lr is None or lr >= most > 0 for lr, most in rates)

    def faults(self) -> Iterator[tuple[str, str]]:
        """(subject of the finding, text)."""
        if self._lacking:
            yield "update", f"parameters with a gradient that the optimizer does not have: {first(self._lacking)}"
        if moved := [n for n, p, before in self._others if bool(_moved(p, before).any())]:
            yield "reference", f"the optimizer's step moves the reference too: {first(moved)}"

    def lost(self) -> str:
        """How many weights the step left as they are, if most, and the learning rate is no longer on its way up."""
        moves = [_moved(p, before)[sloped] for p, _, before, sloped in self._own]
        count, still = sum(map(len, moves)), sum(int((~m).sum()) for m in moves)
        if self.warm and still > count / 2:
            kinds = sorted({f"{p.dtype}".removeprefix("torch.") for p, *_ in self._own})
            rates = ", ".join(f"{lr:.3g}" for lr in sorted({g["lr"] for _, g, *_ in self._own if g["lr"] is not None}))
            share = f"{still / count:.0%} of the weights that have a gradient"
            why = f"steps at lr {rates} round away in {' and '.join(kinds)}"
            return f"the optimizer's step leaves {share} as they are: {why}"
        return ""
