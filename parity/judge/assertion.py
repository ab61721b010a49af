"""`assert_parity`: a function against its definition in float64, forward and backward, with tolerances derived from rounding."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from parity.judge.calls import FunctionCalls, other_values, parts, told
from parity.judge.escalation import CERTAIN, CONFIRMATION, REPLICAS, escalate, ladder
from parity.judge.gates import MAX, WORST, Judgement, failed, judge
from parity.judge.hints import hints
from parity.judge.operations import is_floating
from parity.judge.oracle import gradient_name
from parity.judge.problem import UPSTREAM, Problem, call, named, upstream
from parity.judge.recipe import DTYPES, HALF_SUBNORMAL, NAMES, UNIT_ROUNDOFF, Recipe
from parity.judge.undeclared import Explaining
from parity.judge.words import GATES

TF32_PRODUCTS = "tf32 products"
OBSERVERS: list[Callable[[Parity], None]] = []
"""Who is told of every judgement of an `assert_parity`."""


class ParityError(AssertionError):
    """What a test shows; `parity` is the record."""

    def __init__(self, parity: Parity):
        super().__init__(parity.message)
        self.parity = parity


@dataclasses.dataclass(frozen=True)
class Parity:
    """The verdict on a function.

    Attributes:
        function: its name.
        quantities: output, or "grad_" and an input -> its judgement; `headroom` is error ÷ allowed at the tightest gate.
        kind: "logic", or "precision" where the same inputs in float32 agree, or for float32 inputs tf32 products would; None
            where all agree.
        explained_by: the recipe that allows least of some under which all agrees, as it is declared; or tf32 products; or None.
        hints: quantity -> what the error looks like.
        protocol: what does not hold of the protocol of calls, a sentence each.
        recipe: the recipe it was judged by, in words.
        inputs: shapes and dtypes, in words.
        seconds: of wall time that the judgement took.
        case: the id of a drawn case, or nothing.
    """

    function: str
    quantities: Mapping[str, Judgement]
    kind: str | None
    explained_by: str | None
    hints: Mapping[str, Sequence[str]]
    protocol: Sequence[str]
    recipe: str
    inputs: str
    seconds: float
    case: str = ""

    @property
    def agrees(self) -> bool:
        """Whether every quantity agrees and the protocol holds."""
        return not self.wrong and not self.protocol

    @property
    def wrong(self) -> dict[str, Judgement]:
        """The quantities that disagree, the farthest first."""
        found = {n: j for n, j in self.quantities.items() if not j.agrees}
        return dict(sorted(found.items(), key=lambda item: -item[1].headroom))

    @property
    def failing(self) -> set[str]:
        """The quantities that disagree, and the parts of the protocol that do not hold."""
        return {*self.wrong, *(line.partition(":")[0] for line in self.protocol)}

    @property
    def headroom(self) -> float:
        """The largest error ÷ allowed of all quantities; above 1 is a disagreement."""
        return max((j.headroom for j in self.quantities.values()), default=0.0)

    @property
    def message(self) -> str:
        """The failure as a test prints it."""
        lines = [f"{self.function} {'differs from' if self.wrong else 'agrees with'} its definition in float64"]
        lines[0] += ", and breaks the protocol of calls" if self.protocol else ""
        if self.kind:
            right = f"; right for code that rounds so: {self.explained_by}" if self.explained_by else ""
            lines.append(f"  class    {self.kind}{right}")
        lines += [f"  case     {self.case}"] if self.case else []
        lines += [f"  inputs   {self.inputs}", f"  recipe   {self.recipe}"]
        lines += [f"✗ protocol {line}" for line in self.protocol]
        shown = [g for g in GATES if any(g in j.gates for j in self.quantities.values())]
        width = max([len(n) for n in self.quantities] + [14]) + 2
        lines.append("  error ÷ allowed".ljust(width + 2) + "".join(g.rjust(10) for g in shown))
        for name, j in self.quantities.items():
            cells = "".join((f"{j.gates[g]:.3g}" if g in j.gates else "").rjust(10) for g in shown)
            lines.append(f"{' ' if j.agrees else '✗'} {name}".ljust(width + 2) + cells)
        for name, j in self.wrong.items():
            lines.append(
                f"  {name}: gate {j.gate}, {j.headroom:.3g} times the allowed error: {GATES[j.gate]}"
                + (f"; {j.message}" if j.message else "")
            )
            lines += [
                f"    [{', '.join(map(str, index))}]  got {value:.7g}, float64 {exact:.7g}, error {error:.3g}"
                for index, value, exact, error in j.worst[:3]
            ]
            lines += [f"    hint: {hint}" for hint in self.hints.get(name, ())]
        return "\n".join(lines)


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
        in_place: inputs that the function may overwrite.
        recipe: the precision that the function may have; default: float32 inside, results in the dtype of the inputs.
        cotangent: the upstream gradient of the output, or output -> gradient, required with gradients in `actual`; or "random",
            "ones" or "zeros" (expanded scalars), "scaled" (random times 65,536, in float16 1,024) for every output.
        protocol: what else must hold of a call that agrees: "default", "all", "none", or names of parts. Default: "inputs" stay
            as they are, upstream gradients too; a second call gives the same "bits"; "accumulation": a second backward adds the
            same gradient to `.grad`; "interleaved": so does one after another forward; "repeated": values that are exchanged
            in the same tensors, in place and through `.data`, are seen, and results of earlier calls stay; "no_grad" changes no
            output. Also: "checkpoint", "reentrant checkpoint", "compile" (aot_eager).
        seed: of upstream gradient and replicas.

    Raises:
        ParityError: with the record as its `parity`.
        ValueError: for inputs that cannot be judged.
        NotImplementedError: for an operation of the definition without a rounding rule, by name.
    """
    __tracebackhide__ = True
    parity = check_parity(
        function,
        definition,
        inputs,
        actual=actual,
        grad=grad,
        also=also,
        in_place=in_place,
        recipe=recipe,
        cotangent=cotangent,
        protocol=protocol,
        seed=seed,
    )
    raise_unless(parity)


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
    began = time.perf_counter()
    if definition is None or inputs is None:
        raise ValueError("assert_parity needs a definition and inputs: assert_parity(kernel, definition=f, inputs={…})")
    if (function is None) == (actual is None):
        raise ValueError("give a function, or the values that one gave as actual={…}, and not both")
    problem = _problem(function, definition, inputs, actual, grad, also, cotangent, seed)
    recipe = _recipe(recipe, problem)
    asked = parts(protocol)
    calls = FunctionCalls(function, problem, _names("in_place", in_place, problem.tensors, problem.inputs))
    values = calls.values() if actual is None else dict(actual)
    quantities = _judged(problem, values, recipe)
    wrong = {name: values.get(name) for name, j in quantities.items() if not j.agrees}
    broken: list[str] = []
    if actual is None and not wrong:

        def agrees(name: str, value: torch.Tensor | None) -> bool:
            return name in quantities and _judged(problem, {name: value}, recipe, (name,))[name].agrees

        broken = dataclasses.replace(calls, agrees=agrees).broken(asked, values)
        if "repeated" in asked and not broken:
            broken = _later(calls, values, recipe)
    kind = explained = None
    looks: dict[str, list[str]] = {}
    if wrong:
        explained = _explained(problem, values, recipe, quantities)
        looks = {n: hints(v, problem.oracle.exact[n], problem.tensors, problem.inputs) for n, v in wrong.items()}
        if any(looks.values()):
            explained = None  # coarser rounding is spread over all entries, and is no factor
        kind = "precision" if _in_float32(function, problem, wrong, explained) else "logic"
    return Parity(
        function=_name(function) if function is not None else "actual",
        quantities=quantities,
        kind=kind,
        explained_by=explained,
        hints=looks,
        protocol=(*(calls.changed if "inputs" in asked else ()), *broken),
        recipe=recipe.describe(),
        inputs=_described(problem),
        seconds=time.perf_counter() - began,
    )


def tolerance(
    definition: Callable[..., Any], inputs: Mapping[str, Any], recipe: Recipe | None = None, *, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Output, or "grad_" and an input -> (atol, rtol) for `torch.testing.assert_close` with the definition in float64.

    rtol is 6u of the output's dtype, as in the judge's max gate; atol is what correct code may be off by beyond that: 6 times
    the root mean square over sixty replicas of max(|error| - rtol·|exact|, 0), at least twice the largest.
    """
    problem = _problem(None, definition, inputs, None, None, (), None, seed)
    recipe = _recipe(recipe, problem)
    out = {}
    for name, exact in problem.oracle.exact.items():
        dtype = problem.tensors[name.removeprefix("grad_")].dtype if name.startswith("grad_") else DTYPES[problem.dtype]
        if not exact.is_floating_point():
            out[name] = (0.0, 0.0)
            continue
        rtol = 6 * UNIT_ROUNDOFF[NAMES[dtype]]
        errors = (problem.oracle.replicas(recipe, CONFIRMATION)[name] - exact).abs() - rtol * exact.abs()
        beyond = errors.clamp(min=0.0).flatten(1).amax(1) if exact.numel() else torch.zeros(1)
        atol = max(
            MAX * float(beyond.square().mean().sqrt()), WORST * float(beyond.max()), 2 * HALF_SUBNORMAL[NAMES[dtype]]
        )
        out[name] = (atol, rtol)
    return out


def _problem(
    function: Any,
    definition: Any,
    inputs: Mapping[str, Any],
    actual: Mapping[str, torch.Tensor] | None,
    grad: Collection[str] | None,
    also: Sequence[Any],
    cotangent: torch.Tensor | Mapping[str, torch.Tensor] | str | None,
    seed: int,
) -> Problem:
    """What is asked, checked."""
    module = function if isinstance(function, torch.nn.Module) else None
    if module is None and isinstance(definition, torch.nn.Module) and function is not None:
        raise ValueError("the definition is a module and the function is not: give its parameters as inputs")
    source = module or (definition if isinstance(definition, torch.nn.Module) else None)
    parameters = {} if source is None else dict(source.named_parameters())
    kind, cotangent = (cotangent, None) if isinstance(cotangent, str) else ("random", cotangent)
    if kind not in UPSTREAM:
        raise ValueError(f"cotangent={kind!r}: give a tensor, or {', '.join(UPSTREAM)}")
    _check_types(inputs, actual, cotangent)
    found = [x for x in tree_leaves(dict(inputs)) if isinstance(x, torch.Tensor)]
    tensors = {**named(dict(inputs)), **parameters}
    if len(tensors) < len(found) + len(parameters):
        shared = set(named(dict(inputs))) & set(parameters)
        raise ValueError(f"two inputs or parameters have one name: {', '.join(shared or tensors)}")
    odd = [n for n, x in tensors.items() if x.is_complex()]
    if odd:
        raise ValueError(f"{odd[0]} is {tensors[odd[0]].dtype}: give its real and imaginary part")
    floating = [name for name, x in tensors.items() if is_floating(x)]
    wide = [name for name in floating if tensors[name].dtype not in (torch.float32, torch.float16, torch.bfloat16)]
    if wide:
        raise ValueError(
            f"{wide[0]} is {tensors[wide[0]].dtype}: float32, float16 and bfloat16 are judged, against float64"
        )
    if grad is None:
        grad = floating if actual is None else [n for n in floating if gradient_name(n) in actual]
    grad = _names("grad", grad, floating)
    odd = [n for n in actual or () if n.startswith("grad_") and n.removeprefix("grad_") not in floating]
    if odd:
        raise ValueError(f"actual={odd[0]!r}: the floating-point inputs are {', '.join(floating)}")
    given = {"output": cotangent} if isinstance(cotangent, torch.Tensor) else dict(cotangent or {})
    if actual is not None and grad and not given:
        raise ValueError("gradients in actual={…} are judged with the upstream gradient that made them: cotangent=…")
    leaves = tuple(n for n in floating if n in grad)
    problem = Problem(definition, inputs, parameters, leaves, (*also, *getattr(definition, "also", ())), given, seed)
    outputs = problem.cotangents
    if kind != "random":
        made = {n: upstream(kind, n, problem.outputs[n], seed, problem.dtype) for n in outputs}
        problem = dataclasses.replace(problem, given=made)
    if not problem.outputs:
        raise ValueError("the definition returns no tensor: return one, or a list, tuple or dictionary of tensors")
    if set(given) - set(outputs):
        raise ValueError(f"cotangent of {sorted(set(given) - set(outputs))}: the outputs are {', '.join(outputs)}")
    for name, g in given.items():
        if g.shape != problem.outputs[name].shape:
            expected = tuple(problem.outputs[name].shape)
            raise ValueError(f"cotangent of {name} has shape {tuple(g.shape)}: give {expected}, that of the output")
    return problem


def _recipe(recipe: Recipe | None, problem: Problem) -> Recipe:
    if not isinstance(recipe, Recipe | None):
        raise ValueError(f"recipe={recipe!r}: give EAGER, or Recipe(…)")
    resolved = (recipe or Recipe(output="input")).resolve(problem.dtype)
    formulas = {"matmul", "matmul_backward", "tanh", "entropy"}
    for field, value in dataclasses.asdict(resolved).items():
        if isinstance(value, str) and field not in formulas and value not in (*DTYPES, "any"):
            raise ValueError(f"Recipe({field}={value!r}): give input, {', '.join(DTYPES)}")
    return resolved


def _check_types(inputs: Any, actual: Any, cotangent: Any) -> None:
    for argument, given in (("inputs", inputs), ("actual", actual), ("cotangent", cotangent)):
        if given is None or (argument == "cotangent" and isinstance(given, torch.Tensor)):
            continue
        if not isinstance(given, Mapping):
            raise ValueError(f"{argument} is a {type(given).__name__}: give a dictionary, name -> tensor")
        for name, value in given.items():
            if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
                raise ValueError(f"{argument}: {name} is a {type(value).__name__}: give torch.as_tensor({name})")
            if argument != "inputs" and not isinstance(value, torch.Tensor | None):
                raise ValueError(f"{argument}: {name} is a {type(value).__name__}: give a tensor")


def _names(argument: str, names: Collection[str], tensors: Collection[str], trees: Collection[str] = ()) -> set[str]:
    """Names of tensors, or of trees of them, that exist; a string is one name."""
    found = {names} if isinstance(names, str) else set(names)
    if found - set(tensors) - set(trees):
        unknown = ", ".join(sorted(found - set(tensors) - set(trees)))
        kind = "floating-point inputs" if argument == "grad" else "inputs"
        raise ValueError(f"{argument}={unknown!r}: the {kind} are {', '.join(tensors)}")
    return found


STALE = 10.0
"""A later call is judged where it is so much farther from its exact values than the first, in units of the dtypes' own precision:
earlier values are."""


def _later(calls: FunctionCalls, first: Mapping[str, torch.Tensor | None], recipe: Recipe) -> list[str]:
    """What is wrong in a later call on other values under another upstream gradient: what a call keeps by shape, or for ever."""
    problem = calls.problem
    inputs = tree_map(lambda x: other_values(x) if isinstance(x, torch.Tensor) else x, dict(problem.inputs))
    parameters = {name: other_values(x) for name, x in problem.parameters.items()}
    later = dataclasses.replace(problem, inputs=inputs, parameters=parameters, seed=problem.seed + 1)
    try:
        values = dataclasses.replace(calls, problem=later, changed=[]).values()
    except Exception as error:
        return [f"repeated: a later call on other values fails, {told(error)}"]

    def off(of: Problem, values: Mapping[str, torch.Tensor | None]) -> float:
        return max((_judge(of, n, values, recipe, 0, False).headroom for n in of.oracle.exact), default=0.0)

    if off(later, values) <= STALE * max(1.0, off(problem, first)):
        return []
    wrong = {n: j for n, j in _judged(later, values, recipe).items() if not j.agrees}
    return [
        f"repeated: {n} of a later call on other values has {j.headroom:.3g} times the allowed error"
        for n, j in wrong.items()
    ]


def _judged(
    problem: Problem, values: Mapping[str, torch.Tensor | None], recipe: Recipe, only: Collection[str] | None = None
) -> dict[str, Judgement]:
    """Every quantity: by its dtype's own precision first, which replicas only widen; then with as many as it takes."""
    exact = {n: x for n, x in problem.oracle.exact.items() if only is None or n in only}

    def judge_with(count: int, finer: bool, names: Collection[str] | None) -> dict[str, Judgement]:
        return {n: _judge(problem, n, values, recipe, count, finer) for n in exact if names is None or n in names}

    largest = max(x.numel() for x in (*exact.values(), *problem.tensors.values()))
    judged = escalate(judge_with, ladder(largest), finer=True, certain=CERTAIN)
    return {name: judged[name] for name in exact}


def _judge(
    problem: Problem, name: str, values: Mapping[str, torch.Tensor | None], recipe: Recipe, count: int, finer: bool
) -> Judgement:
    value, exact = values.get(name), problem.oracle.exact[name]
    if value is None:
        return failed("no gradient" if name.startswith("grad_") else f"missing; returned: {', '.join(values)}")
    if not exact.is_floating_point():
        return _judge_exact(problem, name, value, recipe, max(count, REPLICAS))
    if name.startswith("grad_"):
        dtype = problem.tensors[name.removeprefix("grad_")].dtype
    else:  # no coarser than the recipe says
        asked, came = DTYPES.get(recipe.output, value.dtype), value.dtype
        dtype = asked if came in NAMES and UNIT_ROUNDOFF[NAMES[came]] > UNIT_ROUNDOFF[NAMES[asked]] else came
    return judge(value, problem.oracle.unit(name, recipe, count, finer), dtype)


def _judge_exact(problem: Problem, name: str, value: torch.Tensor, recipe: Recipe, count: int) -> Judgement:
    """Integers and booleans: equal, wherever the replicas are."""
    exact = problem.oracle.exact[name]
    if value.shape != exact.shape:
        return failed(f"shape {tuple(value.shape)}, expected {tuple(exact.shape)}")
    value = value.to(exact.device)
    decided = (problem.oracle.replicas(recipe, count)[name] == exact).all(0)
    wrong = (value != exact) & decided
    if not bool(wrong.any()):
        return Judgement({"exact": 0.0}, undecided=int((~decided).sum()))
    index = tuple(int(i) for i in wrong.nonzero()[0])
    entry = (index, float(value[index]), float(exact[index]), float(value[index]) - float(exact[index]))
    return Judgement({"exact": float("inf")}, f"{int(wrong.sum())} of {wrong.numel()} entries differ", worst=(entry,))


def _explained(
    problem: Problem, values: Mapping[str, torch.Tensor | None], recipe: Recipe, quantities: Mapping[str, Judgement]
) -> str | None:
    """The recipe, of some coarser ones, under which everything agrees and which allows least; tf32 products come first."""
    wrong = [n for n, j in quantities.items() if not j.agrees]

    def judged(other: Recipe, names: Collection[str]) -> dict[str, Judgement]:
        return {n: _judge(problem, n, values, other, CONFIRMATION, False) for n in names}

    tf32 = dataclasses.replace(recipe, matmul="tf32", matmul_backward="tf32")
    if problem.dtype == "fp32" and all(j.agrees for j in judged(tf32, wrong).values()):
        return TF32_PRODUCTS
    agreeing = [n for n in quantities if n not in wrong]
    outputs = [v for n in problem.outputs if (v := values.get(n)) is not None]
    wide = not {*problem.outputs} & {*wrong} and all(v.dtype.itemsize >= 4 for v in outputs)
    narrow = problem.dtype != "fp32" and recipe.output == problem.dtype
    always = {"output": "input"} if narrow else {}
    casts = any(x.dtype == torch.float32 for x in problem.tensors.values())
    found = Explaining(recipe, problem.dtype, judged, wrong, agreeing, casts, wide, always).recipes()
    return found[0] if found else None


def _in_float32(function: Any, problem: Problem, wrong: Collection[str], explained: str | None) -> bool:
    """Whether what is wrong agrees on the same inputs in float32; for float32 inputs, whether tf32 explains it."""
    if problem.dtype == "fp32":
        return explained == TF32_PRODUCTS
    if function is None:
        return explained is not None
    wide = {n: x.detach().float() if is_floating(x) else x for n, x in problem.tensors.items()}
    arguments = call(lambda **given: given, problem.inputs, wide, ())
    parameters = {n: wide[n] for n in problem.parameters}
    precise = Problem(
        problem.definition, arguments, parameters, problem.leaves, problem.also, problem.cotangents, problem.seed
    )
    with contextlib.suppress(Exception):  # a kernel without float32: its dtype's own coarser precisions decide
        judged = _judged(precise, FunctionCalls(function, precise).values(), Recipe())
        return all(judged[n].agrees for n in wrong)
    return explained is not None


def _name(function: Any) -> str:
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name


def _described(problem: Problem) -> str:
    tensors = [f"{n} {tuple(x.shape)} {NAMES.get(x.dtype, str(x.dtype)[6:])}" for n, x in problem.tensors.items()]
    others = [f"{n}={x!r}" for n, x in problem.inputs.items() if isinstance(x, int | float | str | bool)]
    return ", ".join([*tensors, *others, f"seed={problem.seed}"])
