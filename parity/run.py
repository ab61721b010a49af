"""One case through every implementation: oracle and replicas once, then each party judged, as result rows."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from parity import hints, protocol
from parity.case import DTYPES, Case
from parity.evaluate import Quantities, exact, gradient_name, replicas
from parity.execute import Outcome, execute
from parity.families import Family, Inputs, family
from parity.implementations import Implementation
from parity.judge import Judgement, Unit, failed, judge
from parity.rounding import IEEE_FP32, Recipe

REPLICAS = 12
CONFIRMATION = 60
"""A disagreement is confirmed with this many replicas: twelve underestimate the spread of some entry now and then."""
LAST_WORD, LAST_WORD_LOGITS = 480, 1 << 23
"""And then with this many, as far as that many logits go: where rounding decides which token wins (bf16 logits over a
temperature of 1e-3) an entry is near 0 in nearly every replica and large in a few."""
COARSEST = Recipe(logits="input", dlogits="input", elementwise="input", softmax="input", inputs="input", output="input")

Row = dict[str, Any]


@dataclasses.dataclass
class Bench:
    """A case with what is computed for it once: exact quantities, and replicas by recipe."""

    family: Family
    inputs: Inputs
    exact: Quantities
    _replicas: dict[tuple[Recipe, int, bool], Quantities] = dataclasses.field(default_factory=dict)
    _narrowed: dict[frozenset[str], Bench] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, device: str = "cpu") -> Bench:
        """Build the inputs and run the oracle."""
        fam = family(case.family)
        inputs = fam.build(case)
        bench = cls(fam, inputs, exact(fam, inputs))
        if device != "cpu":
            bench.inputs = _on(inputs, device)
        return bench

    def offered(self, implementation: Implementation) -> Bench:
        """This bench without upstream gradients on optional outputs that the implementation does not offer."""
        absent = frozenset(
            n for n in self.inputs.cotangents if n in self.family.optional and n not in implementation.outputs
        )
        if not absent:
            return self
        if absent not in self._narrowed:
            kept = {n: g for n, g in self.inputs.cotangents.items() if n not in absent}
            inputs = dataclasses.replace(self.inputs, cotangents=kept)
            self._narrowed[absent] = Bench(self.family, inputs, exact(self.family, _on_cpu(inputs)))
        return self._narrowed[absent]

    def replicas(self, recipe: Recipe, count: int, finer: bool = False) -> Quantities:
        """Replicas under a resolved recipe, computed once; with `finer` as many again that store nothing narrow."""
        key = (recipe, count, finer)
        if key not in self._replicas:
            if finer:
                both = self.replicas(recipe, count), self.replicas(recipe.stored_wide(), count)
                self._replicas[key] = {
                    n: torch.cat([q[n] for q in both]) if both[0][n].dim() > value.dim() else both[0][n]
                    for n, value in self.exact.items()
                    if n in both[0]
                }
            else:
                seed = zlib.crc32(self.inputs.case.id.encode())
                self._replicas[key] = replicas(self.family, _on_cpu(self.inputs), recipe, count, seed)
        return self._replicas[key]

    def unit(self, name: str, recipe: Recipe, count: int = REPLICAS, finer: bool = False) -> Unit:
        """What quantity `name` is measured with under a recipe; `finer` as in `replicas`."""
        found = self.replicas(recipe, count, finer)
        value = self.exact[name]
        stack = found[name]
        if stack.dim() == value.dim():  # no leaf reaches it: one value for all replicas
            stack = stack.expand(count, *value.shape)
        scalar = name in self.family.scalars
        gradient = name.startswith("grad_")
        first_order, terms = 0.0, 0.0
        if scalar and name == "loss" and "_slope" in self.exact:
            spread = (found["_logps"] - self.exact["_logps"]).square().mean(0)
            first_order = float((self.exact["_slope"].square() * spread).nan_to_num().sum().sqrt())
        if scalar and name == "loss" and "_terms" in self.exact:
            terms = float(self.exact["_terms"].norm()) * self.exact["_terms"].numel() ** 0.5
        return Unit(
            exact=value,
            replicas=stack,
            compute=recipe.elementwise,
            zero=self.family.zeros(self.inputs).get(name),
            entrywise=not gradient or value.dim() == 1,
            scalar=scalar,
            counted=name in self.family.exact,
            first_order=first_order,
            terms=terms,
        )

    def in_float32(self) -> Bench:
        """The same values with every parameter in float32, to tell logic from precision."""
        case = dataclasses.replace(self.inputs.case, dtype="fp32")
        tensors = {
            k: v.float() if v is not None and v.dtype in (torch.float16, torch.bfloat16) else v
            for k, v in self.inputs.tensors.items()
        }
        return Bench(self.family, dataclasses.replace(self.inputs, case=case, tensors=tensors), self.exact)


def _on(inputs: Inputs, device: str) -> Inputs:
    return inputs.replace(**{k: None if v is None else v.to(device) for k, v in inputs.tensors.items()})


def _on_cpu(inputs: Inputs) -> Inputs:
    return _on(inputs, "cpu")


def _kept(other: Inputs, like: Inputs) -> dict[str, torch.Tensor]:
    return {n: g for n, g in other.cotangents.items() if n in like.cotangents}


def expected(bench: Bench, implementation: Implementation, recipe: Recipe) -> dict[str, torch.dtype | None]:
    """Quantity -> dtype that it should have (None: any), for everything the implementation should hand out."""
    fam, inputs = bench.family, bench.inputs
    out: dict[str, torch.dtype | None] = {}
    for name in fam.outputs:
        if name in bench.exact and (name not in fam.optional or name in implementation.outputs):
            out[name] = None if inputs.settings.context == "autocast" else DTYPES.get(recipe.output)
    for leaf in inputs.leaves:
        out[gradient_name(leaf)] = inputs.tensors[leaf].dtype  # type: ignore[union-attr]
    return out


def judge_all(
    bench: Bench,
    implementation: Implementation,
    outcome: Outcome,
    recipe: Recipe,
    count: int = REPLICAS,
    finer: bool = False,
) -> dict[str, Judgement]:
    """Every quantity the implementation should hand out, judged; and each that it should not. `finer`: see `Bench`."""
    wanted = expected(bench, implementation, recipe)
    judged = {}
    for name, dtype in wanted.items():
        value = outcome.quantities.get(name)
        if value is None:
            judged[name] = failed("no gradient" if name.startswith("grad_") else "missing")
            continue
        judged[name] = judge(value, bench.unit(name, recipe, count, finer), dtype or value.dtype)
    for name in outcome.quantities:
        if name.startswith("grad_") and name not in wanted:
            judged[name] = failed("a gradient where none was asked for")
    return judged


def confirmed(bench: Bench, implementation: Implementation, outcome: Outcome) -> dict[str, Judgement]:
    """Judge; while something disagrees, be it by a finite amount or where replicas overflow, judge with more replicas.

    The last word has replicas among its own that store nothing narrow, for an implementation may be more precise than
    its recipe: where float16 flushes a gradient to 0 in every replica, their spread hides what float32 adds to it.
    """
    recipe = implementation.recipe_for(bench.inputs)
    judged = judge_all(bench, implementation, outcome, recipe)
    s = bench.inputs.settings
    size = s.V * max(s.B * s.T, s.H)  # the logits or the head, whichever a replica holds more of
    for count in (CONFIRMATION, max(CONFIRMATION, min(LAST_WORD, LAST_WORD_LOGITS // size))):
        if any(not j.agrees and (math.isfinite(j.headroom) or j.overflows) for j in judged.values()):
            judged = judge_all(bench, implementation, outcome, recipe, count)
    if recipe != recipe.stored_wide() and any(not j.agrees and math.isfinite(j.headroom) for j in judged.values()):
        finer = judge_all(bench, implementation, outcome, recipe, count, finer=True)
        judged = {name: finer[name] if finer[name].agrees else j for name, j in judged.items()}
    return judged


def classify(bench: Bench, implementation: Implementation, failing: Sequence[str]) -> dict[str, str]:
    """ "logic" for each quantity that float32 does not mend and no other float32 recipe explains, else "precision"."""
    narrow = bench.inputs.case.dtype != "fp32"
    precise = bench.in_float32() if narrow else bench
    outcome = execute(implementation, precise.inputs)
    if outcome.verdict == "ran":
        recipe = implementation.recipe_for(precise.inputs)
        if not narrow:  # tf32 is an explanation only where there is such a thing
            product = "tf32" if bench.inputs.hidden.is_cuda else "ieee"
            recipe = dataclasses.replace(recipe, matmul=product, matmul_backward=product, tanh="sigmoid")
        judged = judge_all(precise, implementation, outcome, recipe)
    else:  # it has no float32: would the coarsest recipe of its dtype explain it?
        judged = judge_all(
            bench, implementation, execute(implementation, bench.inputs), COARSEST.resolve(bench.inputs.case.dtype)
        )
    return {name: "precision" if name in judged and judged[name].agrees else "logic" for name in failing}


def followed_variant(
    bench: Bench, implementation: Implementation, outcome: Outcome, failing: Iterable[str]
) -> str | None:
    """The named variant of the definition that explains every failing quantity, or None.

    One that differs from the definition in none of them on this case explains nothing.
    """
    recipe = implementation.recipe_for(bench.inputs)
    for name, oracle in bench.family.variants.items():
        fam = dataclasses.replace(bench.family, oracle=oracle)
        cpu = _on_cpu(bench.inputs)
        other = Bench(fam, cpu, exact(fam, cpu))
        if all(q in bench.exact and torch.equal(other.exact[q], bench.exact[q]) for q in failing):
            continue
        judged = judge_all(other, implementation, outcome, recipe, CONFIRMATION)
        if all(q in judged and judged[q].agrees for q in failing):
            return name
    return None


def run_case(
    case: Case,
    implementations: Iterable[Implementation],
    device: str = "cpu",
    thorough: bool | Callable[[Implementation], bool] = True,
    announce: Callable[[Implementation], None] = lambda implementation: None,
) -> Iterator[Row]:
    """Rows of a case for each implementation, the reference first.

    `thorough` (or what it says of an implementation) adds the repeated calls of the protocol gate and the exact
    relations; `announce` is told of each
    implementation before it runs, so that a watcher knows whom to blame if the process does not come back.
    A case of a trainer check is run by `parity.trainers`.
    """
    from parity import trainers

    if trainers.is_trainer(case.family):
        from parity.trainers import execute as checks

        yield from checks.rows(case, implementations, device, announce)
        return
    bench = Bench.of(case, device)
    kept = protocol.copies(bench.inputs)
    reference: dict[str, Row] = {}
    against: str | None = None
    for implementation in sorted(implementations, key=lambda i: i.role != "reference"):
        announce(implementation)
        deep = thorough if isinstance(thorough, bool) else thorough(implementation)
        rows = list(_rows(bench.offered(implementation), implementation, deep))
        protocol.damaged(bench.inputs, kept)  # put back what an implementation changed: the next one gets the same bits
        for row in rows:
            if implementation.role == "reference":
                if row["verdict"] == "disagree":
                    row["blame"] = row["blame"] or "reference"
                if row["verdict"] in ("agree", "disagree"):
                    reference[row["quantity"]] = row
                    against = implementation.id
            else:
                row["against"] = against
                beside = reference.get(row["quantity"])
                row["value_reference"] = beside["value"] if beside else None
                if row["verdict"] == "disagree" and row["variant"] is None:
                    row["blame"] = "both" if beside and beside["verdict"] == "disagree" else "candidate"
            yield row


def skip_reason(implementation: Implementation, case: Case, settings: Any, device: str) -> str | None:
    """Why an implementation does not claim this case, before it is called."""
    missing = implementation.missing()
    if missing:
        return missing
    if case.dtype not in implementation.dtypes:
        return f"dtype {case.dtype} is not among {', '.join(sorted(implementation.dtypes))}"
    if (settings.context if settings.context != "tf32" else "plain") not in implementation.contexts:
        return f"context {settings.context} is not claimed"
    return interpreter_limit(case, settings) if implementation.interpreted and device == "cpu" else None


INTERPRETER_BLOCKS = 400


def interpreter_limit(case: Case, settings: Any) -> str | None:
    """Why Triton's interpreter cannot judge a kernel on this case: probed, or too many blocks for its pace."""
    from parity.implementations.interpreter import truncates_bfloat16

    if case.dtype == "bf16" and truncates_bfloat16():
        return "Triton's interpreter truncates to bfloat16 where hardware rounds"
    blocks = settings.B * settings.T * (1 + settings.V // 512)
    if blocks > INTERPRETER_BLOCKS or settings.V > 4 * 4096:
        return f"{blocks} blocks are too many for Triton's interpreter (at most {INTERPRETER_BLOCKS}): run it on CUDA"
    return None


def _rows(bench: Bench, implementation: Implementation, thorough: bool) -> Iterator[Row]:
    inputs = bench.inputs
    base = _base(bench, implementation)
    recipe = implementation.recipe_for(inputs)
    reason = skip_reason(implementation, inputs.case, inputs.settings, inputs.hidden.device.type)
    if reason:
        yield base | {"verdict": "unsupported", "message": reason}
        return
    outcome, leaks = protocol.watched(implementation, inputs)
    if leaks:  # a first call imports and caches; what an implementation leaves behind it leaves again
        leaks = [leak for leak in protocol.watched(implementation, inputs)[1] if leak in leaks]
    if outcome.verdict != "ran":
        yield base | {"verdict": outcome.verdict, "message": outcome.message, "blame": outcome.blame}
        return
    judged = confirmed(bench, implementation, outcome)
    failing = [name for name, j in judged.items() if not j.agrees]
    variant = followed_variant(bench, implementation, outcome, failing) if failing else None
    again = None
    if failing:
        second = execute(implementation, inputs)
        again = confirmed(bench, implementation, second) if second.verdict == "ran" else {}
    if thorough and not failing and recipe.describe() != "fp32":
        finer = judge_all(bench, implementation, outcome, dataclasses.replace(IEEE_FP32, output=recipe.output))
        base["recipe_measured"] = "fp32" if all(j.agrees for j in finer.values()) else recipe.describe()
    classes = classify(bench, implementation, failing) if failing else {}
    for name, j in judged.items():
        row = base | _judged_row(bench, implementation, name, j, outcome)
        if not j.agrees:
            assert again is not None
            flaky = name not in again or again[name].agrees
            row["verdict"] = "nondeterministic" if flaky else "disagree"
            row["class"] = classes[name]
            row["variant"] = variant
            row["message"] = "; ".join(filter(None, [j.message, *hints.hints(bench, name, outcome)]))
        yield row
    if thorough:
        other = bench.family.build(dataclasses.replace(inputs.case, seed=inputs.case.seed + 1))
        other = dataclasses.replace(_on(other, inputs.hidden.device.type), cotangents=_kept(other, inputs))
        leaks += protocol.repeated(implementation, inputs, other, outcome)
        leaks += protocol.accumulation(implementation, inputs)
        for name, (holds, message) in protocol.relations(bench.family, implementation, inputs, outcome).items():
            yield base | _logic_row(f"relation: {name}", "relation", holds, message)
    yield base | _logic_row("protocol", "protocol", not leaks, "; ".join(leaks))


def _base(bench: Bench, implementation: Implementation) -> Row:
    inputs = bench.inputs
    return empty_row(inputs.case, implementation.id, inputs.hidden.device.type) | {
        "role": implementation.role,
        "recipe": implementation.recipe_for(inputs).describe(),
        "undecided": inputs.undecided,
    }


def empty_row(case: Case, implementation: str, device: str) -> Row:
    """A row of the results contract in which nothing has been judged yet."""
    fam = family(case.family)
    s = fam.full_settings(case)
    shapes = {k: getattr(s, k) for k in ("B", "T", "V", "H") if hasattr(s, k)}
    return {
        "case": case.id,
        "family": case.family,
        "implementation": implementation,
        "role": "candidate",
        "against": None,
        "quantity": None,
        "dtype": case.dtype,
        "device": device,
        "verdict": None,
        "class": None,
        "blame": None,
        "gate": None,
        "headroom": None,
        "gates": {},
        "recipe": None,
        "recipe_measured": None,
        "variant": None,
        "undecided": 0,
        "value": None,
        "value_oracle": None,
        "value_reference": None,
        "max_abs": None,
        "max_rel": None,
        "dist": None,
        "allclose": None,
        "atol": None,
        "rtol": None,
        "slope": None,
        "worst": [],
        "known": None,
        "seed": case.seed,
        "settings": dict(case.settings) | shapes,
        "features": dict(fam.features(case)),
        "message": "",
        "replay": f"parity replay {case.id} --implementation {implementation}",
    }


def _judged_row(bench: Bench, implementation: Implementation, name: str, j: Judgement, outcome: Outcome) -> Row:
    value = outcome.quantities.get(name)
    truth = bench.exact.get(name)
    return {
        "quantity": name,
        "verdict": "agree" if j.agrees else "disagree",
        "gate": j.gate,
        "headroom": _finite(j.headroom),
        "gates": {k: _finite(v) for k, v in j.gates.items()},
        "undecided": bench.inputs.undecided + j.undecided,
        "value": _size(value),
        "value_oracle": _size(truth),
        "max_abs": _finite(j.max_abs),
        "max_rel": _finite(j.max_rel),
        "dist": _finite(j.dist),
        "allclose": j.allclose,
        "atol": _finite(j.atol),
        "rtol": _finite(j.rtol),
        "worst": [] if j.agrees else [_entry(bench, name, *w) for w in j.worst],
        "slope": _finite(j.slope),
        "message": j.message,
    }


def _logic_row(quantity: str, gate: str, holds: bool, message: str) -> Row:
    return {
        "quantity": quantity,
        "verdict": "agree" if holds else "disagree",
        "class": None if holds else "logic",
        "gate": gate,
        "headroom": 0.0 if holds else None,
        "gates": {gate: 0.0 if holds else None},
        "message": message,
    }


def _size(value: torch.Tensor | None) -> float | None:
    """A scalar's value, a tensor's norm."""
    if value is None:
        return None
    value = value.detach().double()
    return _finite(float(value) if value.dim() == 0 else float(value.norm()))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _entry(bench: Bench, name: str, index: tuple[int, ...], value: float, truth: float, error: float) -> Row:
    """One of the worst entries, decoded to sequence, position, token id and mask where it belongs to a token."""
    inputs = bench.inputs
    out: Row = {"index": list(index), "value": _finite(value), "oracle": _finite(truth), "error": _finite(error)}
    if name in ("logps", "entropy", "grad_hidden") and len(index) >= 2:
        b, t = index[0], index[1]
        token = int(inputs.ids[b, t])
        mask = inputs.tensors.get("mask")
        masked = token < 0 if mask is None else not bool(mask[b, t])
        out |= {"sequence": b, "position": t, "token": token, "masked": masked}
    elif name in ("grad_weight", "grad_bias") and index:
        out |= {"token": index[0]}
    return out


def compared(row: Row) -> bool:
    """Whether a row is a judged comparison."""
    return row["verdict"] in ("agree", "disagree", "nondeterministic")
