"""Any definition as an `Oracle`: plain torch on a tree of tensors, or a module; `torch.vmap` stacks its replicas."""

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from parity.judge.attention import WeightsAgain
from parity.judge.monte_carlo import MonteCarlo
from parity.judge.operations import AnyOperation, Largest, OwnConstants, as_definition, is_floating
from parity.judge.oracle import LARGEST_STACK, LARGEST_WITHIN, Oracle, Quantities, doubled, stacked, with_gradients
from parity.judge.recipe import DTYPES, NAMES, UNIT_ROUNDOFF, Recipe
from parity.judge.stages import of_dtype

Definition = Callable[..., Any]
Form = Callable[[Mapping[str, torch.Tensor]], Quantities]
"""Tensors by name -> outputs."""


def named(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors of a tree by name: "loss" under the key of a dictionary, "output" alone, "output[0]" in a tuple."""
    out: dict[str, torch.Tensor] = {}
    if dataclasses.is_dataclass(tree):
        tree = vars(tree)
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, torch.Tensor):
            continue
        keys = [str(k.key) if hasattr(k, "key") else f"[{getattr(k, 'idx', getattr(k, 'name', k))}]" for k in path]
        name = ""
        for key in keys:
            name += key if key.startswith("[") else f".{key}" if name else key
        out[name if keys and not name.startswith("[") else f"output{name}"] = leaf
    return out


def cotangent(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """A random upstream gradient in ±4 in steps of 2⁻⁶, which every dtype holds exactly; a scalar's is at least a half."""
    generator = torch.Generator().manual_seed(seed * 1009 + sum(map(ord, name)))
    g = (torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu") * 64).round().clamp(
        -255, 255
    ) / 64
    return (g if like.dim() else torch.where(g < 0, -1.0, 1.0) * g.abs().clamp(min=0.5)).to(like.device)


UPSTREAM = ("random", "fine", "ones", "zeros", "scaled")
SCALED, SCALED_FP16 = 65536.0, 1024.0
"""Loss scales; beyond the second random gradients overflow float16 at once."""


def upstream(kind: str, name: str, like: torch.Tensor, seed: int, dtype: str) -> torch.Tensor:
    """An upstream gradient of one of the kinds in `UPSTREAM`: ones and zeros are expanded, as `.sum().backward()` sends them;
    fine ones have all bits of the dtype, so that no sum of a few is exact, and are 0 in every third row, as behind a mask."""
    if kind in ("ones", "zeros"):
        return torch.full((), float(kind == "ones"), device=like.device).expand(like.shape)
    random = cotangent(name, like, seed)
    if kind == "fine":
        if like.dim():
            random[1::3] = 0.0
        return (random * math.pi).to(DTYPES[dtype]).double()
    return random * (1 if kind == "random" else SCALED_FP16 if dtype == "fp16" else SCALED)


def same(
    a: torch.Tensor, b: torch.Tensor, rtol: float = UNIT_ROUNDOFF["fp32"], atol: float = UNIT_ROUNDOFF["fp32"]
) -> bool:
    """Whether two runs in float64 differ by less than float32 can tell, as sums in another order do; `atol` is a share of the
    largest entry."""
    a, b = a.detach().double(), b.detach().double()
    top = float(a.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol, atol * top, equal_nan=True)


def _moved(found: Quantities, exact: Quantities) -> bool:
    """Whether an entry is off by more than float32 can tell, and none by half of float32's digits, as beyond a jump."""
    u = UNIT_ROUNDOFF["fp32"]
    floating = [(found[n], x) for n, x in exact.items() if x.is_floating_point() and x.numel()]
    near = all(
        torch.allclose(a, x, 0.0, u**0.5 * float(x.abs().nan_to_num(0.0, 0.0, 0.0).amax()), True) for a, x in floating
    )
    return near and not all(torch.allclose(a, x, u, 0.0, True) for a, x in floating)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A definition, the inputs that it and a function are given, and which gradients are judged."""

    definition: Definition  # plain torch, or a module whose parameters have the names of `parameters`
    inputs: Mapping[str, Any]  # name -> tensor, number, or a tree of them
    # name -> tensor: those of the module that is judged; a definition that is a function takes them by name
    parameters: Mapping[str, torch.Tensor]
    leaves: tuple[str, ...]  # names of the tensors whose gradients are judged
    also: tuple[Definition, ...] = ()  # other correct forms of the definition, which have their share of the replicas
    # output -> upstream gradient; missing ones are random
    given: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    seed: int = 0  # of upstream gradients and replicas
    rounding: type[MonteCarlo] = AnyOperation  # the arithmetic of a replica
    within: int | None = None  # entries of the largest tensor between inputs and outputs; None: a run tells
    attention: bool = False  # whether attention's weights may be made again in a backward pass
    _routed: list[Form] = dataclasses.field(default_factory=list, repr=False)
    """Forms whose path depends on values (a router that sends tokens to experts), or that have no batched form."""

    @property
    def at_once(self) -> bool:
        """Whether many replicas are one run of `torch.vmap`, as far as is known by now; else they cost a run each."""
        return not self._routed

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Inputs and parameters by name."""
        return {**named(dict(self.inputs)), **self.parameters}

    @functools.cached_property
    def dtype(self) -> str:
        """The coarsest dtype among the inputs, at most fp32: that of the recipe's "input"."""
        found = [NAMES[x.dtype] for x in self.tensors.values() if is_floating(x)]
        return max(("fp32", *found), key=lambda name: UNIT_ROUNDOFF[name])

    @functools.cached_property
    def _exact(self) -> tuple[Quantities, dict[str, torch.Tensor]]:
        """Outputs and gradients in float64, and the upstream gradients of the outputs."""
        with as_definition(DTYPES[self.dtype]), torch.enable_grad(), _said():
            leaves = self._double(None)
            outputs = self._form(self.definition)(leaves)
        upstream = self.upstream_of(outputs)
        with as_definition(DTYPES[self.dtype]), _said():
            return self._with_gradients(leaves, outputs, upstream), upstream

    def upstream_of(self, outputs: Quantities) -> dict[str, torch.Tensor]:
        """Upstream gradients of outputs, by name."""
        return {
            name: self.given[name].double() if name in self.given else cotangent(name, value, self.seed)
            for name, value in outputs.items()
            if value.is_floating_point()
        }

    @property
    def exact(self) -> Quantities:
        """Outputs and gradients in float64."""
        return self._exact[0]

    @property
    def cotangents(self) -> dict[str, torch.Tensor]:
        """Those of the exact run."""
        return self._exact[1]

    @functools.cached_property
    def _forward(self) -> tuple[Quantities, int]:
        """Outputs of a run of its own, without gradients, and the entries of its largest tensor."""
        with torch.no_grad(), as_definition(DTYPES[self.dtype]), _said(), Largest() as largest:
            outputs = self._form(self.definition)(self._double(None))
        return outputs, largest.entries

    @property
    def outputs(self) -> Quantities:
        """Those of a run of its own, without gradients."""
        return self._forward[0]

    @functools.cached_property
    def oracle(self) -> Oracle:
        """Exact values, replicas and units of outputs and gradients."""
        size = max((x.numel() for x in self.tensors.values()), default=0)
        within = self._forward[1] if self.within is None else self.within
        drawing = dataclasses.replace(
            self, within=within
        )  # without an oracle: replicas would stay until Python collects cycles
        vars(drawing)["_exact"] = self._exact
        return Oracle(self._exact[0], drawing._replicas, drawing._kind, self.seed, size)

    @functools.cached_property
    def _forms(self) -> tuple[Form, ...]:
        """The definition and its other forms; where attention is in it, also the one that makes the weights again; each once
        more with its numbers in float32 where that is seen."""
        given: list[dict[str, Any]] = [{"definition": f} for f in (self.definition, *self.also)]
        exact, again = self._exact[0], WeightsAgain()
        if self.attention:
            found = self._of_form(self._form(self.definition, again))
            if again.found and all(same(found[n], x) for n, x in exact.items() if bool(x.any())):  # 0 may cancel
                given.append({"definition": self.definition, "within": again})
        # 1 - float32(0.999) is off by 1.3e-5 of 0.001
        numbers = tree_map(lambda x: ctypes.c_float(x).value if type(x) is float else x, dict(self.inputs))
        if numbers != dict(self.inputs):
            with contextlib.suppress(Exception):  # it may look a number up
                if _moved(self._of_form(self._form(self.definition, inputs=numbers)), exact):
                    given = [how for form in given for how in (form, form | {"inputs": numbers})]
        return tuple(self._form(**how) for how in given)

    def _form(
        self,
        definition: Definition,
        within: contextlib.AbstractContextManager[Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Form:
        """A definition, within a mode, on other `inputs`. It keeps no problem: see `oracle`."""
        given, parameters, mode = inputs or self.inputs, self.parameters, within or contextlib.nullcontext()

        def form(tensors: Mapping[str, torch.Tensor]) -> Quantities:
            with mode:
                return named(call(definition, given, tensors, parameters))

        return form

    def _of_form(self, form: Form) -> Quantities:
        with as_definition(DTYPES[self.dtype]), torch.enable_grad(), _said():
            leaves = self._double(None)
            return self._with_gradients(leaves, form(leaves), self.cotangents)

    def _kind(self, name: str, found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        value, gradient = found[name][0], name.startswith("grad_")
        return {"scalar": value.dim() == 0 and not gradient, "entrywise": not gradient or value.dim() == 1}

    def _double(self, stack: int | None) -> dict[str, torch.Tensor]:
        """Fresh tensors in float64, `stack` of them in front."""
        return {  # what a definition overwrites is its own
            name: of_dtype(doubled(x, name in self.leaves, stack), x.dtype) if is_floating(x) else x.clone()
            for name, x in self.tensors.items()
        }

    def _with_gradients(
        self, x: Mapping[str, torch.Tensor], outputs: Quantities, upstream: Mapping[str, torch.Tensor]
    ) -> Quantities:
        return with_gradients(outputs, {n: x[n] for n in self.leaves}, upstream if self.leaves else {})

    def _replicas(
        self, recipe: Recipe, numbers: range, seed: int, gradients: bool, own_grids: int, keep: Collection[str] | None
    ) -> Quantities:
        sizes = [x.numel() for x in (*self.tensors.values(), *self._exact[0].values())]
        width = min(LARGEST_STACK // max(1, *sizes), LARGEST_WITHIN // max(1, self.within or 0))
        parts: list[Quantities] = []
        for i, form in enumerate(forms := self._forms):
            own = numbers[len(numbers) * i // len(forms) : len(numbers) * (i + 1) // len(forms)]
            ahead = own.start - numbers.start  # each form begins with those on own grids

            def stack(width: int, first: int, form: Form = form, ahead: int = ahead) -> Quantities:
                return self._stack(form, recipe, width, seed * 1009 + first, own_grids - first + ahead)

            parts += [stacked(own, width, stack, keep)] if own else []
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _stack(self, form: Form, recipe: Recipe, width: int, seed: int, own_grids: int) -> Quantities:
        """One run of `torch.vmap`, or one run a replica where that cannot be."""
        if form not in self._routed:
            try:
                return self._together(form, recipe, width, seed, own_grids)
            except NotImplementedError:
                raise
            except RuntimeError:  # an error of the definition itself shows again below
                self._routed.append(form)
        each = [self._together(form, recipe, None, seed + i, own_grids - i) for i in range(width)]
        return {name: torch.cat([one[name] for one in each]) for name in each[0]}

    def _together(self, form: Form, recipe: Recipe, width: int | None, seed: int, own_grids: int) -> Quantities:
        """So many replicas in one run of `torch.vmap`, or one without it (None)."""
        mode = self.rounding(recipe, self.dtype, seed, own_grids, width)
        x = self._double(width)
        floats = [name for name, t in x.items() if is_floating(t)]
        keys: list[str] = []
        constants = OwnConstants(width or 1)

        def one(each: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            constants.each = each
            try:
                own = {n: of_dtype(t, self.tensors[n].dtype) for n, t in zip(floats, tensors, strict=True)}
                outputs = form({**x, **own})
            finally:
                constants.each = None
            keys[:] = outputs
            return tuple(outputs.values())

        with as_definition(DTYPES[self.dtype]), torch.enable_grad():
            returned: set[int] = set()

            def read_again(saved: torch.Tensor) -> torch.Tensor:
                return mode.saved_output(saved) if saved.data_ptr() in returned and is_floating(saved) else saved

            hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, read_again)
            with constants, mode, hooks:
                run = one if width is None else torch.vmap(one, randomness="different")
                values = run(None if width is None else constants.every, *(x[n] for n in floats))
                mode.backward = True
                returned.update(value.data_ptr() for value in values)
                found = self._with_gradients(x, dict(zip(keys, values, strict=True)), self.cotangents)
        return {name: value.unsqueeze(0) for name, value in found.items()} if width is None else found


def call(
    function: Any, inputs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], parameters: Collection[str]
) -> Any:
    """A function, or a module, on `inputs` with its tensors exchanged for those of the same name in `tensors`."""
    flat, spec = tree_flatten(dict(inputs))
    names = iter(named(dict(inputs)))
    filled = [tensors[next(names)] if isinstance(x, torch.Tensor) else x for x in flat]
    arguments = tree_unflatten(filled, spec)
    state = {name: tensors[name] for name in parameters}
    if isinstance(function, torch.nn.Module):
        exact = any(is_floating(x) and x.dtype == torch.float64 for x in tensors.values())
        wide = lambda b: of_dtype(b.double().clone(), b.dtype) if exact and is_floating(b) else b.clone()  # noqa: E731
        buffers = {n: wide(b) for n, b in function.named_buffers()}
        given = (tuple(arguments.values()), {}) if in_order(function, arguments) else ((), arguments)
        return torch.func.functional_call(function, buffers | state, *given)
    return function(*arguments.values(), **state) if in_order(function, arguments) else function(**arguments, **state)


def in_order(function: Any, names: Collection[str]) -> bool:
    """Whether a function, or a module, has none of the names and so takes its arguments in their order."""
    try:
        known = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).parameters
    except (TypeError, ValueError):  # one of C
        return False
    return not set(names) & set(known) and all(p.kind is not p.VAR_KEYWORD for p in known.values())


def memory(x: torch.Tensor) -> torch.Tensor:
    """What x covers of its storage, gaps included, as a vector."""
    if x.layout != torch.strided or not x.numel():
        return x
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,))


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of x, also where they leave gaps or repeat entries, and with as uneven a storage offset.

    In front of a floating tensor that does not begin its storage there is NaN. Autograd knows it as no view: those no
    `torch.autograd.Function` of several results may overwrite.
    """
    x = x.detach()
    if x.layout != torch.strided or not x.numel():
        return x.clone()
    front = (x.storage_offset() - 1) % 64 + 1 if x.storage_offset() else 0
    covered = memory(x)
    out = x.new_full((front + len(covered),), torch.nan if x.is_floating_point() else 0)
    out[front:] = covered
    return out.as_strided(x.shape, x.stride(), front).detach()


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """What torch refuses of a definition in float64, with the usual causes."""
    try:
        yield
    except NotImplementedError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"the definition fails on float64 inputs ({error}). Usual causes: it overwrites one of them, cannot take one "
            "without rows, or writes into a float32 constant and not into its cast, as in table.to(x.dtype)"
        ) from error
