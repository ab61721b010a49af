"""`assert_parity`: a function against its definition in float64, forward and backward, with tolerances derived from rounding."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from parity.judge.asking import names_of, posed, resolved
from parity.judge.calls import FunctionCalls, elsewhere, other_values, parts, told
from parity.judge.escalation import CERTAIN, CONFIRMATION, HELD, LARGE, REPLICAS, TWICE, escalate
from parity.judge.gates import MAX, WORST, Judgement, failed, judge
from parity.judge.hints import hints
from parity.judge.in_float64 import right_in_float64
from parity.judge.operations import is_floating
from parity.judge.oracle import ALL_QUANTITIES, gradient_name
from parity.judge.problem import Problem, call
from parity.judge.protocol import same_bits
from parity.judge.recipe import DTYPES, HALF_SUBNORMAL, NAMES, UNIT_ROUNDOFF, Recipe
from parity.judge.record import Parity, ParityError
from parity.judge.undeclared import Explaining

OBSERVERS: list[Callable[[Parity], None]] = []
"""Who is told of every judgement of an `assert_parity`."""


def assert_parity(
    function: Callable[..., Any] | None = None,
    definition: Callable[..., Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    actual: Mapping[str, torch.Tensor] | None = None,
    grad: Collection[str] | None = None,
    also: Sequence[Callable[..., Any]] = (),
    in_place: Collection[str] = (),
    recipe: Recipe | None = None,
    cotangent: torch.Tensor | Mapping[str, torch.Tensor] | str | None = None,
    protocol: str | Collection[str] = "default",
    seed: int = 0,
) -> None:
    """Raise `ParityError`, an AssertionError, unless `function` differs from `definition` by no more than rounding explains.

    The definition runs in float64, and as replicas that round every operation at random as code of the given precision would;
    their spread on these inputs is the allowed error (docs/judging.md). Outputs and gradients are judged; the upstream gradient
    is random.

    Args:
        function: the code under test, called with `inputs` as keyword arguments; or a module, whose parameters are inputs too.
        definition: the same in plain torch, written for any dtype; or a module with parameters of the same names.
        inputs: name -> tensor, number, or a list, tuple or dictionary of them; float32, float16 or bfloat16, on any device.
        actual: instead of a function the values that it gave: output -> tensor, and "grad_" + input -> tensor.
        grad: the inputs and parameters whose gradients are judged; default: every floating-point one ("a.b" in a dictionary,
            "a[0]" in a list); with `actual` those that it holds.
        also: other correct forms of the definition, such as one that uses a stored output in its backward pass; added to those
            that a definition has as its own `also`.
        in_place: inputs that the function may overwrite; "grad_output": its upstream gradient.
        recipe: the precision that the function may have; default: float32 inside, results in the dtype of the inputs.
        cotangent: the upstream gradient of the output, or output -> gradient, required with gradients in `actual`; or "random",
            "ones" or "zeros" (expanded scalars), "scaled" (random times 65,536, in float16 1,024) for every output.
        protocol: what else must hold of a call that agrees: "default", "all", "none", or names of parts. Default: "inputs" stay
            as they are, upstream gradients too; a second call gives the same "bits", seeds nothing; "accumulation": a second
            backward adds the same gradient to `.grad`; "interleaved": so does one after another forward; "repeated": values
            that are exchanged in the same tensors, in place and through `.data`, are seen, results of earlier calls stay, and
            an upstream gradient need not be contiguous; "no_grad" changes no output, or is refused. Also: "output dtypes" are the
            definition's on these inputs; "checkpoint", "reentrant checkpoint", "compile" (aot_eager).
        seed: of upstream gradient and replicas.

    Raises:
        ParityError: with the record as its `parity`.
        ValueError: for inputs that cannot be judged, and a definition that is random.
        NotImplementedError: for an operation of the definition without a rounding rule, by name.

    Warns:
        UserWarning: where the definition is NaN in every entry of an output or a gradient: nothing is held against it.
    """
    asked = dict(locals())
    __tracebackhide__ = True
    raise_unless(check_parity(**asked))


def raise_unless(parity: Parity) -> None:
    """Raise `ParityError` unless it agrees, and tell the observers."""
    __tracebackhide__ = True
    for observer in OBSERVERS:
        observer(parity)
    if not parity.agrees:
        raise ParityError(parity)


def check_parity(
    function: Callable[..., Any] | None = None,
    definition: Callable[..., Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    actual: Mapping[str, torch.Tensor] | None = None,
    grad: Collection[str] | None = None,
    also: Sequence[Callable[..., Any]] = (),
    in_place: Collection[str] = (),
    recipe: Recipe | None = None,
    cotangent: torch.Tensor | Mapping[str, torch.Tensor] | str | None = None,
    protocol: str | Collection[str] = "default",
    seed: int = 0,
) -> Parity:
    """The record of the same judgement as `assert_parity`, which has the arguments; nothing is raised for a disagreement."""
    return verdict(**locals())[1]()


def verdict(
    function: Any = None,
    definition: Any = None,
    inputs: Any = None,
    *,
    actual: Any = None,
    in_place: Any = (),
    recipe: Recipe | None = None,
    protocol: str | Collection[str] = "default",
    **asked: Any,
) -> tuple[Parity, Callable[[], Parity]]:
    """The record without what explains a disagreement, which costs many times the verdict, and what makes the whole one."""
    if definition is None or inputs is None:
        raise ValueError("assert_parity needs a definition and inputs: assert_parity(kernel, definition=f, inputs={…})")
    if (function is None) == (actual is None):
        raise ValueError("give a function, or the values that one gave as actual={…}, and not both")
    problem = posed(function, definition, inputs, actual, **asked)
    recipe = resolved(recipe, problem)
    chosen = parts(protocol)
    upstream = map(gradient_name, problem.cotangents)
    calls = FunctionCalls(
        function, problem, names_of("in_place", in_place, problem.tensors, {*problem.inputs, *upstream})
    )
    if actual is None and "repeated" in chosen:
        calls.reserve()
    values = calls.values() if actual is None else dict(actual)
    quantities = _judged(problem, values, recipe)
    undefined = [n for n, exact in problem.oracle.exact.items() if exact.numel() and bool(exact.isnan().all())]
    if undefined:
        warnings.warn(f"{', '.join(undefined)}: the definition is NaN, which nothing is held against", stacklevel=4)
    wrong = {name: values.get(name) for name, j in quantities.items() if not j.agrees}
    broken: list[str] = []
    if actual is None and not wrong:

        def agrees(name: str, value: torch.Tensor | None) -> bool:
            return name in quantities and _judged(problem, {name: value}, recipe, (name,))[name].agrees

        broken = dataclasses.replace(calls, agrees=agrees).broken(chosen, values)
        if "repeated" in chosen and not broken:
            broken = _later(calls, values, recipe)
    parity = Parity(
        function=_name(function) if function is not None else "actual",
        quantities=quantities,
        protocol=(*(calls.changed if "inputs" in chosen else ()), *broken),
        recipe=recipe.describe(),
        inputs=_described(problem),
    )

    def explained() -> Parity:
        if not wrong:
            return parity
        in_float64 = right_in_float64(function, problem, wrong, lambda values: _judged(problem, values, recipe, wrong))
        looks = {
            n: hints(v, problem.oracle.exact[n], problem.tensors, problem.inputs, quantities[n].place, in_float64)
            for n, v in wrong.items()
        }
        # coarser rounding is spread over all entries, is no factor, and is more than float32's
        sought = in_float64 is not False and not any(looks.values())
        by = _explained(problem, values, recipe, quantities) if sought else None
        right = in_float64 if in_float64 is not None else _in_float32(function, problem, wrong, by)
        kind = "precision" if right else "logic"
        return dataclasses.replace(parity, kind=kind, explained_by=by, in_float64=in_float64, hints=looks)

    return parity, explained


def tolerance(
    definition: Callable[..., Any],
    inputs: Mapping[str, Any],
    recipe: Recipe | None = None,
    *,
    cotangent: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Output, or "grad_" and an input -> (atol, rtol) for `torch.testing.assert_close` with the definition in float64.

    rtol is 6u of the output's dtype, as in the judge's max gate; atol is what correct code may be off by beyond that: 6 times
    the root mean square over sixty replicas of max(|error| - rtol·|exact|, 0), at least twice the largest.
    """
    problem = posed(None, definition, inputs, cotangent=cotangent, seed=seed)
    recipe = resolved(recipe, problem)
    out = {}
    for name, exact in problem.oracle.exact.items():
        dtype = problem.tensors[name.removeprefix("grad_")].dtype if name.startswith("grad_") else DTYPES[problem.dtype]
        if not exact.is_floating_point():
            out[name] = (0.0, 0.0)
            continue
        rtol = 6 * UNIT_ROUNDOFF[NAMES[dtype]]
        errors = (problem.oracle.replicas(recipe, CONFIRMATION)[name] - exact).abs() - rtol * exact.abs()
        beyond = errors.clamp(min=0.0).reshape(len(errors), -1).amax(1) if exact.numel() else torch.zeros(1)
        atol = max(
            MAX * float(beyond.square().mean().sqrt()), WORST * float(beyond.max()), 2 * HALF_SUBNORMAL[NAMES[dtype]]
        )
        out[name] = (atol, rtol)
    return out


LATER = "a later call on other values, its upstream gradient not contiguous,"
STALE = 10.0
"""A later call is judged where it is so much farther from its exact values than the first, in units of the dtypes' own precision:
earlier values are."""


def _later(calls: FunctionCalls, first: Mapping[str, torch.Tensor | None], recipe: Recipe) -> list[str]:
    """What is wrong in a later call on other values, under another upstream gradient in other memory: what a call keeps by shape,
    or for ever, and a backward pass that takes its upstream gradient to be contiguous. And under one of equal values along the
    last dimension, expanded, as a sum over it sends, unless a gradient is nearly 0 there."""
    problem = calls.problem
    inputs = tree_map(lambda x: other_values(x) if isinstance(x, torch.Tensor) else x, dict(problem.inputs))
    parameters = {name: other_values(x) for name, x in problem.parameters.items()}
    given = {name: other_values(g) for name, g in problem.given.items()}
    later = dataclasses.replace(problem, inputs=inputs, parameters=parameters, given={}, seed=problem.seed + 1)
    try:  # outputs may have another shape
        random = later.upstream_of(later.outputs).items()
        above = {n: given[n].double() if n in given and given[n].shape == g.shape else g for n, g in random}
        later = dataclasses.replace(later, given={n: elsewhere(g) for n, g in above.items()})
        wide = {
            n for n, g in above.items() if g.dim() > 1 and n not in given and gradient_name(n) not in calls.in_place
        }
        rows = {n: elsewhere(above[n][..., :1]).expand_as(above[n]) for n in wide}
        asked = [later, dataclasses.replace(later, given={**later.given, **rows})]
        asked = asked[:1] if not (rows and later.leaves) or calls.changed or _vanishes(asked[1], later) else asked
    except Exception as error:
        return [f"repeated: {LATER} fails, {told(error)}"]
    for one in asked:
        if wrong := _wrong_later(dataclasses.replace(calls, problem=one, changed=[]), problem, first, recipe):
            return wrong
    return []


def _wrong_later(
    calls: FunctionCalls, before: Problem, first: Mapping[str, torch.Tensor | None], recipe: Recipe
) -> list[str]:
    def off(of: Problem, values: Mapping[str, torch.Tensor | None]) -> float:
        return max((_judge(of, n, values, recipe, 0, False).headroom for n in of.oracle.exact), default=0.0)

    try:
        later, values = calls.problem, calls.values()
    except Exception as error:
        return [f"repeated: {LATER} fails, {told(error)}"]
    if (far := off(later, values)) <= STALE or far <= STALE * off(before, first):
        return []
    wrong = {n: j for n, j in _judged(later, values, recipe).items() if not j.agrees}
    return [f"repeated: {n} of {LATER} has {j.headroom:.3g} times the allowed error" for n, j in wrong.items()]


def _vanishes(problem: Problem, beside: Problem) -> bool:
    """Whether a gradient is below a hundredth of that of the other: what cancels is all rounding."""
    names = map(gradient_name, problem.leaves)
    return any(float(problem.oracle.exact[n].norm()) < float(beside.oracle.exact[n].norm()) / 100 for n in names)


def _judged(
    problem: Problem, values: Mapping[str, torch.Tensor | None], recipe: Recipe, only: Collection[str] | None = None
) -> dict[str, Judgement]:
    """Every quantity: by its dtype's own precision first, which replicas only widen; then with as many as it takes."""
    exact = {n: x for n, x in problem.oracle.exact.items() if only is None or n in only}

    def judge_with(count: int, finer: bool, names: Collection[str] | None) -> dict[str, Judgement]:
        asked = [n for n in exact if names is None or n in names]
        beside = asked if problem.oracle.entries(count, finer) > ALL_QUANTITIES else None
        return {n: _judge(problem, n, values, recipe, count, finer, beside) for n in asked}

    judged = escalate(judge_with, _steps(problem), finer=True, certain=CERTAIN)
    return {name: judged[name] for name in exact}


def _largest(problem: Problem) -> int:
    """Entries of the largest quantity."""
    return max((x.numel() for x in problem.oracle.exact.values()), default=0)


def _steps(problem: Problem) -> list[int]:
    """The oracle's, up to as many replicas of the largest quantity as hold `HELD` entries together: one of a million entries,
    wrong by ten times what is allowed, took 20 GiB."""
    most = max(REPLICAS, HELD // max(1, _largest(problem)))
    return [n for n in problem.oracle.steps if n <= most]


def _judge(
    problem: Problem,
    name: str,
    values: Mapping[str, torch.Tensor | None],
    recipe: Recipe,
    count: int,
    finer: bool,
    beside: Collection[str] | None = None,
) -> Judgement:
    """`beside`: the quantities whose replicas are asked for with its own (None: all)."""
    value, exact = values.get(name), problem.oracle.exact[name]
    if value is None:
        if name.startswith("grad_"):
            return failed("no gradient; grad=(…) names the inputs that have one")
        return failed(f"missing; returned: {', '.join(values)}")
    if not exact.is_floating_point():
        return _judge_exact(problem, name, value, recipe, max(count, REPLICAS))
    if name.startswith("grad_"):
        dtype = problem.tensors[name.removeprefix("grad_")].dtype
    else:  # no coarser than the recipe says
        asked, came = DTYPES.get(recipe.output, value.dtype), value.dtype
        dtype = asked if came in NAMES and UNIT_ROUNDOFF[NAMES[came]] > UNIT_ROUNDOFF[NAMES[asked]] else came
    found = judge(value, problem.oracle.unit(name, recipe, count, finer, beside), dtype)
    if found.agrees or name.startswith("grad_") or dtype == value.dtype or value.dtype != DTYPES[problem.dtype]:
        return found
    return dataclasses.replace(found, message=f"{found.message}; Recipe(…, output='input') allows it")


FEW_WRONG = 8
"""Integers that may be wrong by chance of few replicas."""


def _judge_exact(problem: Problem, name: str, value: torch.Tensor, recipe: Recipe, count: int) -> Judgement:
    """Integers and booleans: equal, wherever the replicas are. By chance they are in some of the entries that rounding decides:
    more replicas are drawn while few entries are wrong. Elsewhere none is farther from the replicas' values than these lie apart,
    which is a chance of 2^-R of R replicas where any of a range is right, and none stands twice in a row where theirs do once.
    """
    exact = problem.oracle.exact[name]
    if value.shape != exact.shape:
        return failed(f"shape {tuple(value.shape)}, expected {tuple(exact.shape)}")
    value = value.to(exact.device)
    for drawn in (n for n in problem.oracle.steps if n >= count):
        seen = torch.cat([problem.oracle.replicas(recipe, drawn)[name], exact.unsqueeze(0)])
        decided, wrong = (seen == exact).all(0), value != exact
        undecided = int((~decided).sum())
        if bool(wrong.any()):
            least, most = seen.double().aminmax(dim=0)
            far = (value.double() - (least + most) / 2).abs() > 1.5 * (most - least)
            once = not bool(_twice(seen).any())
            wrong = torch.where(decided, wrong, far | (_twice(value) & once))
        if not bool(wrong.any()):
            return Judgement({"exact": 0.0}, undecided=undecided)
        if int(wrong.sum()) > max(undecided, FEW_WRONG):
            break
    index = tuple(int(i) for i in wrong.nonzero()[0])
    entry = (index, float(value[index]), float(exact[index]), float(value[index]) - float(exact[index]))
    return Judgement({"exact": float("inf")}, f"{int(wrong.sum())} of {wrong.numel()} entries differ", worst=(entry,))


def _twice(x: torch.Tensor) -> torch.Tensor:
    """Which integers stand beside an equal one in the last dimension; of booleans and of a single one none."""
    out = torch.zeros_like(x, dtype=torch.bool)
    if x.dtype == torch.bool or not x.dim() or x.shape[-1] < 2:
        return out
    ordered = x.long().sort(-1)  # torch sorts no unsigned ones but bytes
    equal = ordered.values[..., 1:] == ordered.values[..., :-1]
    none = torch.zeros_like(equal[..., :1])
    return out.scatter(-1, ordered.indices, torch.cat([none, equal], -1) | torch.cat([equal, none], -1))


HOPELESS = 10.0
"""By so much twelve replicas do not underestimate what a recipe allows (`CERTAIN`), unless it acts in half of them alone, as a
stored log-sum-exp, and in none of twelve: one in 4,096."""


def _explained(
    problem: Problem, values: Mapping[str, torch.Tensor | None], recipe: Recipe, quantities: Mapping[str, Judgement]
) -> str | None:
    """The recipe, of some coarser ones, under which everything agrees and which allows least; tf32 products come first."""

    def judged(other: Recipe, names: Collection[str]) -> dict[str, Judgement]:
        # No more are drawn where a recipe leaves what is wrong as it is, or some of its replicas are far too near.
        if large:
            few, before = (problem.oracle.replicas(r, REPLICAS) for r in (other, recipe))
            if other.output == recipe.output and any(same_bits(few[n], before[n]) for n in names if n in wrong):
                return {}
            found = {n: _judge(problem, n, values, other, REPLICAS, False) for n in names}
            if any(j.headroom > HOPELESS for j in found.values()):
                return found
        return {n: _judge(problem, n, values, other, count, False) for n in names}

    large, wrong = _largest(problem) >= LARGE, {n for n, j in quantities.items() if not j.agrees}
    count = min(TWICE, _steps(problem)[-1]) if large else CONFIRMATION
    casts = any(x.dtype == torch.float32 for x in problem.tensors.values())
    always = {"output": "input"} if problem.dtype != "fp32" and recipe.output == problem.dtype else {}
    explaining = Explaining(
        recipe, problem.dtype, judged, quantities, values, problem.outputs, casts, True, always, problem.oracle
    )
    return next(explaining.recipes(), None)


def _in_float32(function: Any, problem: Problem, wrong: Collection[str], explained: str | None) -> bool:
    """Whether what is wrong agrees on the same inputs in float32; for float32 inputs, whether tf32 explains it."""
    if problem.dtype == "fp32":
        return explained is not None and "matmul=" in explained
    if function is None:
        return explained is not None
    wide = {n: x.detach().float() if is_floating(x) else x for n, x in problem.tensors.items()}
    arguments = call(lambda **given: given, problem.inputs, wide, ())
    parameters = {n: wide[n] for n in problem.parameters}
    precise = dataclasses.replace(problem, inputs=arguments, parameters=parameters, given=problem.cotangents)
    with contextlib.suppress(Exception):  # a kernel without float32: its dtype's own coarser precisions decide
        judged = _judged(precise, FunctionCalls(function, precise).values(), Recipe())
        return all(judged[n].agrees for n in wrong)
    return explained is not None


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name


def _described(problem: Problem) -> str:
    tensors = [f"{n} {tuple(x.shape)} {NAMES.get(x.dtype, str(x.dtype)[6:])}" for n, x in problem.tensors.items()]
    others = [f"{n}={x!r}" for n, x in problem.inputs.items() if isinstance(x, int | float | str | bool)]
    return ", ".join([*tensors, *others, f"seed={problem.seed}"])
