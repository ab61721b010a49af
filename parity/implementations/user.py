"""A user's own function or trainer from a file, FILE.py:NAME.

A function, a module or another callable is called by the names of its parameters: it takes what it needs of a family's
tensors and settings, by name; a case that moves anything it has no parameter for is unsupported, and so is one without a
tensor that it has no default for and its family's first case has. Any keyword (`**`) is not what few functions take
(`Setting.few`): new ones would make it wrong. It may carry attributes `recipe` (a `parity.judge.recipe.Recipe`), `outputs`
(optional outputs it returns), `contexts` and `fixed` (settings that it is written for and has no parameter of).

A subclass of one of TRL's trainers goes through the checks of that trainer, see `parity.trainers.catalogue`.
"""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.errors import Returned, UsageError
from parity.families import head, policy_inputs
from parity.implementations import plain
from parity.implementations.implementation import Implementation, Named, Outputs
from parity.implementations.limits import only, require
from parity.judge.recipe import Recipe

ALIASES = dict.fromkeys(("input_ids", "targets", "labels"), "ids")
ALIASES |= {"hidden_states": "hidden", "lm_head_weight": "weight", "final_logit_softcapping": "softcap"}
ALIASES |= {f"{name}_per_token_logps": f"{name}_logps" for name in ("old", "ref", "sampling")}
ALIASES |= {"epsilon_low": "epsilon", "label_smoothing": "smoothing", "lse_square_scale": "z_loss"}
"""Other spellings of a parameter, TRL's and transformers' among them."""
REQUIRED = {
    "logprobs": head.REQUIRED,
    "policy": policy_inputs.REQUIRED,
    "divergence": ("hidden", "weight", "beta", "teacher"),
    "preference": (*head.REQUIRED, "beta"),
}
"""Parameters by which a function is recognised as of a family, a teacher's of any kind; elsewhere what the default case needs."""

Importing = Callable[[str], AbstractContextManager[None]]
DEFAULT_RECIPE = Recipe(output="any")

MODULE = "parity_user_"
"""With this the name of a user's file begins, as a module."""


def recipe_of(function: Callable[..., Any]) -> Callable[[Inputs], Recipe]:
    """What a function declares, float32 if nothing; autocast's dtype in what it makes of its logits. Every operation of plain
    torch that follows an autocast product rounds to it, logsumexp too, and on the CPU log_softmax."""
    declared = getattr(function, "recipe", DEFAULT_RECIPE)
    if not (isinstance(declared, Recipe) or callable(declared)):
        label = getattr(function, "__name__", "the function")
        raise UsageError(f"{label}.recipe is {declared!r}, expected a Recipe, such as Recipe(logits='bf16')")

    def recipe(x: Inputs) -> Recipe:
        found: Recipe = declared(x) if callable(declared) else declared
        if x.autocast is None:
            return found
        softmax = found.softmax if x.device.type == "cuda" else plain.autocast_softmax(x)
        return dataclasses.replace(found, elementwise=x.autocast, softmax=softmax, log_sum_exp=x.autocast)

    return recipe


def loaded(spec: str, importing: Importing) -> Any:
    """What FILE.py:NAME names: a callable, an `Implementation` or a `Family`. The file is executed once, within
    `importing`. Raises UsageError when there is no such file or name, or the file does not import."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"implementation {spec!r}: {path} is not a file")
    try:
        module = _module(file, importing)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise UsageError(f"implementation {spec!r}: importing {path} calls sys.exit({error.code!r})") from error
    except BaseException as error:
        raise UsageError(f"implementation {spec!r}: importing {path} fails: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, Implementation | Family) and not callable(found):
        defined = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
        found = [n for n, v in defined.items() if inspect.isfunction(v) or inspect.isclass(v)]
        public = [n for n in found if not n.startswith("_")]
        what = f"{name!r} in {path} is not callable" if hasattr(module, name) else f"no {name!r} in {path}"
        raise UsageError(f"implementation {spec!r}: {what}; functions and classes there: {', '.join(public) or 'none'}")
    return found


@functools.cache
def _module(file: Path, importing: Importing) -> ModuleType:
    for folder in (str(file.parent), str(Path.cwd())):  # its neighbours are found, behind what is installed
        if folder not in sys.path:
            sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(MODULE + file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with importing(str(file)):
        spec.loader.exec_module(module)
    return module


def path_id(spec: str) -> str:
    path, _, name = spec.rpartition(":")
    file, here = Path(path).resolve(), Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{name}"


def canonical(names: Collection[str]) -> dict[str, str]:
    """Parameter -> the families' name of it; `labels` beside `ids` are KTO's, and `completion_mask` is the mask unless
    `tool_mask` is beside it."""
    aliases = ALIASES if "tool_mask" in names else ALIASES | {"completion_mask": "mask"}
    return {n: n if aliases.get(n) in names else aliases.get(n, n) for n in names}


def _given(names: Collection[str]) -> set[str]:
    """What a function with these parameters gets, by the families' names: two masks are their product."""
    return {*canonical(names).values()} | ({"mask"} if {"completion_mask", "tool_mask"} <= {*names} else set())


def family_of(signature: inspect.Signature, id: str, families: Iterable[Family], fixed: Collection[str] = ()) -> Family:
    """The family that the names of parameters, and of settings that are `fixed`, fit, that which needs most of them. Raises
    UsageError where they fit none."""
    names = {n for n, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    known = {f.name: (f, REQUIRED.get(f.name) or sorted(f.needed(f.build(f.case(0, "fp32", {}))))) for f in families}
    found = _given(names)
    taught = any(n.startswith(("teacher_", "support_")) for n in found)
    found |= {*fixed} if taught or "method" in fixed else set()  # else a number says nothing of the family
    found |= {"teacher"} if taught else set()
    fits = [(f, required) for f, required in known.values() if {*required} <= found]
    if not fits:
        wanted = _listed({name: required for name, (_, required) in known.items()})
        why = f"its parameters {', '.join(sorted(names))} fit no family" if names else "its parameters have no names"
        raise UsageError(
            f"implementation {id!r}: {why} ({wanted}). A function of logits can be wrapped: "
            "def logps(hidden, weight, ids): return yours(hidden @ weight.T, ids)"
        )
    return max(fits, key=lambda fit: len(fit[1]))[0]


def _listed(required: Mapping[str, Iterable[str]]) -> str:
    """Families with the parameters that each needs."""
    return "; ".join(f"{name}: {', '.join(names)}" for name, names in required.items())


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Its parameters; those of a module are its forward's, compiled or not."""
    function = getattr(function, "_orig_mod", function)
    return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)


def _fixed(function: Callable[..., Any], names: set[str], family: Family, id: str) -> dict[str, Any]:
    """Settings that a function is written for: those it declares, and the method of a preference loss without such a
    parameter. Raises UsageError where nothing says the method, or the family has no such setting."""
    fixed, own = dict(getattr(function, "fixed", {})), {*canonical(names).values()}
    if unknown := sorted(fixed.keys() - family.settings.keys()):
        why = f"fixed names {', '.join(unknown)}, no setting of {family.name}, which its parameters are of"
        raise UsageError(f"implementation {id!r}: {why} (a family is told by parameters: {_listed(REQUIRED)})")
    if family.name == "preference" and "method" not in own | fixed.keys():
        if not own & {"labels", "ref_hidden"}:
            raise UsageError(
                f"implementation {id!r}: a preference loss without ref_hidden and labels is CPO's or ORPO's: say which, "
                "yours.fixed = {'method': 'cpo'} (or 'orpo'). A distillation loss has teacher_hidden or teacher_logits"
            )
        fixed["method"] = "kto" if "labels" in own else "dpo"
    if fixed.get("method") == "kto" and "loss_type" not in own:
        fixed.setdefault("loss_type", "kto")
    return fixed


def from_function(function: Callable[..., Any], id: str, families: Iterable[Family]) -> Implementation:
    """Wrap a function as a candidate of the family that its parameter names fit."""
    signature = _signature(function)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = {n for n, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    chosen, code = family_of(signature, id, families, getattr(function, "fixed", ())), function
    fixed = _fixed(function, names, chosen, id)

    own = {theirs: n for n, theirs in canonical(names).items()}
    needed = {n for n, p in signature.parameters.items() if p.default is p.empty}
    label, declared = getattr(function, "__name__", "the function"), getattr(function, "outputs", ())

    def fits(s: Any) -> bool:
        return all(getattr(s, name) == value for name, value in fixed.items())

    def call(x: Inputs) -> Outputs:
        offered = copy.deepcopy(vars(x.settings)) | dict(x.tensors)
        lacks = made.lacks(chosen, x)
        require(not lacks, f"{label} has {lacks}")
        kwargs = {own[n]: v for n, v in offered.items() if n in own and (v is not None or own[n] in needed)}
        unknown = {n for theirs, n in own.items() if theirs not in offered and n in needed}
        require(not unknown, f"{label} wants {', '.join(sorted(unknown))}, which family {chosen.name} does not have")
        if open_ended:
            kwargs |= {n: v for n, v in offered.items() if n not in own}
        return named_outputs(function(**kwargs), chosen, declared)

    while isinstance(code, functools.partial):
        code = code.func
    named = code if hasattr(code, "__qualname__") else type(code)
    narrowed = (plain.TWO_DTYPES,) if chosen.name == "divergence" else ()
    takes = frozenset({*_given(names), *fixed})
    chosen_by_default = _choices(chosen, {theirs: signature.parameters[n].default for theirs, n in own.items()}) | fixed
    made = Implementation(
        id=id,
        family=chosen.name,
        role="candidate",
        call=call,
        recipe=recipe_of(function),
        outputs=frozenset(declared),
        contexts=frozenset(getattr(function, "contexts", ("plain", "autocast", "checkpoint", "compile"))),
        takes=takes,
        parameters=None if open_ended else takes,
        requires=_required(chosen, fixed, {theirs for theirs, n in own.items() if n in needed}),
        own_defaults=tuple(chosen_by_default.items()),
        limits=(only(f"written for {', '.join(f'{n} {v}' for n, v in fixed.items())}", fits), *narrowed),
        sources=(f"{named.__module__}.{named.__qualname__}",),
    )
    return made


def _required(family: Family, fixed: Mapping[str, Any], needed: set[str]) -> frozenset[str]:
    """The tensors that a function has no default for and that its first case has: another may be without them."""
    first, _ = family.settled(0, "fp32", fixed)
    tensors = family.build(first).tensors
    return frozenset(name for name in needed if tensors.get(name) is not None)


def _choices(family: Family, of: Mapping[str, Any]) -> dict[str, Any]:
    """Of a function's defaults those that are another choice of a setting than the family's default."""
    found = {n: (family.settings[n], v) for n, v in of.items() if n in family.settings}
    return {n: v for n, (s, v) in found.items() if isinstance(v, str) and v in (s.choices or ()) and v != s.default}


def named_outputs(result: Any, fam: Family, declared: Iterable[str] = ()) -> Named:
    """A tensor is the first output; a mapping, alone or in a tuple, names its outputs, numbers among them.

    A bare tensor behind the first is the next output where that is declared or the only optional one; else nothing says
    what it is. Names that are no output of the family are kept in `unknown`. Raises Returned where the first output is not
    there, or no tensor.
    """
    parts = list(result) if isinstance(result, tuple | list) else [result]
    first = torch.Tensor | Mapping if len(parts) == 1 else torch.Tensor
    if not parts or not isinstance(parts[0], first):
        expected = "a tensor, a tuple that begins with one, or a dict of outputs"
        raise Returned(f"returned {type(result).__name__}, expected {expected}")
    out, unknown = Named(), list[str]()
    certain, in_order = len(fam.optional) == 1, list(fam.outputs)
    for place, part in enumerate(parts):
        next_name = in_order[place] if place < len(in_order) else ""
        if isinstance(part, Mapping):
            for name, value in part.items():
                if name in fam.outputs and isinstance(value, torch.Tensor | float | int):
                    out[name] = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                else:
                    unknown.append(str(name))
        elif isinstance(part, torch.Tensor) and (place == 0 or certain or next_name in declared) and next_name:
            out[next_name] = part
        elif part is not None:
            unknown.append(f"value {place + 1}")
    if fam.first not in out:
        raise Returned(f"returned {', '.join(map(str, out)) or 'a dict'} without {fam.first}")
    out.unknown = tuple(unknown)
    return out
