"""A step of the optimizer: parameters that it lacks, a reference that it moves, weights that it leaves, gradients that stay,
or that it gets otherwise than backward passes left them."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.judge.shaken import unit

SAMPLE = 4096
"""Elements of a parameter that are compared, at most twice as many."""
SCALINGS = 4  # of gradients between the backward pass and the step
FRACTION = 1 / 64  # of a gradient, the smallest that is known from clipping: 1/2, 1/3, …


def first(names: Sequence[str]) -> str:
    """Three of them, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def sample(x: Tensor) -> Tensor:
    """A copy of elements at equal distances; of a sharded tensor those of this rank."""
    here = (x.to_local() if hasattr(x, "to_local") else x).detach().flatten()
    return here[:: max(1, len(here) // SAMPLE)].clone()


def altered(p: Tensor, before: Tensor) -> Tensor:
    """Which of the sampled elements are others now; bytes are compared, so that NaN is equal to itself."""
    differ = sample(p).view(torch.uint8) != before.view(torch.uint8)
    return differ.view(len(before), before.element_size()).any(-1)


class Step:
    """A step of the optimizer, `begun` at its first micro-batch or with its gradients complete. Whoever keeps no gradients
    (DeepSpeed) has no faults behind it."""

    def __init__(self, optimizer: Any):
        self._optimizer, self._hooks = optimizer, list[Any]()
        self._steps = self._depth = 0  # a step of a subclass may call that of its base, which has the hooks too
        self._left, self._gone = dict[str, tuple[Any, Tensor]](), dict[str, None]()
        self._lacking, self._none, self._own, self._others = list[Any](), list[Any](), list[Any](), list[Any]()
        self._idle = list[str]()

    def follow(self, model: torch.nn.Module | None) -> "Step":
        """From the first micro-batch on. `model`: whose gradients are to be compared, no scaler's or other rank's in them."""
        inner = getattr(self._optimizer, "optimizer", self._optimizer)
        # one that wraps another may never have called the constructor that makes room for hooks
        if isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "_optimizer_step_post_hooks"):
            self._hooks += inner.register_step_pre_hook(self._enter), inner.register_step_post_hook(self._leave)
        for n, p in model.named_parameters() if model is not None else ():
            if p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(functools.partial(self._came, n)))
        return self

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        self._steps += self._depth == 0

    def _came(self, name: str, p: Any) -> None:
        if p.grad is not None and p.grad.layout is torch.strided:
            self._left[name] = p, sample(p.grad)

    def further(self) -> None:
        """Before one more micro-batch of the step."""
        none = (n for n, (p, x) in self._left.items() if bool(x.any()) and (p.grad is None or not bool(p.grad.any())))
        self._gone |= dict.fromkeys(none)

    def changed(self) -> Iterator[tuple[str, list[str]]]:
        """Before it: where all gradients are those that backward passes left, times one number that no clipping makes but by
        chance, or the last one's alone. Each of `SCALINGS` products, and of as many factors, is off by its rounding."""
        both = [(sample(p.grad).double(), x) for p, x in self._left.values() if p.grad is not None]
        both = [(g, x.to(g)) for g, x in both if g.shape == x.shape]
        size = math.fsum(float(x.square().sum()) for _, x in both)
        off = 2 * SCALINGS * max((unit(x.dtype) for _, x in self._left.values()), default=0.0)
        times = math.fsum(float((g * x).sum()) for g, x in both) / size if size else 0.0
        apart = math.fsum(float((g - times * x).square().sum()) for g, x in both)
        if times == 0 or not apart <= (off * times) ** 2 * size:
            return
        parts = round(1 / times) if FRACTION <= times < 1 and off < 1e-4 else 1
        if not 0 < times <= 1 + off or (parts > 1 and abs(parts * times - 1) <= off):
            yield "the optimizer gets other gradients than backward passes left", [f"{times:.4g} times those"]
        if self._gone:
            yield "gradients of earlier micro-batches are lost", [first([*self._gone])]

    def before(self, model: torch.nn.Module, others: Mapping[str, torch.nn.Module]) -> "Step":
        """With its gradients complete; `others`: name -> model that no step may move."""
        groups = {id(p): _rate(group) for group in self._optimizer.param_groups for p in group["params"]}
        sloped = [(n, p) for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())]
        given = [(n, p, groups[id(p)]) for n, p in sloped if id(p) in groups]
        missing = [(n, p, sample(p)) for n, p in sloped if id(p) not in groups]
        # an optimizer that has none by identity may have copies
        self._lacking, self._none = (missing, []) if given else ([], missing * any(rates(self._optimizer)))
        self._idle = [n for n, _, rate in given if not rate]
        self._own = [(p, rate, sample(p), sample(p.grad) != 0) for _, p, rate in given if rate]
        self._others = [
            (name, n, p, sample(p)) for name, m in others.items() for n, p in m.named_parameters() if not p.is_meta
        ]
        return self

    def faults(self, top: bool) -> Iterator[str]:
        """Behind it, a sentence each; `top`: the learning rates are at their top, before which a step may round away."""
        if lacking := [n for n, p, before in self._lacking if not bool(altered(p, before).any())]:  # none has a copy
            yield f"parameters with a gradient that the optimizer does not have: {first(lacking)}"
        if top and self._none and not any(bool(altered(p, before).any()) for _, p, before in self._none):
            yield "the optimizer has none of the model's parameters, and its step moves none of them"
        moved = self.moved()
        self._others = [x for x in self._others if x[0] not in moved]  # each is told once
        yield from (f"the optimizer's step moves the {name} too: {first(names)}" for name, names in moved.items())

    def moved(self) -> dict[str, list[str]]:
        """Name of each of the others that is no longer what it was -> its parameters that are not."""
        moved: dict[str, list[str]] = {}
        for name, n, p, before in self._others:
            if bool(altered(p, before).any()):
                moved.setdefault(name, []).append(n)
        return moved

    def lost(self) -> str:
        """How many weights the step left as they are, if most; or which it was not to move."""
        counts: dict[torch.dtype, list[float]] = {}
        for p, _, before, sloped in self._own:
            each, of = p.numel() / max(len(before), 1), counts.setdefault(p.dtype, [0.0, 0.0])
            of[0] += each * int(sloped.sum())
            of[1] += each * int((sloped & ~altered(p, before)).sum())
        count, still = (sum(both) for both in zip(*counts.values(), strict=True)) if counts else (0.0, 0.0)
        if still > count / 2:
            lost = {dtype for dtype, (all, stay) in counts.items() if stay > all / 2}
            kinds = sorted(f"{dtype}".removeprefix("torch.") for dtype in lost)
            at = ", ".join(f"{rate:.3g}" for rate in sorted({rate for p, rate, *_ in self._own if p.dtype in lost}))
            if still == count and min(dtype.itemsize for dtype in lost) >= 4:
                return f"the optimizer's step, at lr {at}, changes no parameter"
            share = f"{still / count:.0%} of the weights that have a gradient"
            why = f"steps at lr {at} round away in {' and '.join(kinds)}"
            return f"the optimizer's step leaves {share} as they are: {why}"
        idle = f"the learning rate is 0 of some parameters alone: {first(self._idle)}"
        return idle if self._idle and self._own else ""

    def end(self) -> None:
        """Takes its hooks away."""
        while self._hooks:
            self._hooks.pop().remove()

    def behind(self, model: torch.nn.Module) -> Iterator[str]:
        """Before the next step's first micro-batch, a sentence each."""
        self.end()
        if self._steps > 1:
            yield f"the optimizer steps {self._steps} times on the gradients of one step"
        if left := [n for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())]:
            yield f"gradients of a step are still there at the next: {first(left)}"


def _rate(group: Mapping[str, Any]) -> float:
    """The learning rate; infinite where the optimizer finds one itself."""
    return math.inf if group.get("lr") is None else float(group["lr"])


def rates(optimizer: Any) -> list[float]:
    """The learning rates of its groups, which are alike on all ranks, as gradients are not."""
    return [_rate(group) for group in optimizer.param_groups]


def at_top(now: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the learning rates are no longer on their way up; `last`: those of the step before."""
    return bool(last) and any(now) and not any(a > b for a, b in zip(now, last, strict=False))


def broken(model: torch.nn.Module, sloped: bool) -> str:
    """Gradients that are not finite, or which reach none of a layer although the loss has some, `sloped`."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if lost := [n for n, p in named.items() if p.grad is not None and not bool(p.grad.isfinite().all())]:
        return f"gradients are not finite: {first(lost)}"
    reached = {n for n, p in named.items() if p.grad is not None and bool(p.grad.any())}
    layers = [n for n, m in model.named_modules() if hasattr(m, "gradient_checkpointing") and "." in n]
    still = [n for n in layers if any(k.startswith(n + ".") for k in named)]
    still = [n for n in still if not any(k.startswith(n + ".") for k in reached)]
    if not sloped or (reached and not still):
        return ""
    by = f", checkpointed by {name}" if (name := checkpointing(model)) else ""
    return f"no gradient reaches {first(still)}{by}" if reached else "no parameter has a gradient, and the loss has one"


def checkpointing(model: Any) -> str:
    """The name of the function that checkpoints activations; empty if none does."""
    layers = (m for m in model.modules() if getattr(m, "gradient_checkpointing", False))
    function = next(reversed([f for m in layers if (f := getattr(m, "_gradient_checkpointing_func", None))]), None)
    function = getattr(function, "func", function)
    return "" if function is None else f"{function.__module__}.{function.__qualname__}"
