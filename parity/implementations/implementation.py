"""Implementations: references and candidates, each an adapter function beside the library that it calls.

Adding one is writing a function that takes `Inputs` and returns its outputs by name, under the decorator
`implementation`. Third-party libraries are imported inside the adapter, never at module level. An adapter maps names and
shapes; it never repairs what it wraps. Gradients are taken by the harness, from the leaves in `Inputs`.
"""

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.errors import Unsupported, UsageError
from parity.implementations.limits import Limit
from parity.judge import products
from parity.judge.recipe import IEEE_FP32, TF32_TRUNCATED, Recipe
from parity.process import NOT_INSTALLED, installed, packaged

Outputs = dict[str, torch.Tensor]
Adapter = Callable[[Inputs], Outputs]


class Named(dict[str, torch.Tensor]):
    """Outputs by name, and the names of what else a user's function returned, which nothing can judge."""

    unknown: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Implementation:
    id: str  # "library.function", as on the command line and in rows
    family: str  # name of the loss family
    role: str  # "reference" (the plain upstream code) or "candidate"
    call: Adapter  # the adapter
    # the precision it computes in, or a function of the inputs where that depends on them
    recipe: Recipe | Callable[[Inputs], Recipe] = IEEE_FP32
    library: str = ""  # distribution whose version the row carries, and what `pip install` would install
    outputs: frozenset[str] = frozenset()  # optional outputs that it offers
    contexts: frozenset[str] = frozenset({"plain"})  # call contexts that it is judged in
    dtypes: frozenset[str] = frozenset({"fp32", "fp16", "bf16"})  # dtypes that it claims
    limits: tuple[Limit, ...] = ()  # what it takes of its family's settings, a `Limit` each
    takes: frozenset[str] = frozenset()  # settings that few functions take (`Setting.few`), of those that it does
    # what the library itself refuses with an error, a `Limit` each: no draw shows it, frozen cases and audits do
    rejects: tuple[Limit, ...] = ()
    # the names that a user's function takes of its family's (`Family.parameters`); None: any
    parameters: frozenset[str] | None = None
    requires: frozenset[str] = frozenset()  # tensors without which a user's function is not called
    # choices of settings that a user's function is written for or has as defaults, where they are not the family's
    own_defaults: tuple[tuple[str, Any], ...] = ()
    # a context in which the harness takes both passes, where forward alone would not do
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    wide: bool = False  # whether autocast casts its inputs alone: products and gradients are as its recipe says
    interpreted: bool = False  # whether it is a Triton kernel, which runs in the interpreter where there is no GPU
    every: int = 1  # on the CPU, run it on one case in `every`, by a hash of the case's id: a cost, not a narrowing
    # settings that test what this implementation alone does: a drawn case that moves one is among its cases
    seeks: frozenset[str] = frozenset()
    sources: tuple[str, ...] = ()  # dotted names of the code it runs, for reports that cite file and line
    opt_in: bool = False  # leave it out of a run that does not name it
    user_class: type | None = None  # a user's trainer, which checks drive instead of the TRL class that it extends
    # id of the implementation whose known findings it inherits, where that does not agree on the same case
    extends: str = ""

    @property
    def is_function(self) -> bool:
        """Whether it is a user's own function, FILE.py:NAME, and no subclass of a trainer."""
        return ".py:" in self.id and not self.extends

    @property
    def is_trainer(self) -> bool:
        """Whether checks drive it: its call takes a case of one."""
        return self.family.endswith("-trainer")

    @property
    def declared(self) -> Hashable:
        """All that decides which cases it takes."""
        names = "library family dtypes contexts limits rejects takes parameters requires own_defaults interpreted"
        return tuple(getattr(self, name) for name in names.split())

    def lacks(self, family: Family, x: Inputs) -> str:
        """Why a user's function is not called on these inputs, by its parameters; empty where it is."""
        absent = set[str]() if self.parameters is None else family.needed(x) - self.parameters
        if absent:
            return f"no parameter {', '.join(sorted(absent))}"
        without = sorted(name for name in self.requires if x.tensors.get(name) is None)
        return f"{', '.join(without)} without default, and the case has none" if without else ""

    def recipe_for(self, inputs: Inputs) -> Recipe:
        """The recipe on these inputs, autocast and tf32 products included (a GPU's; CPUs have none)."""
        recipe = self.recipe if isinstance(self.recipe, Recipe) else self.recipe(inputs)
        on_gpu = inputs.device.type == "cuda"
        if on_gpu and recipe.log_sum is None and recipe.log_sum_exp in (None, "fp32"):  # torch.logsumexp is no kernel
            recipe = dataclasses.replace(recipe, log_sum="fp32")
        if on_gpu:
            found = products.products("cuda")
            narrow = inputs.product_dtype
            if inputs.context == "tf32":
                cut = TF32_TRUNCATED if self.is_function else found.tf32  # a user's may be torch's products or `tl.dot`
                recipe = dataclasses.replace(recipe, matmul=cut, matmul_backward=cut)
            if narrow in found.reduced:
                recipe = dataclasses.replace(recipe, reduction=narrow)
        if inputs.autocast:
            recipe = dataclasses.replace(recipe, inputs=inputs.autocast, teacher=None)
            if not self.wide:
                narrow = inputs.autocast
                recipe = dataclasses.replace(recipe, logits=narrow, dlogits=narrow, dinputs=None)
        return recipe.resolve(inputs.case.dtype)

    def version(self) -> str | None:
        return installed(self.library) if self.library else None

    def refuses(self, settings: Any, dtype: str, device: str, rejected: bool = False) -> str:
        """Why it does not take a case with these settings, by what it declares, or is `rejected`; empty where it takes it."""
        asked = SimpleNamespace(**vars(settings), dtype=dtype, device=device)
        limits = (*self.limits, *(self.rejects if rejected else ()))
        try:
            return next(filter(None, (limit(asked) for limit in limits)), "")
        except Unsupported as error:  # the release has not what the limit asks about
            return str(error)

    def missing(self) -> str | None:
        """Why it cannot run here, with the remedy; None where it can."""
        if self.library and self.version() is None:
            return f"{self.library}{NOT_INSTALLED}{self.library}"
        if self.interpreted and installed("triton") is None:
            return f"triton{NOT_INSTALLED}triton (Linux only)"
        return None


def origin(distribution: str) -> str | None:
    """The file that a library's package is imported from, where that is not in site-packages: a checkout, an editable
    install, a folder on the path."""
    name = distribution.replace("-", "_")
    module = sys.modules.get(name)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    found = str(getattr(module, "__file__", None) or getattr(spec, "origin", None) or "")
    return found if found and packaged(found) is None else None


REGISTRY: dict[str, Implementation] = {}
EVERY_CONTEXT = frozenset({"plain", "autocast", "checkpoint", "compile"})
KERNEL: dict[str, Any] = {"contexts": frozenset({"plain", "checkpoint"}), "interpreted": True, "every": 4}
"""Fields of a Triton kernel."""


def implementation(id: str, **fields: Any) -> Callable[[Adapter], Adapter]:
    """Register an adapter function as `Implementation(id, …)`, a candidate unless told otherwise; see its attributes.
    Raises UsageError when another function already has this id."""

    def register(call: Adapter) -> Adapter:
        known = REGISTRY.get(id)
        if known is not None and known.call.__module__ != call.__module__:
            raise UsageError(f"implementation {id!r} is registered by {known.call.__module__} and {call.__module__}")
        REGISTRY[id] = Implementation(id=id, call=call, **{"role": "candidate"} | fields)
        return call

    return register


def by_token(value: Any, x: Inputs) -> Any:
    """(B·T,) as (B, T). Whatever has another shape or type is left as it came: the structure gate names it."""
    rows, width = x.ids.shape
    flat = isinstance(value, torch.Tensor) and tuple(value.shape) == (rows * width,)
    return value.view(rows, width) if flat else value
