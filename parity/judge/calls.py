"""A function on the tensors of a problem, called once for its values and several times for its protocol."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint

from parity.judge import protocol
from parity.judge.operations import is_floating
from parity.judge.oracle import gradient_name
from parity.judge.problem import Problem, call, laid_out, memory, named
from parity.judge.protocol import Values, same_bits

Tensors = dict[str, torch.Tensor]
DEFAULT = ("inputs", "bits", "accumulation", "interleaved", "repeated", "no_grad")
ALL = (
    *DEFAULT,
    "output dtypes",
    "nan",
    "default dtype",
    "checkpoint",
    "reentrant checkpoint",
    "compile",
)
NEED_GRADIENTS = ("accumulation", "interleaved", "nan", "checkpoint", "reentrant checkpoint")
REFUSALS = (RuntimeError, ValueError, AssertionError)
CRASHES = (RecursionError, torch.OutOfMemoryError, torch.AcceleratorError)
FORWARDS = 3
"""Other forwards before a backward."""


def parts(asked: str | Collection[str]) -> tuple[str, ...]:
    """Which parts of the protocol are asked for: "default", "all", "none", or names of parts."""
    words = {"default": DEFAULT, "all": ALL, "none": ()}
    names = words.get(asked, (asked,)) if isinstance(asked, str) else tuple(asked)
    if unknown := [name for name in names if name not in ALL]:
        raise ValueError(f"protocol={unknown[0]!r}: give {', '.join(words)}, or some of {', '.join(ALL)}")
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class FunctionCalls(protocol.Calls[Tensors]):
    """Calls of a function."""

    function: Any  # a function or a module
    problem: Problem  # its definition, inputs and upstream gradients
    # inputs that it may overwrite, and with "grad_" outputs whose upstream gradient it may
    in_place: Collection[str] = ()
    # (name, value, under the problem's own values) -> whether the value agrees with the definition
    agrees: Callable[[str, torch.Tensor | None], bool] = lambda name, value: False
    changed: list[str] = dataclasses.field(default_factory=list)
    # other values, in memory taken before the first call
    reserved: list[Tensors] = dataclasses.field(default_factory=list)

    def reserve(self) -> None:
        """Take the memory of `unseen` before any call: an allocator gives what a call has left to the next."""
        self.reserved.append(self.fresh(other=True))

    def unseen(self) -> Tensors:
        return self.reserved.pop() if self.reserved else self.fresh(other=True)

    def fresh(self, other: bool = False) -> Tensors:
        tensors = {n: (other_values(x) if other else laid_out(x)) for n, x in self.problem.tensors.items()}
        return {n: x.requires_grad_(n in self.problem.leaves) for n, x in tensors.items()}

    def write(self, x: Tensors, through_data: bool) -> None:
        for name, value in self.problem.tensors.items():
            memory(x[name].data if through_data else x[name].detach()).copy_(memory(value.detach()))

    def inputs(self, x: Tensors) -> Collection[torch.Tensor]:
        return x.values()

    def leaves(self, x: Tensors) -> Tensors:
        return {n: x[n] for n in self.problem.leaves}

    def forward(self, x: Tensors) -> Tensors:
        own = {n: x[n].clone() if x[n].requires_grad else laid_out(x[n]) for n in x if n in self.in_place}
        handed = {**x, **own}
        out = named(call(self.function, self.problem.inputs, handed, self.problem.parameters))
        known = self.problem.outputs
        if len(out) == len(known) and not set(out) & set(known):  # other names, in the same order
            return dict(zip(known, out.values(), strict=True))
        return out

    def on_leaves(self, x: Tensors, leaves: Mapping[str, torch.Tensor]) -> Tensors:
        return {**x, **leaves}

    def upstream(self, x: Tensors, outputs: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        given = {n: self.problem.given.get(n, g) for n, g in self.problem.cotangents.items() if n in outputs}
        there = {n: g for n, g in given.items() if outputs[n].requires_grad and outputs[n].shape == g.shape}
        laid = {n: laid_out(g) for n, g in there.items()}
        return {n: (outputs[n], memory(g).to(outputs[n]).as_strided(g.shape, g.stride())) for n, g in laid.items()}

    def backward(self, x: Tensors, outputs: Mapping[str, torch.Tensor], retain_graph: bool = False) -> None:
        if (pairs := self.upstream(x, outputs)) and self.problem.leaves:
            given = tuple(zip(*pairs.values(), strict=True))
            self.within(x, lambda: torch.autograd.backward(*given, retain_graph=retain_graph))
            before = self.upstream(x, outputs)
            kept = {n for n in pairs if gradient_name(n) not in self.in_place}
            self._note(f"upstream gradient of {n}" for n in kept if not same_bits(pairs[n][1], before[n][1]))

    def within(self, x: Tensors, derive: Callable[[], Any]) -> Any:
        if not isinstance(self.function, torch.nn.Module):
            return derive()
        own = {f"module.{n}": x[n] for n in self.problem.parameters}  # a checkpoint computes again with the module's
        return torch.func.functional_call(_Around(self.function), own, (derive,))

    def gradients(self, x: Tensors) -> dict[str, torch.Tensor | None]:
        out = {gradient_name(n): leaf.grad for n, leaf in self.leaves(x).items()}
        for name, leaf in self.leaves(x).items():
            exact = self.problem.oracle.exact[gradient_name(name)]
            if leaf.grad is None and not bool(exact.any()):
                out[gradient_name(name)] = torch.zeros_like(leaf)
        return out

    def differ(self, values: Values, expected: Values) -> list[str]:
        def agrees(name: str, v: torch.Tensor | None, first: torch.Tensor | None) -> bool:
            return (v is None or first is None or v.dtype == first.dtype) and self.agrees(name, v)

        return [n for n, v in values.items() if not same_bits(v, expected[n]) and not agrees(n, v, expected[n])]

    def values(self) -> dict[str, torch.Tensor | None]:
        """Outputs and gradients of one call, in tensors of their own."""
        x = self.fresh()
        with torch.enable_grad():
            outputs = self.forward(x)
        values: dict[str, torch.Tensor | None] = {n: o.detach().clone() for n, o in outputs.items()}
        self.backward(x, outputs)
        kept = {n for n in x if not any(n == i or n.startswith((f"{i}.", f"{i}[")) for i in self.in_place)}
        self._note(f"input {n}" for n in x if n in kept and not same_bits(x[n].detach(), self.problem.tensors[n]))
        return values | self.gradients(x)

    def _note(self, names: Any) -> None:
        found = [f"{name} was changed in place" for name in names]
        self.changed.extend(line for line in found if line not in self.changed)

    def bits(self, first: Values) -> list[str]:
        """A second call on the same inputs gives the same bits, and none sets the state of torch's random numbers."""
        with torch.random.fork_rng(devices=()):
            torch.rand(())
            before, again, then = torch.get_rng_state(), self.values(), torch.get_rng_state()
            seeds = False
            if not torch.equal(then, before):  # from another state to the same
                self.values()
                seeds = torch.equal(torch.get_rng_state(), then)
        found = [f"{n} has other bits in a second call" for n in first if not same_bits(again.get(n), first[n])]
        return found + ["the call seeds torch's random numbers"] * seeds

    @property
    def _definition(self) -> Self:
        """Calls of the definition in place of the function."""
        return dataclasses.replace(self, function=self.problem.definition, changed=[])

    def _dtypes(self, first: Values) -> list[str]:
        """Outputs come in the dtypes that the definition gives on the same inputs."""
        asked = self._definition.forward(self.fresh())
        came = {n: y for n in asked if (y := first.get(n)) is not None and y.dtype != asked[n].dtype}
        return [f"{n} came in {y.dtype}, expected {asked[n].dtype}" for n, y in came.items()]

    def broken(self, names: Collection[str], first: Values) -> list[str]:
        """What of the protocol does not hold, a sentence each."""
        found: list[str] = []
        ways = {
            "bits": lambda: self.bits(first),
            "accumulation": lambda: protocol.accumulation(self),
            "interleaved": lambda: protocol.interleaved(self, first, FORWARDS),
            "repeated": lambda: protocol.repeated(self, first),
            "no_grad": lambda: protocol.unrecorded(self, first),
            "output dtypes": lambda: self._dtypes(first),
            "nan": lambda: protocol.shown(self, first, self._definition),
            "default dtype": lambda: protocol.other_default(self, first),
            "checkpoint": lambda: protocol.recomputed(self, first),
            "reentrant checkpoint": lambda: protocol.through(
                self, first, lambda f, *x: checkpoint(f, *x, use_reentrant=True)
            ),
            "compile": lambda: protocol.through(self, first, lambda f, *x: torch.compile(f, backend="aot_eager")(*x)),
        }
        for name, way in ways.items():
            if name not in names or (name in NEED_GRADIENTS and not self.problem.leaves):
                continue
            try:
                with torch.enable_grad():
                    found += [f"{name}: {line}" for line in way()]
            except Exception as error:
                refused = isinstance(error, REFUSALS) and not isinstance(error, CRASHES)
                if name == "no_grad" and refused:  # what needs gradients says so: no wrong result
                    continue
                found.append(f"{name}: the call fails, {told(error)}")
        return found


class _Around(torch.nn.Module):
    """What is called while a module has other parameters."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, derive: Callable[[], Any]) -> Any:
        return derive()


def told(error: BaseException) -> str:
    """Its type and first line."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """The same values as every second entry of memory that holds NaN between them, or -1."""
    return torch.stack([x, torch.full_like(x, torch.nan if x.is_floating_point() else -1)], -1)[..., 0]


def other_values(x: torch.Tensor) -> torch.Tensor:
    """Other values that a function takes as well: the same, rolled along the first dimension in which that changes them.
    Integers may be offsets, and a mask may belong to them: these stay."""
    out = laid_out(x)
    if not is_floating(x) or out.layout != torch.strided:
        return out
    view = out[tuple(slice(0, 1) if step == 0 else slice(None) for step in out.stride())]  # expanded: one for all
    for dim in range(view.dim()):
        if not same_bits(rolled := view.roll(1, dim), view):
            view.copy_(rolled)
            break
    return out
