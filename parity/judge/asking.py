"""What `assert_parity` is asked, checked: a `Problem` and a recipe, or a `ValueError` that says what to give."""

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parity.judge.operations import is_floating
from parity.judge.oracle import gradient_name
from parity.judge.problem import UPSTREAM, Problem, in_order, named, same, upstream
from parity.judge.recipe import DTYPES, Recipe


def posed(
    function: Any,
    definition: Any,
    inputs: Mapping[str, Any],
    actual: Mapping[str, torch.Tensor] | None = None,
    grad: Collection[str] | None = None,
    also: Sequence[Any] = (),
    cotangent: torch.Tensor | Mapping[str, torch.Tensor] | str | None = None,
    seed: int = 0,
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
    floating = [name for name, x in tensors.items() if is_floating(x)]
    for name, x in tensors.items():
        if x.is_complex():
            raise ValueError(f"{name} is {x.dtype}: give its real and imaginary part")
        if name in floating and x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{name} is {x.dtype}: float32, float16 and bfloat16 are judged, against float64")
    if grad is None:
        grad = floating if actual is None else [n for n in floating if gradient_name(n) in actual]
    grad = names_of("grad", grad, floating)
    odd = [n for n in actual or () if n.startswith("grad_") and n.removeprefix("grad_") not in floating]
    if odd:
        raise ValueError(f"actual={odd[0]!r}: the floating-point inputs are {', '.join(floating)}")
    given = {"output": cotangent} if isinstance(cotangent, torch.Tensor) else dict(cotangent or {})
    if actual is not None and grad and not given:
        raise ValueError("gradients in actual={…} are judged with the upstream gradient that made them: cotangent=…")
    for f in (function, definition):
        _check_call(f, inputs, () if isinstance(f, torch.nn.Module) else parameters)
    leaves = tuple(n for n in floating if n in grad)
    others = (*also, *_forms(definition))
    problem = Problem(definition, inputs, parameters, leaves, others, given, seed, attention=True)
    if not problem.outputs:
        raise ValueError("the definition returns no tensor: return one, or a list, tuple or dictionary of tensors")
    outputs = [n for n, x in problem.outputs.items() if x.is_floating_point()]
    if kind != "random":
        made = {n: upstream(kind, n, problem.outputs[n], seed, problem.dtype) for n in outputs}
        problem = dataclasses.replace(problem, given=made)
    if set(given) - set(outputs):
        raise ValueError(f"cotangent of {sorted(set(given) - set(outputs))}: the outputs are {', '.join(outputs)}")
    for name, g in given.items():
        if g.shape != (shape := problem.outputs[name].shape):
            raise ValueError(f"cotangent of {name} has shape {tuple(g.shape)}: give {tuple(shape)}, that of the output")
    if odd := [n for n, x in problem.outputs.items() if not same(x, problem.oracle.exact[n])]:
        raise ValueError(f"the definition is random: {odd[0]} differs between runs; give the random numbers as inputs")
    return problem


def _forms(definition: Any) -> tuple[Any, ...]:
    """The other correct forms that a definition has as its own, with the arguments of a partial."""
    if isinstance(definition, functools.partial):
        own = _forms(definition.func)
        return tuple(functools.partial(form, *definition.args, **definition.keywords) for form in own)
    return tuple(getattr(definition, "also", ()))


def resolved(recipe: Recipe | None, problem: Problem) -> Recipe:
    if not isinstance(recipe, Recipe | None):
        raise ValueError(f"recipe={recipe!r}: give EAGER, or Recipe(…)")
    found = (recipe or Recipe(output="input")).resolve(problem.dtype)
    formulas = {"matmul", "matmul_backward", "tanh", "entropy"}
    for field, value in dataclasses.asdict(found).items():
        if isinstance(value, str) and field not in formulas and value not in (*DTYPES, "any"):
            raise ValueError(f"Recipe({field}={value!r}): give input, {', '.join(DTYPES)}")
    return found


def _check_types(inputs: Any, actual: Any, cotangent: Any) -> None:
    for argument, given in (("inputs", inputs), ("actual", actual), ("cotangent", cotangent)):
        if given is None or (argument == "cotangent" and isinstance(given, torch.Tensor)):
            continue
        if not isinstance(given, Mapping):
            raise ValueError(f"{argument} is a {type(given).__name__}: give a dictionary, name -> tensor")
        if odd := [name for name in given if not isinstance(name, str) or not name]:
            raise ValueError(f"{argument} has the key {odd[0]!r}: give the name of an argument")
        for name, value in given.items():
            if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
                raise ValueError(f"{argument}: {name} is a {type(value).__name__}: give torch.as_tensor({name})")
            if argument != "inputs" and not isinstance(value, torch.Tensor | None):
                raise ValueError(f"{argument}: {name} is a {type(value).__name__}: give a tensor")


def _check_call(function: Any, inputs: Mapping[str, Any], parameters: Collection[str]) -> None:
    """A function has an argument for each input, as far as its signature is known."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # no function, or one of C
        return
    try:
        ordered = in_order(function, inputs)
        signature.bind(*(inputs if ordered else ()), **dict.fromkeys((*(() if ordered else inputs), *parameters)))
    except TypeError as error:
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        raise ValueError(
            f"{name} is called with the inputs by name, or in order if it has none of the names, and has {error}: "
            "wrap it in a lambda, a module in a module"
        ) from error


def names_of(argument: str, names: Collection[str], tensors: Collection[str], trees: Collection[str] = ()) -> set[str]:
    """Names of tensors, or of trees of them, that exist; a string is one name."""
    found = {names} if isinstance(names, str) else set(names)
    if found - set(tensors) - set(trees):
        unknown = ", ".join(sorted(found - set(tensors) - set(trees)))
        kind = "floating-point inputs" if argument == "grad" else "inputs"
        raise ValueError(f"{argument}={unknown!r}: the {kind} are {', '.join(tensors)}")
    return found
