"""Whether a wrong function's formula is wrong, or its rounding: its own code is run in float64."""

import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from parity.judge.gates import Judgement
from parity.judge.operations import is_floating
from parity.judge.problem import Problem, same

same_in_float64 = functools.partial(same, rtol=2.0**-32, atol=2.0**-44)
"""Whether they differ by no more than a formula that loses a third of float64's digits does."""


def right_in_float64(
    function: Any,
    problem: Problem,
    wrong: Mapping[str, torch.Tensor | None],
    judged: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Judgement]],
) -> bool | None:
    """Whether the function's own code gives the exact values of what is `wrong` where it computes in float64, casts within it
    too; False where what it gives, stored, is wrong as it is `judged`. None where it does not compute so, or neither is clear."""
    if function is None:
        return None
    with contextlib.suppress(Exception), without_kernels():
        kept = copy.deepcopy(function)  # what an object keeps of a call is float64
        own = dataclasses.replace(problem, definition=kept, also=(), given=problem.cotangents)
        found, exact = own.exact, problem.oracle.exact
        if all(same_in_float64(found[n], exact[n]) for n in wrong):
            return True
        stored = {n: found[n].to(x.dtype) for n, x in wrong.items() if x is not None}
        agrees = all(j.agrees for j in judged(stored).values())
        return None if agrees or not _computes_in_float64(own, problem, wrong) else False
    return None


@dataclasses.dataclass(frozen=True)
class _Moved(Problem):
    """A problem in whose float64 run each entry of one tensor is off by 2⁻³⁶."""

    one: str = ""

    def _double(self, stack: int | None) -> dict[str, torch.Tensor]:
        found = super()._double(stack)
        x = found[self.one]
        generator = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(2, x.shape, generator=generator).to(x.device, torch.float64) * 2 - 1
        with torch.no_grad():
            x.mul_(1 + signs * 2.0**-36)
        return found


def _computes_in_float64(own: Problem, problem: Problem, names: Collection[str]) -> bool:
    """Whether each input that is off by 2⁻³⁶, and moves the definition, moves values by about as little: float32 or less within
    would not let them move, or move them by a step of its own."""
    moves = [(_movement(problem, n), _movement(own, n)) for n, x in problem.tensors.items() if is_floating(x)]
    there = [of_own[name] for of_definition, of_own in moves for name in names if of_definition[name] > 0]
    return bool(there) and all(0 < share < 2.0**-28 for share in there)


def _movement(of: Problem, one: str) -> dict[str, float]:
    """Quantity -> the median change of its entries that are not 0, as a share of them, where one tensor is off by 2⁻³⁶."""
    moved = _Moved(**{f.name: getattr(of, f.name) for f in dataclasses.fields(of)}, one=one).exact
    shares = {n: ((moved[n] - x).abs() / x.abs())[x != 0] for n, x in of.exact.items() if x.is_floating_point()}
    return {n: float(share.median()) if share.numel() else 0.0 for n, share in shares.items()}


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """A Triton kernel that is launched raises: its tensors would be float64 and say that they are of another dtype."""
    jit = sys.modules.get("triton.runtime.jit")
    refused = RuntimeError("a Triton kernel does not compute in float64")
    kinds = [jit.KernelInterface] if jit else []
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            kinds += kind.__subclasses__()
            if "run" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "run", side_effect=refused))
        yield
