"""Hints at a cause: patterns in an error, and the recipe that an author may have meant and did not declare."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from parity.case.inputs import Inputs
from parity.implementations.implementation import Implementation
from parity.judge.escalation import REPLICAS
from parity.judge.gates import Judgement
from parity.judge.hints import NEARLY_ALL, PLACE, patterns
from parity.judge.recipe import TF32, TF32_TRUNCATED
from parity.judge.undeclared import Explaining
from parity.judging.assess import CaseOracle, judged
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome

LARGE, SMALL = 0.03, 1e-3
"""Shares of the largest row's error: above the first a row is wrong, below the second right; between them nothing is said."""
SEVERAL = 0.25
"""Share of the ids that stand once, for their rows to be a sign that those of the others are wrong."""
EXPLAINED = 8.0
"""An error is tf32's where it is this many times smaller against the definition with operands on tf32's grid."""


def hints(
    oracle: CaseOracle,
    name: str,
    outcome: Outcome,
    worst: Sequence[int] = (),
    implementation: Implementation | None = None,
) -> list[str]:
    """Sentences about one failing quantity, `worst` the index of its worst entry; empty where no pattern has a name. That of an
    `implementation` may be told by another call."""
    value, truth = outcome.quantities.get(name), oracle.exact.get(name)
    if value is None or truth is None or value.shape != truth.shape:
        return []
    value = value.detach().cpu()
    v, o = value.double(), truth.double()
    if not bool(torch.isfinite(v).all()):
        loss = outcome.quantities.get(oracle.family.first)
        of_finite = name.startswith("grad_") and loss is not None and bool(torch.isfinite(loss).all())
        return ["the value is finite, but its gradient is not"] if of_finite else []
    out = patterns(value, o, _factors(oracle.inputs), worst) if o.numel() else []
    out += _tf32(oracle, name, v, o) + _through(oracle, name, implementation)
    mask = oracle.inputs.tensors.get("mask")
    if mask is not None and v.dim() >= 2 and v.shape[:2] == mask.shape:
        error = (v - o).abs().flatten(2).sum(-1) if v.dim() > 2 else (v - o).abs()
        hidden = ~mask.cpu().bool()
        if bool(hidden.any()) and float(error[hidden].sum()) > 0.5 * float(error.sum()):
            out.append("the error sits on masked tokens")
    where = _where(oracle, v, o)
    return [one for one in out if not where or not one.startswith(PLACE)] + where


def _through(oracle: CaseOracle, name: str, implementation: Implementation | None) -> list[str]:
    """A teacher's or reference's tensor that is the student's, where the gradient is right once they are two of the same bits:
    plain torch sends a gradient through it unless it is detached."""
    others = [other for other, own in oracle.inputs.shared.items() if name == f"grad_{own}"]
    if not others or implementation is None:
        return []
    apart = execute(implementation, dataclasses.replace(oracle.inputs, shared={}))
    found = judged(oracle, implementation, apart, only=[name], most=REPLICAS) if apart.verdict == "ran" else {}
    right = name in found and found[name].agrees
    return [f"{others[0]} is the same tensor here: no gradient goes through it by definition"] if right else []


def _where(oracle: CaseOracle, v: torch.Tensor, o: torch.Tensor) -> list[str]:
    """The rows that are wrong, where all others are right: those of an id that repeats, or those from one on."""
    ids = oracle.inputs.tensors.get("ids")
    by_token = ids is not None and v.shape[:2] == ids.shape
    if ids is None or v.dim() == 0 or not (by_token or len(v) == getattr(oracle.inputs.settings, "V", None)):
        return []
    ids = ids.cpu().long().flatten()
    error = (v - o).abs().reshape(ids.numel() if by_token else len(v), -1).sum(-1)
    wrong, right = error > LARGE * error.max(), error < SMALL * error.max()
    if not bool((wrong | right).all()) or not bool(right.any()):
        return []
    uses = ids[ids >= 0].bincount(minlength=1 if by_token else len(v))
    times = torch.where(ids >= 0, uses[ids.clamp(min=0)], 0) if by_token else uses
    live = ((v != 0) | (o != 0)).reshape(len(error), -1).any(-1)
    again, once = live & (times > 1), live & (times == 1)
    every = int(wrong.sum()) >= NEARLY_ALL * int(again.sum())
    if every and bool((times[wrong] > 1).all()) and int(once.sum()) >= SEVERAL * int((again | once).sum()):
        return ["only where an id repeats"]
    first, what = int(wrong.int().argmax()), "token" if by_token else "row"
    if first >= 8 and bool((wrong | (by_token & (times == 0)))[first:].all()):
        return [f"only from {what} {first} on, the last {len(error) - first} of {len(error)}"]
    if by_token:  # of every sequence; a short one may not reach it
        late = wrong.view(v.shape[:2]).any(0)
        first = int(late.int().argmax())
        if first >= 8 and bool(late[first:].all()):
            return [f"only from position {first} on, the last {len(late) - first} of {len(late)}"]
    return []


def _tf32(oracle: CaseOracle, name: str, v: torch.Tensor, o: torch.Tensor) -> list[str]:
    """float32 products taken in tf32 where nothing allowed it, as `tl.dot` does unless it is told otherwise."""
    inputs = oracle.inputs
    if inputs.device.type != "cuda" or inputs.product_dtype != "fp32" or inputs.context == "tf32":
        return []
    for precision, said in ((TF32, "rounded"), (TF32_TRUNCATED, "truncated")):
        if EXPLAINED * float((v - oracle.cut(precision)[name]).norm()) <= float((v - o).norm()):
            return [f"tf32 although it is off: products of operands {said} to 10 bits are right"]
    return []


def _factors(x: Inputs) -> dict[str, float]:
    """Numbers by which a loss is off when one is forgotten or applied twice: its settings; those of a loss of an LM head, and
    the counts and weights that normalise it."""
    s = vars(x.settings)
    if not {"temperature", "logit_scale", "B", "T"} <= s.keys():
        found = {n: v for n, v in s.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        return {n.replace("_", " "): float(v) for n, v in found.items() if v and math.isfinite(v)}
    named = {"temperature": s["temperature"], "logit scale": s["logit_scale"], "B": s["B"], "T": s["T"], "-1": -1.0}
    extra = ("accumulation", "steps_per_generation", "max_completion_length", "beta", "epsilon")
    named |= {name: s[name] for name in extra if s.get(name)}
    named |= {"pairs": s["B"] / 2} if s.get("method", "kto") != "kto" else {}
    mask, items, ratio = (x.tensors.get(name) for name in ("mask", "num_items_in_batch", "importance_sampling_ratio"))
    if mask is not None and items is not None:
        tokens, window = float(mask.sum()), float(items)
        named |= {
            "the tokens of this micro-batch": tokens,
            "the tokens of the window": window,
            "tokens ÷ (B·T)": tokens / mask.numel(),
            "tokens ÷ window": tokens / max(window, 1.0),
            "B ÷ sequences with a loss token": len(mask) / max(float(mask.bool().any(-1).sum()), 1.0),
            "max_completion_length ÷ T": s["max_completion_length"] / mask.shape[-1],
        }
        if ratio is not None:
            named["1 ÷ mean importance ratio"] = 1 / max(float(ratio.mean()), 1e-30)
    return {name: float(value) for name, value in named.items()}


def undeclared(
    oracle: CaseOracle, implementation: Implementation, outcome: Outcome, judgements: Mapping[str, Judgement]
) -> list[str]:
    """The recipes under which every quantity agrees, the finest first; of a user's function alone."""
    if not implementation.is_function:
        return []
    recipe = implementation.recipe_for(oracle.inputs)
    dtype = oracle.inputs.product_dtype
    came = [v for v in map(outcome.quantities.get, oracle.family.outputs) if v is not None]
    narrow = dtype != "fp32" and recipe.output == "any" and any(v.dtype.itemsize < 4 for v in came)
    explaining = Explaining(
        recipe,
        dtype,
        lambda wider, names: judged(oracle, implementation, outcome, wider, only=names, most=REPLICAS),
        judgements,
        outcome.quantities,
        oracle.family.outputs,
        casts=any(oracle.inputs.tensors[n].dtype == torch.float32 for n in oracle.inputs.leaves),  # type: ignore[union-attr]
        tf32=oracle.inputs.device.type == "cuda",
        always={"output": "input"} if narrow else {},
        oracle=oracle.oracle,
    )
    return list(explaining.recipes())
