"""One implementation on one case, compared with the definition: the verdict, and what explains a disagreement."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.case.layouts import elsewhere
from parity.implementations.implementation import Implementation
from parity.judge.escalation import REPLICAS, escalate, if_near
from parity.judge.gates import Judgement, failed, judge
from parity.judge.in_float64 import same_in_float64, without_kernels
from parity.judge.operations import as_definition, is_floating
from parity.judge.oracle import Oracle, Quantities, gradient_name
from parity.judge.products import CutOperands
from parity.judge.protocol import same_bits
from parity.judge.recipe import DTYPES, EAGER, Recipe
from parity.judging.oracle import exact, largest, replicas
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.results.row import Class

ON_DEVICE = 1 << 13
"""Entries of the logits or of the head from which on oracle and replicas run on the device of the case. Twelve replicas took
on an H200 and on a core beside it 30 and 8 ms for 2¹⁰ logits, 20 and 41 ms for 2¹³, 23 and 293 ms for 2¹⁶, 0.9 and 10 s for
2²¹ (cases/bench/test_replicas.py)."""


@dataclasses.dataclass(frozen=True)
class CaseOracle:
    """A case with what is computed for it once: exact quantities, replicas by recipe, and the same for cases derived from
    it. `most`: replicas that a verdict takes at most (None: as many as it takes)."""

    family: Family
    inputs: Inputs
    exact: Quantities
    most: int | None = None
    _derived: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def whole(self) -> CaseOracle:
        """The same with as many replicas as a verdict takes."""
        return self if self.most is None else CaseOracle(self.family, self.inputs, self.exact)

    @functools.cached_property
    def on_cpu(self) -> Inputs:
        return _on(self.inputs, "cpu")

    @functools.cached_property
    def home(self) -> Inputs:
        """The inputs where oracle and replicas run: on the device of the case if that is large, else on the CPU."""
        return self.inputs if largest(self.family, self.inputs) >= ON_DEVICE else self.on_cpu

    @classmethod
    def of(cls, family: Family, case: Case, device: str = "cpu", most: int | None = None) -> CaseOracle:
        """Build the inputs and run the oracle."""
        inputs = family.build(case)
        return cls.at(family, inputs if device == "cpu" else _on(inputs, device), most)

    @classmethod
    def at(cls, family: Family, inputs: Inputs, most: int | None = None) -> CaseOracle:
        """Run the oracle on inputs."""
        oracle = cls(family, inputs, {}, most)
        oracle.exact.update(exact(family, oracle.home))
        return oracle

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, the first time that it is asked for."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def _upstream(self, cotangents: dict[str, torch.Tensor]) -> CaseOracle:
        return self.at(self.family, dataclasses.replace(self.inputs, cotangents=cotangents), self.most)

    def offered(self, implementation: Implementation) -> CaseOracle:
        """This case without upstream gradients on optional outputs that the implementation does not offer."""
        every, offers = self.inputs.cotangents, implementation.outputs
        absent = frozenset(n for n in every if n in self.family.optional and n not in offers)
        if not absent:
            return self
        return self.once(absent, lambda: self._upstream({n: g for n, g in every.items() if n not in absent}))

    def heard(self, outputs: Mapping[str, torch.Tensor | None]) -> CaseOracle:
        """This case with the upstream gradients that reach outputs of these dtypes: autograd gives a 16-bit loss a 16-bit
        one. One that is too large for the dtype is kept: an infinite upstream gradient would give no gradient."""
        every = self.inputs.cotangents
        dtypes = {n: v.dtype for n in every if (v := outputs.get(n)) is not None}
        there = {n: every[n].to(dtype).to(every[n]) for n, dtype in dtypes.items()}
        there = {n: g for n, g in there.items() if not torch.equal(every[n], g) and bool(torch.isfinite(g).all())}
        if not there:
            return self
        return self.once(frozenset((n, dtypes[n]) for n in there), lambda: self._upstream({**every, **there}))

    @functools.cached_property
    def beside(self) -> Inputs:
        """The inputs of the next seed, on the same device, with upstream gradients of the same quantities."""
        case = dataclasses.replace(self.inputs.case, seed=self.inputs.case.seed + 1)
        other = _on(self.family.build(case), self.inputs.device.type)
        asked = {n: g for n, g in other.cotangents.items() if n in self.inputs.cotangents}
        return dataclasses.replace(other, cotangents=asked)

    @functools.cached_property
    def oracle(self) -> Oracle:
        """What results are compared with: the exact quantities, and replicas of them."""
        seed = zlib.crc32(self.inputs.case.id.encode())
        size = largest(self.family, self.inputs)
        return Oracle(self.exact, functools.partial(replicas, self.family, self.home), self._kind, seed, size)

    def _kind(self, name: str, found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        gradient = name.startswith("grad_")
        scalar = not gradient and self.exact[name].dim() == 0
        first_order = terms = 0.0
        if scalar and name == self.family.first and "_slope" in self.exact:
            spread = (found["_logps"] - self.exact["_logps"]).square().mean(0)
            first_order = float((self.exact["_slope"].square() * spread).nan_to_num().sum().sqrt())
        if scalar and name == self.family.first and "_terms" in self.exact:
            terms = float(self.exact["_terms"].norm()) * self.exact["_terms"].numel() ** 0.5
        return {
            "zero": self.family.zeros(self.on_cpu).get(name),
            "entrywise": not gradient or self.exact[name].dim() == 1,
            "scalar": scalar,
            "counted": self.family.outputs.get(name) == "counted",
            "first_order": first_order,
            "terms": terms,
        }

    def cut(self, precision: str) -> Quantities:
        """The definition with the operands of every product on tf32's grid."""

        def computed() -> Quantities:
            with CutOperands(precision):
                return exact(self.family, self.home)

        return self.once(precision, computed)

    def variant(self, name: str) -> CaseOracle:
        """The same inputs under a named variant of the definition."""
        family = dataclasses.replace(self.family, oracle=self.family.variants[name])
        return self.once(name, lambda: self.at(family, self.on_cpu, self.most))

    @functools.cached_property
    def in_float32(self) -> CaseOracle:
        """The same values with every parameter in float32 and outside autocast, to tell logic from precision."""
        case = dataclasses.replace(self.inputs.case, dtype="fp32")
        settings = SimpleNamespace(**vars(self.inputs.settings))
        if self.inputs.autocast:
            settings.context = "plain"
        tensors = {
            k: elsewhere(v, dtype=torch.float32) if v is not None and v.dtype in (torch.float16, torch.bfloat16) else v
            for k, v in self.inputs.tensors.items()
        }
        inputs = dataclasses.replace(self.inputs, case=case, tensors=tensors, settings=settings)
        return CaseOracle(self.family, inputs, self.exact, self.most)

    @property
    def in_float64(self) -> Inputs:
        """The inputs in float64."""
        tensors = self.inputs.tensors.items()
        wide = {k: elsewhere(v, dtype=torch.float64) if v is not None and is_floating(v) else v for k, v in tensors}
        return dataclasses.replace(self.inputs, tensors=wide)


def _on(inputs: Inputs, device: str) -> Inputs:
    return inputs.replace(**{k: None if v is None else elsewhere(v, device=device) for k, v in inputs.tensors.items()})


def expected(oracle: CaseOracle, implementation: Implementation, recipe: Recipe) -> dict[str, torch.dtype | None]:
    """Quantity -> dtype that it should have (None: any), for everything the implementation should return."""
    fam, inputs = oracle.family, oracle.inputs
    out: dict[str, torch.dtype | None] = {}
    for name in fam.outputs:
        if name in oracle.exact and (name not in fam.optional or name in implementation.outputs):
            out[name] = None if inputs.autocast else DTYPES.get(recipe.output)
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
    """Judge every quantity that the implementation should return (or `only` some), and each that it should not, with `count`
    replicas; `finer`: see `Oracle.replicas`."""
    oracle = oracle.heard(outcome.quantities)
    wanted = expected(oracle, implementation, recipe)
    out = {}
    for name, dtype in wanted.items():
        if only is not None and name not in only:
            continue
        value = outcome.quantities.get(name)
        if value is None:
            out[name] = failed("no gradient" if name.startswith("grad_") else "missing")
            continue
        asked = _asked(oracle, name, dtype, value.dtype)
        out[name] = judge(value, oracle.oracle.unit(name, recipe, count, finer, only), asked)
    for name in outcome.quantities:
        if name.startswith("grad_") and name not in wanted and (only is None or name in only):
            out[name] = failed("a gradient where none was asked for")
    return out


def _asked(oracle: CaseOracle, name: str, dtype: torch.dtype | None, came: torch.dtype) -> torch.dtype:
    """The dtype whose precision a value must have: float32 for float32 inputs, unless the recipe says otherwise."""
    if oracle.inputs.product_dtype == "fp32":
        return dtype or (torch.float32 if came in (torch.float16, torch.bfloat16) else came)
    scalar = name in oracle.family.outputs and oracle.exact[name].dim() == 0
    return came if dtype is None or scalar else dtype


def judged(
    oracle: CaseOracle,
    implementation: Implementation,
    outcome: Outcome,
    recipe: Recipe | None = None,
    only: Collection[str] | None = None,
    most: int | None = None,
) -> dict[str, Judgement]:
    """The judgement of every quantity (or `only` some) under a recipe (None: its own), with as many replicas as it takes.

    With `most` these are at most so many: enough for a hint. Without, the verdict: an implementation may be more precise
    than its recipe. Where float16 flushes a gradient to 0 in every replica, they have no spread, and the float32 value seems
    wrong. Or two of its values that are nearly alike lie on both sides of a tie, which no stretched grid has there: among
    30,000 rows one does. So what still disagrees is judged again with added replicas, some that store nothing in 16 bits,
    some on the dtypes' own numbers.
    """
    asked, most = recipe or implementation.recipe_for(oracle.inputs), oracle.most if most is None else most

    def near(names: Collection[str]) -> int:
        entries = max(oracle.exact[n].numel() if n in oracle.exact else 1 for n in names)
        return if_near(oracle.oracle.size, entries) if most is None else 0

    return escalate(
        lambda count, finer, names: judge_all(
            oracle, implementation, outcome, asked, count, finer, only if names is None else names
        ),
        [count for count in oracle.oracle.steps if most is None or count <= most],
        near=near,
        finer=most is None and asked.stores_narrow,
    )


def confirmed(oracle: CaseOracle, implementation: Implementation, outcome: Outcome) -> dict[str, Judgement]:
    """The verdict on every quantity. A result in which autocast changes no bit is judged as without autocast."""
    out = judged(oracle, implementation, outcome)
    if oracle.inputs.autocast:
        plain = oracle.in_float32
        without = execute(implementation, plain.inputs)
        same = {n for n, x in without.quantities.items() if same_bits(outcome.quantities.get(n), x)}
        same -= {n for n, j in out.items() if not j.agrees} | (out.keys() ^ without.quantities.keys())
        if without.verdict == "ran" and same:
            out |= judged(plain, implementation, without, only=same)
    return out


def classify(oracle: CaseOracle, implementation: Implementation, failing: Sequence[str]) -> dict[str, Class]:
    """ "logic" for each quantity that float32 does not repair and no other float32 recipe explains, else "precision"; that too
    where a user's function gives the exact value in float64."""
    narrow = oracle.inputs.product_dtype != "fp32"
    precise = oracle.in_float32 if narrow else oracle
    outcome = execute(implementation, precise.inputs)
    if outcome.verdict == "ran":
        recipe = implementation.recipe_for(precise.inputs)
        recipe = dataclasses.replace(recipe, entropy="unshifted")
        if not narrow:  # tf32 explains nothing where it is off: the recipe has it where it is on
            recipe = dataclasses.replace(recipe, tanh="sigmoid")
        found = judged(precise, implementation, outcome, recipe, failing)
    else:  # it has no float32: would the coarsest recipe of its dtype explain it?
        again = execute(implementation, oracle.inputs)
        found = judged(oracle, implementation, again, EAGER.resolve(oracle.inputs.case.dtype), failing)
    right = {name for name in failing if name in found and found[name].agrees}
    if implementation.is_function and not right.issuperset(failing):
        with without_kernels(), as_definition(DTYPES[precise.inputs.case.dtype]):
            exactly = execute(implementation, precise.in_float64).quantities
        right |= {n for n in failing if n in oracle.exact and _is(exactly.get(n), oracle.exact[n])}
    return {name: "precision" if name in right else "logic" for name in failing}


def _is(value: torch.Tensor | None, exact: torch.Tensor) -> bool:
    return value is not None and same_in_float64(value.to(exact.device), exact)


def followed_variant(
    oracle: CaseOracle, implementation: Implementation, outcome: Outcome, failing: Collection[str]
) -> str | None:
    """The named variant of the definition that explains every failing quantity, or None. One that differs from the
    definition in none of them on this case explains nothing, and neither does one to which a result is no nearer than to
    the definition."""
    for name in oracle.family.variants:
        other = oracle.variant(name)
        if all(q in oracle.exact and torch.equal(other.exact[q], oracle.exact[q]) for q in failing):
            continue
        if not all(_nearer(outcome.quantities.get(q), other.exact.get(q), oracle.exact.get(q)) for q in failing):
            continue
        found = judged(other, implementation, outcome, only=failing)
        if all(q in found and found[q].agrees for q in failing):
            return name
    return None


def _nearer(value: torch.Tensor | None, to: torch.Tensor | None, than: torch.Tensor | None) -> bool:
    """Whether a value is nearer to one tensor than to another, in its largest error; True where that cannot be told."""
    if value is None or to is None or than is None or not value.shape == to.shape == than.shape or not value.numel():
        return True
    v = value.detach().cpu().double()
    near, far = (float((v - o.cpu()).abs().amax()) for o in (to, than))
    return not near >= far
