"""Which rounding that a function does not declare explains what is wrong: recipes, each tried on the function's own inputs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from parity.judge.escalation import REPLICAS
from parity.judge.gates import Judgement
from parity.judge.oracle import Oracle
from parity.judge.recipe import TF32, TF32_TRUNCATED, UNIT_ROUNDOFF, Recipe

Stages = tuple[str, ...]
LOGITS: Stages = ("logits", "dlogits")
SOFTMAX = (*LOGITS, "softmax")
EAGER = (*SOFTMAX, "elementwise", "inputs")
ANYWHERE: tuple[Stages, ...] = (
    *(("inputs",), ("logits",), ("softmax",), ("log_sum_exp",), LOGITS, SOFTMAX),
    *((*LOGITS, "inputs"), (*SOFTMAX, "inputs"), (*SOFTMAX, "log_sum_exp"), ("softmax", "elementwise")),
    *((*SOFTMAX, "elementwise"), (*SOFTMAX, "elementwise", "log_sum_exp"), EAGER, (*EAGER, "log_sum_exp")),
)
"""Fields of a recipe that round together, the finest first: one buffer, then what plain torch on 16 bits keeps."""
PARTIALS = (4, 16, 64)
"""Partial gradients of a sum in 16 bits: how many is known to the function alone."""
SUMS: tuple[Stages, ...] = tuple(("accumulate", f"partials={n}") for n in PARTIALS)
DLOGITS: tuple[Stages, ...] = (("dlogits",),)
LARGEST = (*EAGER, "log_sum_exp", *SUMS[-1])
TF32_PRODUCTS: tuple[dict[str, Any], ...] = tuple({"matmul": p, "matmul_backward": p} for p in (TF32, TF32_TRUNCATED))
"""cuBLAS rounds operands; Triton's `tl.dot` gives them as they are to tensor cores, which truncate (seen on an H100)."""
UNSHIFTED: dict[str, Any] = {"entropy": "unshifted"}
"""A formula of the entropy that is weak in every dtype."""

FIRST = 1e3
"""Added to it for sums over tokens where another float32 gradient is right: dlogits in 16 bits would be in all of them."""
TINY = 1e-3
"""Error ÷ allowed of what is exact, in that sum."""
LOUD, EXACT, ROWS, MOST = 1 / 16, 1 / 64, 16, 0.75
"""Rows, such as tokens, whose replicas are off by this share of what the root mean square row's are; the share of its replicas'
error below which a row is right; how many rows there must be; the share of right ones above which the error is not rounding. Of
rounded rows one in a hundred is as near by chance, more where values are exact in 16 bits."""

LEAST = 1 / 32
"""Error ÷ allowed below which an error is not the rounding that is tried: a replica's own is about a third, code that rounds at
one of six places of a recipe is off by half as much. Where replicas overflow 16 bits all is allowed."""

WHOLE: tuple[Stages, ...] = ((*EAGER, "log_sum_exp"), (*LOGITS, *SUMS[-1]), (*DLOGITS[0], *SUMS[-1]))
"""Where one of these explains nothing, nor does a part of it."""

Judge = Callable[[Recipe, Collection[str]], Mapping[str, Judgement]]
"""(resolved recipe, quantities) -> their judgements under it, by few replicas."""


@dataclasses.dataclass(frozen=True)
class Explaining:
    """The search for one result."""

    recipe: Recipe  # as it is declared, resolved
    dtype: str  # of the inputs
    judge: Judge  # judges the result again
    judgements: Mapping[str, Judgement]  # of every quantity, by the recipe as it is declared
    values: Mapping[str, torch.Tensor | None]  # quantity -> as it came; None where it is missing
    outputs: Collection[str]  # which of them are outputs
    casts: bool  # whether an input is in float32, so that a cast of the inputs to `dtype` rounds
    tf32: bool  # whether float32 products may be tf32's
    always: dict[str, Any]  # fields that each recipe has besides, so that it can be declared as it is printed
    oracle: Oracle  # what it computes for a recipe that is tried is not kept

    @property
    def failing(self) -> list[str]:
        """The quantities that are wrong."""
        return [name for name, j in self.judgements.items() if not j.agrees]

    @property
    def agreeing(self) -> list[str]:
        """The others."""
        return [name for name, j in self.judgements.items() if j.agrees]

    @property
    def wide(self) -> bool:
        """Whether all outputs agree and came in float32: then nothing before them is rounded to 16 bits."""
        came = [v for v in map(self.values.get, self.outputs) if v is not None]
        return not {*self.outputs} & {*self.failing} and all(v.dtype.itemsize >= 4 for v in came)

    def recipes(self) -> Iterator[str]:
        """Those under which all agrees, as they are declared, "Recipe(logits='bf16')"; rounded tf32 products first, for which
        a kernel may need to do nothing, then that which allows least.

        Where one rounds all that another does it is not tried: it explains what that explains, and comes last.
        """
        if "entropy" in self.failing and self._tightness(UNSHIFTED) is not None:
            yield self._text(UNSHIFTED)
            return
        found: dict[str, float] = {}
        for fields in TF32_PRODUCTS if self.tf32 and self.dtype == "fp32" else ():
            tightness = self._tightness(fields)
            if tightness is not None and fields["matmul"] == TF32:
                yield self._text(fields)
            elif tightness is not None:
                found[self._text(fields)] = tightness
        for (stages, dtype), tightness in self._narrower().items():
            for name in ("input", dtype) if dtype == self.dtype else (dtype,):
                found.setdefault(self._text(self._fields(stages, name)), tightness)
        yield from sorted(found, key=lambda text: -found[text])

    def _narrower(self) -> dict[tuple[Stages, str], float]:
        """Stages and the 16-bit dtype they round to -> how little that allows."""
        head = self.dtype == "fp32" and any(name.startswith("grad_") for name in self.agreeing)
        narrow = ("bf16",) if self.dtype == "bf16" else ("fp16", "bf16")

        @functools.cache
        def hopeless(whole: Stages, dtype: str) -> bool:
            return self._tightness(self._fields(whole, dtype)) is None

        tight: dict[tuple[Stages, str], float] = {}
        for stages in self._steps():
            for dtype in narrow:
                if any(hopeless(whole, dtype) for whole in (LARGEST, *WHOLE) if _within(stages, whole)):
                    continue
                cast = dtype == self.dtype and not self.casts and stages[-1] == "inputs" and stages != EAGER
                if cast or ("accumulate" in stages and dtype not in ("bf16", self.dtype)):
                    continue
                implied = any(dtype == there and {*stages} >= {*less} for less, there in tight)
                found = -math.inf if implied else self._tightness(self._fields(stages, dtype), spread=True)
                if found is not None:
                    tight[stages, dtype] = found + FIRST * (head and stages in SUMS)
        return tight

    def _steps(self) -> Iterator[Stages]:
        yield from (*DLOGITS, *SUMS) if self.wide else (*ANYWHERE[:2], *DLOGITS, *SUMS, *ANYWHERE[2:])
        yield from ((*(DLOGITS[0] if self.wide else LOGITS), *some) for some in SUMS)

    def _fields(self, stages: Stages, dtype: str) -> dict[str, Any]:
        """The fields with this dtype, where the declared one is not as coarse."""
        unit = UNIT_ROUNDOFF[self.dtype if dtype == "input" else dtype]
        out: dict[str, Any] = {}
        for name in stages:
            field, _, number = name.partition("=")
            declared = UNIT_ROUNDOFF.get(getattr(self.recipe, field) or "fp32", 0.0) if not number else 0.0
            out |= {field: int(number)} if number else {field: dtype} if declared < unit else {}
        return out

    def _tightness(self, fields: dict[str, Any], spread: bool = False) -> float | None:
        """The sum of log(error ÷ allowed) under a recipe, larger the less it allows; None where something is wrong, or, asked for
        its `spread`, is not off nearly everywhere, as rounding is: one wrong token among right ones is no rounding."""
        wider = dataclasses.replace(self.recipe, **self.always | fields).resolve(self.dtype)
        if wider == self.recipe:
            return None
        judged: list[Judgement] = []
        with self.oracle.forgetting():
            for names in filter(None, (self.failing, self.agreeing)):
                found = self.judge(wider, names)
                judged += [found[name] for name in names if name in found]
                if not all(name in found and found[name].agrees for name in names):
                    return None
            loudest = max(j.headroom for j in judged[: len(self.failing)])
            if spread and not (loudest >= LEAST and all(self._off_everywhere(n, wider) for n in self.failing)):
                return None
        return sum(math.log(max(j.headroom, TINY)) for j in judged)

    def _off_everywhere(self, name: str, wider: Recipe) -> bool:
        value, exact = self.values[name], self.oracle.exact[name]
        if value is None or value.shape != exact.shape:
            return True
        errors = self.oracle.unit(name, wider, REPLICAS).errors
        if not errors.o.dim():
            return True
        error, expected = errors.size(value.detach().cpu().double() - errors.o), errors.rows[0]
        loud = expected > LOUD * expected.square().mean().sqrt()
        right = int((error[loud] < EXACT * expected[loud]).sum())
        return int(loud.sum()) < ROWS or right <= MOST * int(loud.sum())

    def _text(self, fields: dict[str, Any]) -> str:
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in (self.always | fields).items())})"


def _within(stages: Stages, whole: Stages) -> bool:
    """Whether another recipe rounds more than these stages, in no fewer partial sums."""
    more = {*whole, *(f"partials={n}" for n in PARTIALS if whole[-1] == f"partials={PARTIALS[-1]}")}
    return {*stages} < more and stages != whole
