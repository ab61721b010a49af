"""One implementation on one case, compared with the definition: the verdict, and what explains a disagreement."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.case.layouts import elsewhere
from parity.implementations.implementation import Implementation
from parity.judge.escalation import REPLICAS, escalate, if_near, ladder, settle
from parity.judge.gates import Judgement, failed, judge
from parity.judge.oracle import Oracle, Quantities, gradient_name
from parity.judge.products import CutOperands
from parity.judge.recipe import DTYPES, EAGER, Recipe
from parity.judge.timings import within
from parity.judging.oracle import exact, replicas
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome, same_bits
from parity.results.row import Class

ON_DEVICE = 1 << 20
"""Entries of the logits or of the head from which on oracle and replicas run on the device of the case, where launches of
kernels (some 10 µs) cost less than the CPU's arithmetic. A guess; cases/bench/test_replicas.py measures it."""


@dataclasses.dataclass
class CaseOracle:
    """A case with what is computed for it once: exact quantities, and replicas by recipe."""

    family: Family
    inputs: Inputs
    exact: Quantities
    _cut: dict[str, Quantities] = dataclasses.field(default_factory=dict)
    _narrowed: dict[frozenset[str], CaseOracle] = dataclasses.field(default_factory=dict)
    _variants: dict[str, CaseOracle] = dataclasses.field(default_factory=dict)
    _heard: dict[frozenset[tuple[str, torch.dtype]], CaseOracle] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def on_cpu(self) -> Inputs:
        """The inputs on the CPU."""
        return _on(self.inputs, "cpu")

    @functools.cached_property
    def home(self) -> Inputs:
        """The inputs where oracle and replicas run: on the device of the case if that is large, else on the CPU."""
        return self.inputs if largest(self) >= ON_DEVICE else self.on_cpu

    @classmethod
    def of(cls, family: Family, case: Case, device: str = "cpu") -> CaseOracle:
        """Build the inputs and run the oracle."""
        inputs = _built(family, case)
        oracle = cls(family, inputs if device == "cpu" else _on(inputs, device), {})
        oracle.exact = exact(family, oracle.home)
        return oracle

    def offered(self, implementation: Implementation) -> CaseOracle:
        """This case without upstream gradients on optional outputs that the implementation does not offer."""
        absent = frozenset(
            n for n in self.inputs.cotangents if n in self.family.optional and n not in implementation.outputs
        )
        if not absent:
            return self
        if absent not in self._narrowed:
            kept = {n: g for n, g in self.inputs.cotangents.items() if n not in absent}
            inputs = dataclasses.replace(self.inputs, cotangents=kept)
            self._narrowed[absent] = CaseOracle(self.family, inputs, {})
            self._narrowed[absent].exact = exact(self.family, self._narrowed[absent].home)
        return self._narrowed[absent]

    def heard(self, outputs: Mapping[str, torch.Tensor | None]) -> CaseOracle:
        """This case with the upstream gradients that reach outputs of these dtypes: autograd gives a 16-bit loss a 16-bit one.

        One that is too large for the dtype is kept: an infinite upstream gradient would give no gradient.
        """
        narrow = {n: v.dtype for n in self.inputs.cotangents if (v := outputs.get(n)) is not None}
        narrow = {n: dtype for n, dtype in narrow.items() if _rounds(self.inputs.cotangents[n], dtype)}
        if not narrow:
            return self
        key = frozenset(narrow.items())
        if key not in self._heard:
            kept = {n: g.to(narrow.get(n, g.dtype)).to(g) for n, g in self.inputs.cotangents.items()}
            self._heard[key] = CaseOracle(self.family, dataclasses.replace(self.inputs, cotangents=kept), {})
            self._heard[key].exact = exact(self.family, self._heard[key].home)
        return self._heard[key]

    @functools.cached_property
    def beside(self) -> Inputs:
        """The inputs of the next seed, on the same device, with upstream gradients of the same quantities."""
        case = dataclasses.replace(self.inputs.case, seed=self.inputs.case.seed + 1)
        other = _on(_built(self.family, case), self.inputs.device.type)
        return dataclasses.replace(
            other, cotangents={n: g for n, g in other.cotangents.items() if n in self.inputs.cotangents}
        )

    @functools.cached_property
    def oracle(self) -> Oracle:
        """What results are compared with: the exact quantities, and replicas of them."""
        seed = zlib.crc32(self.inputs.case.id.encode())
        return Oracle(self.exact, functools.partial(replicas, self.family, self.home), self._kind, seed)

    def _kind(self, name: str, found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        scalar, gradient = name in self.family.scalars, name.startswith("grad_")
        first_order = terms = 0.0
        if scalar and name == self.family.outputs[0] and "_slope" in self.exact:
            spread = (found["_logps"] - self.exact["_logps"]).square().mean(0)
            first_order = float((self.exact["_slope"].square() * spread).nan_to_num().sum().sqrt())
        if scalar and name == self.family.outputs[0] and "_terms" in self.exact:
            terms = float(self.exact["_terms"].norm()) * self.exact["_terms"].numel() ** 0.5
        return {
            "zero": self.family.zeros(self.on_cpu).get(name),
            "entrywise": not gradient or self.exact[name].dim() == 1,
            "scalar": scalar,
            "counted": name in self.family.exact,
            "first_order": first_order,
            "terms": terms,
        }

    def cut(self, precision: str) -> Quantities:
        """The definition with the operands of every product on tf32's grid, computed once."""
        if precision not in self._cut:
            with CutOperands(precision):
                self._cut[precision] = exact(self.family, self.home)
        return self._cut[precision]

    def variant(self, name: str) -> CaseOracle:
        """The same inputs under a named variant of the definition, computed once."""
        if name not in self._variants:
            fam = dataclasses.replace(self.family, oracle=self.family.variants[name])
            self._variants[name] = CaseOracle(fam, self.on_cpu, exact(fam, self.home))
        return self._variants[name]

    @functools.cached_property
    def in_float32(self) -> CaseOracle:
        """The same values with every parameter in float32 and outside autocast, to tell logic from precision."""
        case = dataclasses.replace(self.inputs.case, dtype="fp32")
        settings = SimpleNamespace(**vars(self.inputs.settings))
        if self.inputs.context == "autocast":
            settings.context = "plain"
        tensors = {
            k: elsewhere(v, dtype=torch.float32) if v is not None and v.dtype in (torch.float16, torch.bfloat16) else v
            for k, v in self.inputs.tensors.items()
        }
        inputs = dataclasses.replace(self.inputs, case=case, tensors=tensors, settings=settings)
        return CaseOracle(self.family, inputs, self.exact)


def _rounds(g: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` rounds a finite tensor, and to finite numbers."""
    there = g.to(dtype).to(g)
    return not torch.equal(g, there) and bool(torch.isfinite(there).all())


@within("phase", "inputs")
def _built(family: Family, case: Case) -> Inputs:
    return family.build(case)


def _on(inputs: Inputs, device: str) -> Inputs:
    return inputs.replace(**{k: None if v is None else elsewhere(v, device=device) for k, v in inputs.tensors.items()})


def expected(oracle: CaseOracle, implementation: Implementation, recipe: Recipe) -> dict[str, torch.dtype | None]:
    """Quantity -> dtype that it should have (None: any), for everything the implementation should return."""
    fam, inputs = oracle.family, oracle.inputs
    out: dict[str, torch.dtype | None] = {}
    for name in fam.outputs:
        if name in oracle.exact and (name not in fam.optional or name in implementation.outputs):
            out[name] = None if inputs.context == "autocast" else DTYPES.get(recipe.output)
    for leaf in inputs.leaves:
        out[gradient_name(leaf)] = inputs.tensors[leaf].dtype  # type: ignore[union-attr]
    return out


def judge_all(
    oracle: CaseOracle,
    implementation: Implementation,
    outcome: Outcome,
    recipe: Recipe,
    count: int = REPLICAS,
    finer: bool = False,
    only: Collection[str] | None = None,
) -> dict[str, Judgement]:
    """Judge every quantity that the implementation should return (or `only` some), and each that it should not. `finer`: see
    `CaseOracle`."""
    oracle = oracle.heard(outcome.quantities)
    wanted = expected(oracle, implementation, recipe)
    judged = {}
    for name, dtype in wanted.items():
        if only is not None and name not in only:
            continue
        value = outcome.quantities.get(name)
        if value is None:
            judged[name] = failed("no gradient" if name.startswith("grad_") else "missing")
            continue
        asked = _asked(oracle, name, dtype, value.dtype)
        judged[name] = judge(value, oracle.oracle.unit(name, recipe, count, finer, only), asked)
    for name in outcome.quantities:
        if name.startswith("grad_") and name not in wanted and (only is None or name in only):
            judged[name] = failed("a gradient where none was asked for")
    return judged


def _asked(oracle: CaseOracle, name: str, dtype: torch.dtype | None, came: torch.dtype) -> torch.dtype:
    """The dtype whose precision a value must have: float32 for float32 inputs, unless the recipe says otherwise."""
    if oracle.inputs.case.dtype == "fp32" and oracle.inputs.context != "autocast":
        return dtype or (torch.float32 if came in (torch.float16, torch.bfloat16) else came)
    return came if dtype is None or name in oracle.family.scalars else dtype


def largest(oracle: CaseOracle) -> int:
    """Entries of the logits or the head, whichever a replica holds more of; see `Family.grid`."""
    inputs = oracle.inputs
    heads = (t.numel() for n, t in inputs.tensors.items() if t is not None and n in inputs.parameters)
    return max(math.prod(oracle.family.sizes(inputs.settings)), *heads, 1)


def near(oracle: CaseOracle, names: Collection[str]) -> int:
    """How many replicas judge the quantities `names` where they nearly agree."""
    return if_near(largest(oracle), max(oracle.exact[n].numel() if n in oracle.exact else 1 for n in names))


def confirmed(oracle: CaseOracle, implementation: Implementation, outcome: Outcome) -> dict[str, Judgement]:
    """The judgement of every quantity, settled (see `parity.judge.escalation`).

    An implementation may be more precise than its recipe: where float16 flushes a gradient to 0 in every replica, they
    have no spread, and the float32 value seems wrong. Or two of its values that are nearly alike lie on both sides of a
    tie, which no stretched grid has there: among 30,000 rows one does. So what still disagrees is judged again with added
    replicas, some that store nothing in 16 bits, some on the dtypes' own numbers. A result in which autocast changes no
    bit is judged as without autocast.
    """
    recipe = implementation.recipe_for(oracle.inputs)
    counts = ladder(largest(oracle))
    judged = escalate(
        lambda count, finer, names: judge_all(oracle, implementation, outcome, recipe, count, finer, names),
        counts,
        near=lambda names: near(oracle, names),
        finer=recipe.stores_narrow,
    )
    if oracle.inputs.context == "autocast":
        plain = oracle.in_float32
        without, asked = execute(implementation, plain.inputs), implementation.recipe_for(plain.inputs)
        same = {n for n, x in without.quantities.items() if same_bits(outcome.quantities.get(n), x)}
        same -= {n for n, j in judged.items() if not j.agrees} | (judged.keys() ^ without.quantities.keys())
        if without.verdict == "ran" and same:
            judged |= settle(lambda count: judge_all(plain, implementation, without, asked, count, only=same), counts)
    return judged


@within("stage", "class")
def classify(oracle: CaseOracle, implementation: Implementation, failing: Sequence[str]) -> dict[str, Class]:
    """ "logic" for each quantity that float32 does not repair and no other float32 recipe explains, else "precision"."""
    narrow = oracle.inputs.case.dtype != "fp32" or oracle.inputs.context == "autocast"
    precise = oracle.in_float32 if narrow else oracle
    outcome = execute(implementation, precise.inputs)
    if outcome.verdict == "ran":
        recipe = implementation.recipe_for(precise.inputs)
        if not narrow:  # tf32 explains nothing where it is off: the recipe has it where it is on
            recipe = dataclasses.replace(recipe, tanh="sigmoid")
        judged = judge_all(precise, implementation, outcome, recipe)
    else:  # it has no float32: would the coarsest recipe of its dtype explain it?
        judged = judge_all(
            oracle, implementation, execute(implementation, oracle.inputs), EAGER.resolve(oracle.inputs.case.dtype)
        )
    return {name: "precision" if name in judged and judged[name].agrees else "logic" for name in failing}


@within("stage", "variants")
def followed_variant(
    oracle: CaseOracle, implementation: Implementation, outcome: Outcome, failing: Collection[str]
) -> str | None:
    """The named variant of the definition that explains every failing quantity, or None.

    One that differs from the definition in none of them on this case explains nothing, and neither does one to which a
    result is no nearer than to the definition.
    """
    recipe = implementation.recipe_for(oracle.inputs)
    for name in oracle.family.variants:
        other = oracle.variant(name)
        if all(q in oracle.exact and torch.equal(other.exact[q], oracle.exact[q]) for q in failing):
            continue
        if not all(_nearer(outcome.quantities.get(q), other.exact.get(q), oracle.exact.get(q)) for q in failing):
            continue
        judged = settle(
            functools.partial(judge_all, other, implementation, outcome, recipe, only=failing), together=True
        )
        if all(q in judged and judged[q].agrees for q in failing):
            return name
    return None


def _nearer(value: torch.Tensor | None, to: torch.Tensor | None, than: torch.Tensor | None) -> bool:
    """Whether a value is nearer to one tensor than to another, in its largest error; True where that cannot be told."""
    if value is None or to is None or than is None or not value.shape == to.shape == than.shape or not value.numel():
        return True
    v = value.detach().cpu().double()
    near, far = (float((v - o.cpu()).abs().amax()) for o in (to, than))
    return not near >= far
