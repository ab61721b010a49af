"""A training step by its definition: the model in float64, the family's loss on its logits, and replicas of the step.

A trainer's gradients are compared with it. Where transformers' code casts to float32 (normalisation, softmax, rotary
angles), `parity.judge.operations.Double` keeps float64.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.errors import OracleError
from parity.judge.escalation import CONFIRMATION, LARGE
from parity.judge.gates import Judgement
from parity.judge.operations import AnyOperation
from parity.judge.oracle import Oracle, gradient_name
from parity.judge.problem import Problem
from parity.judge.recipe import IEEE_FP32, Recipe
from parity.results.row import finite
from parity.trainers.check import Quantity, entry
from parity.trainers.rig.recorder import Steps

FARTHEST = 0.05
"""Share of the norm of all gradients by which a replica in float32 may differ from them."""
LOSS = "loss"
Loss = Callable[[Any], Tensor]
"""Model -> loss of one optimizer window, 0-dim, differentiable."""
SHOWN = 5
PREFIX = gradient_name("")
Given = Mapping[str, Tensor | None]


class AutocastRounding(AnyOperation):
    """`AnyOperation` under autocast to bfloat16: matrix products read and write it, everything else is float32."""

    def product(self, out: Tensor, a: Tensor, b: Tensor, beside: Tensor | None = None) -> Tensor:
        return self.store(super().product(out, self.store(a, "bf16"), self.store(b, "bf16"), beside), "bf16")


class _Defined(torch.nn.Module):
    """A definition of a model as the forward pass of a module that holds the model."""

    def __init__(self, model: Any, define: Callable[[Any], Mapping[str, Tensor]]):
        super().__init__()
        self.model, self.forward = model, lambda: define(model)


def _problem(
    model: Any,
    define: Callable[[Any], Mapping[str, Tensor]],
    leaves: Collection[str] = (),
    rounding: type[AnyOperation] = AnyOperation,
) -> Oracle:
    """What a definition says of a model; where that takes one replica at a time, at most `CONFIRMATION`: minutes else."""
    defined = _Defined(model, define)
    state = {n: x for n, x in (*model.named_parameters(), *model.named_buffers()) if x.is_floating_point()}

    def definition(**state: Tensor) -> Any:
        return torch.func.functional_call(defined, {f"model.{name}": x for name, x in state.items()}, ())

    problem = Problem(definition, {}, state, tuple(leaves), given={LOSS: torch.ones(())}, rounding=rounding, within=0)

    def draw(recipe: Recipe, numbers: range, *more: Any) -> Mapping[str, Tensor]:
        wanted = numbers if problem.at_once else range(numbers.start, min(numbers.stop, CONFIRMATION))
        try:
            return problem.oracle.draw(recipe, wanted, *more) if wanted else {}
        except NotImplementedError as error:  # else it would read as a trainer that the version has not
            raise OracleError(str(error)) from error

    # a run of the model costs more than the size of its parameters says
    return dataclasses.replace(problem.oracle, draw=draw, size=LARGE)


def measured(model: Any, define: Callable[[Any], Mapping[str, Tensor]], counted: Collection[str] = ()) -> Oracle:
    """Numbers and tensors of a model by their definition, forward alone; `model` as of `exact_step`. `define`: model ->
    name -> a tensor whose entries are judged one by one, or 0-dim; `counted`: those that are counts, shares, or made of
    what is exact in float32."""
    oracle = _problem(model, define)

    def kind(name: str, found: Mapping[str, Tensor]) -> dict[str, bool]:
        return {**oracle.kind(name, found), "counted": name in counted}

    return dataclasses.replace(oracle, kind=kind)


def exact_step(model: Any, loss: Loss, rounding: type[AnyOperation] = AnyOperation) -> Oracle:
    """One optimizer window by its definition: `LOSS`, and the gradient of each parameter (0 where the loss does not reach it).

    `model` is in float64, with written-out attention and no patches (`models.model(name, torch.float64)`). Drawing replicas
    raises OracleError for one that is not finite, naming the parameter: entries where a replica overflows are not judged,
    and a step of nothing else would pass whatever it is given; in float32 for one whose gradients are `FARTHEST` from the
    exact ones: that is another step, not its rounding.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    oracle = _problem(model, lambda model: {LOSS: loss(model)}, trained, rounding)
    slopes = {name: oracle.exact[name] for name in map(gradient_name, trained)}
    total = max(math.sqrt(sum(float(g.square().sum()) for g in slopes.values())), 1e-150)  # its square is a number

    def draw(recipe: Recipe, *more: Any) -> Mapping[str, Tensor]:
        found = oracle.draw(recipe, *more)
        if not found:
            return found
        lost = [n for n, e in slopes.items() if bool((e.isfinite() & ~found[n].isfinite()).any())]
        if lost:
            raise OracleError(f"the replica's {lost[0]} is not finite where the exact one is")
        if rounding is AnyOperation:
            squares = sum((found[n] - e).square().flatten(1).sum(1) for n, e in slopes.items())
            apart = float(torch.as_tensor(squares).max().sqrt()) / total
            if apart > FARTHEST:
                raise OracleError(f"a replica's gradients are {apart:.2g} from the exact ones: no rounding does that")
        return found

    return dataclasses.replace(oracle, draw=draw)


def first_step(step: Oracle, steps: Steps) -> Iterator[Quantity]:
    """Loss and gradients of the one optimizer step of a run."""
    yield window_loss(step, sum(steps.losses))
    yield gradients(step, steps.gradients[0])


def window_loss(step: Oracle, value: float, quantity: str = "loss") -> Quantity:
    return entry(quantity, value, step, of=LOSS)


def logged(oracle: Oracle, log: Mapping[str, Any], message: str = "", of: str = "") -> Iterator[Quantity]:
    """The numbers of an oracle that a trainer logged, their names behind `of`."""
    there = [name for name in oracle.exact if of + name in log]
    yield from (entry(of + name, float(log[of + name]), oracle, message, name) for name in there)


def slopes(step: Oracle, prefix: str = PREFIX) -> Mapping[str, Tensor]:
    """The gradient of every parameter of a step, or with another prefix what an oracle has of each."""
    return {n.removeprefix(prefix): e for n, e in step.exact.items() if n.startswith(prefix)}


def gradients(
    step: Oracle, value: Given, quantity: str = "gradient", message: str = "", prefix: str = PREFIX
) -> Quantity:
    """Values by the `slopes` of a step. Each gate's headroom is that of its worst parameter. What is told names the first
    parameter, in the order of the forward pass, that disagrees: where the two part."""
    exact = slopes(step, prefix)
    # no gradient is one of zero, where zero is right
    none = {n: torch.zeros_like(e, dtype=torch.float32) for n, e in exact.items() if not bool(e.any())}
    found = {prefix + n: none.get(n) if value.get(n) is None else value[n] for n in exact}
    judgements = {n.removeprefix(prefix): j for n, j in step.judge(found, IEEE_FP32).items()}
    gates: dict[str, float] = {}
    for j in judgements.values():
        for gate, headroom in j.gates.items():
            gates[gate] = max(gates.get(gate, 0.0), math.inf if math.isnan(headroom) else headroom)
    failing = {n: judgements[n] for n in forward_order(exact) if not judgements[n].agrees}
    errors = {n: _relative(value.get(n), exact[n]) for n in failing}
    shown = sorted(failing.items(), key=lambda item: -item[1].headroom)[:SHOWN]
    worst = [{"error": errors[n], "headroom": finite(j.headroom), "gate": j.gate} for n, j in shown]
    together = Judgement(
        gates,
        _message(value, exact, errors, shown[0][0]) if failing else "",
        max_abs=max((j.max_abs for j in judgements.values() if j.max_abs is not None), default=None),
        worst=tuple({"parameter": n, **found} for (n, _), found in zip(shown, worst, strict=True)),
    )
    return Quantity(quantity, value, exact, together, message)


def forward_order(names: Mapping[str, Tensor]) -> list[str]:
    """Parameter names as a forward pass meets them: embeddings, layers, final norm, head."""

    def key(name: str) -> tuple[int, int]:
        parts = name.split(".")
        layer = next((int(p) for p in parts if p.isdigit()), None)
        if layer is not None:
            return (1, layer)
        return (0, 0) if "embed" in name else (3, 0) if "head" in name or "score" in name else (2, 0)

    return sorted(names, key=key)


def _message(found: Given, exact: Mapping[str, Tensor], errors: Mapping[str, float | None], worst: str) -> str:
    """`errors`: of what disagrees, in the order of the forward pass; `worst`: the name of what disagrees most."""
    first, error = next(iter(errors.items()))
    size = "not finite" if error is None else f"relative error {error:.3g}"
    size = "no gradient" if found.get(first) is None else size
    ratio = _ratio(found.get(worst), exact[worst])
    scale = "" if ratio is None else f"; {worst} is {ratio:.5g} times the definition's"
    return f"{len(errors)} of {len(exact)} parameters disagree, first {first} ({size}){scale}"


def _ratio(value: Tensor | None, exact: Tensor) -> float | None:
    """The factor between the two, where one is the other times a factor (to 1e-3)."""
    if value is None or not bool(value.isfinite().all()) or not bool(exact.any()):
        return None
    value = value.detach().cpu().double()
    factor = float((value * exact).sum() / exact.square().sum())
    rest = float((value - factor * exact).norm() / exact.norm())
    return factor if rest < 1e-3 * abs(factor) else None


def _relative(value: Tensor | None, exact: Tensor) -> float | None:
    """‖value - exact‖/‖exact‖, where it is finite."""
    if value is None:
        return None
    return finite(float((value.detach().cpu().double() - exact).norm() / exact.norm().clamp(min=1e-300)))
