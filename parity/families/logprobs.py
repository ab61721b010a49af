"""Family `logprobs`: selected log-probabilities and entropy from hidden states x LM head.

Definition: logp = z[id] - L, L = logsumexp(z), entropy = -Σ p log p, with logits z = c·tanh(k·(W h + b)/c)/τ, c the softcap and k
the scale. With label smoothing s and a z-loss w it is minus that cross entropy: (1 - s)·(z[id] - L) + s·(mean z - L) - w·L²
(torch.nn.functional.cross_entropy; PaLM, Chowdhery et al. 2022, section 5). Positions whose id is -100 are ignored: their
value is 0 and they have no gradient (torch.nn.functional.cross_entropy, `ignore_index`).
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import torch

from parity.case import layouts
from parity.case.case import Case
from parity.case.family import Family, Relation
from parity.case.inputs import Inputs, Setting, product_dtype
from parity.case.layouts import arranged, like
from parity.errors import UsageError
from parity.families import head, stored_tensors
from parity.families.head import IGNORE_INDEX
from parity.judge.recipe import DTYPES, LARGEST
from parity.judge.stages import log_softmax_again

SETTINGS = head.SETTINGS | {
    "ignored": Setting("none", "positions with id -100", ("none", "some", "row", "all")),
    "chunk_size": Setting(None, "vocabulary entries a chunk, for implementations that chunk; none: their default"),
    "smoothing": Setting(0.0, "label smoothing s", within="[0, 1]", few=(0.1, 0.03, 0.5, 1.0)),
    "z_loss": Setting(0.0, "coefficient c of the squared log-sum-exp", within="[0, inf)", few=(1e-4, 1e-3, 1e-2)),
    "entropy": Setting("none", "entropy asked for: its value, or its gradient too", ("none", "value", "gradient")),
    "rare": Setting(
        None,
        "each block of 128 ids beyond the first has eps/rare of the dtype for its largest probability; none: as drawn",
        within="(0, inf)",
    ),
}
MANY_CHUNKS = 5000
"""Vocabulary from which on chunks of 5 would be more than a thousand: seconds for each implementation."""
RARE_BLOCK = 128
RARE = tuple(30 * 2 ** (k / 2) for k in range(1, -5, -1))
"""Divisors of eps in half octaves, off the round numbers where thresholds of a gradient filter stand."""
PLAIN = ("ignored", "entropy", "peak", "head_dtype", "ids_dtype", "layout", "layouts", "cotangent")
"""Settings that half of the cases with a rare block leave alone: of kernels that filter, few take them all."""


def draw(draw: Any, st: Any, dtype: str, profile: str, contexts: tuple[str, ...]) -> dict[str, Any]:
    pick = head.picking(draw, st)
    out = head.draw_head(draw, st, dtype, profile=profile, contexts=contexts)
    out["ignored"] = pick(*["none"] * 9, "some", "row", "all")
    out["chunk_size"] = pick(None, None, 5 if out["V"] < MANY_CHUNKS else 4096, 64, 1000)
    out["entropy"] = pick("none", "none", "value", "gradient")
    if pick(False, False, True):  # so that functions with few parameters meet the rest
        out |= {n: SETTINGS[n].default for n in ("softcap", "logit_scale", "bias", "ignored")}
        if out["grad"] == "bias":
            out["grad"] = "weight"
    one_chunk = out["chunk_size"] == 1000 >= out["V"]
    if one_chunk and out["bias"] == "banned":  # a size that says nothing: often no other token is left
        out |= {n: SETTINGS[n].default for n in ("temperature", "softcap", "logit_scale", "ignored")}
        out |= {"B": 1, "T": 1, "V": 2}
    out["cotangent"] = pick(*["random"] * 3, *["fine"] * 2, "ones", "zero", "scaled", "small", "sparse")
    plain = out["cotangent"] == "random" and out["layouts"] in ("contiguous", "mixed")
    if plain and out["B"] > 1 and out["T"] > 1 and head.one_in(2, out):
        out["cotangent"] = "rows"
    if dtype != "fp32" and draw(st.integers(0, 15)) == 15:
        out |= {n: SETTINGS[n].default for n in pick(PLAIN, ())}
        out["rare"] = round(pick(*RARE), 4)
    return canonical(dtype, out)


def canonical(dtype: str, out: dict[str, Any]) -> dict[str, Any]:
    """Settings of a case, with those at their defaults that say nothing beside the others: what moves the logits of a rare
    block would make it common."""
    if dtype == "fp32":
        out["rare"] = None
    if out.get("smoothing") and out["bias"] == "banned":  # every token counts: the loss would be infinite
        out["bias"] = "random"
    if out.get("rare") is not None:
        moving = ("temperature", "softcap", "logit_scale", "bias", "level", "padded_rows", "smoothing", "z_loss")
        out |= {n: SETTINGS[n].default for n in moving}
        out |= {"B": 1, "T": min(out["T"], 4), "V": 2 * RARE_BLOCK, "H": min(out["H"], 16), "targets": "likely"}
        if "weight" not in out["grad"]:
            out["grad"] = "hidden weight"
    return head.canonical(dtype, out)


def _with_rare_blocks(case: Case, s: SimpleNamespace, tensors: dict[str, Any]) -> None:
    """Exchange hidden states and head: the first hidden unit is 1 at every token, and the head's weights of it lower each
    block of 128 ids beyond the first until its largest probability, over all tokens, is eps/rare."""
    hidden, weight, ids = tensors["hidden"], tensors["weight"], tensors["ids"]
    p = torch.finfo(DTYPES[case.dtype]).eps / s.rare
    hidden, weight = hidden.clone(), weight.clone()
    hidden[..., 0] = 1.0
    z = (hidden.double() @ weight.double().T).flatten(0, 1)
    block = torch.arange(s.V) // RARE_BLOCK
    for k in range(1, int(block[-1]) + 1):
        inside = block == k
        # without what these blocks add to the partition, V·p at most
        over = (z[:, inside].amax(-1) - z[:, block == 0].logsumexp(-1)).amax()
        weight[inside, 0] = (weight[inside, 0].double() + math.log(p) - float(over)).to(weight.dtype)
    tensors["ids"] = (hidden.double() @ weight.double().T).argmax(-1).to(ids.dtype)
    tensors["hidden"], tensors["weight"] = layouts.laid_out(hidden.contiguous(), s.layout), weight


def build(case: Case) -> Inputs:
    """The inputs of a case, on the CPU. Raises UsageError for settings outside their range."""
    s = FAMILY.full_settings(case)
    head.check(s, case)
    if s.smoothing and s.bias == "banned":
        raise UsageError(f"case {case.id}: smoothing={s.smoothing!r} needs a bias without banned tokens")
    if case.tensors:
        return stored_tensors.inputs(FAMILY, case).replace(ignore_index=None)
    tensors = head.build(case, s)
    if s.rare is not None:
        _with_rare_blocks(case, s, tensors)
    tensors["ids"] = tensors["ids"].masked_fill(head.ignored(case, s), IGNORE_INDEX)
    shape = (s.B, s.T)
    cotangents = {"logps": head.cotangent(case, s, "logps", shape)}
    if s.entropy == "gradient":
        cotangents["entropy"] = head.cotangent(case, s, "entropy", shape)
    tensors["ignore_index"] = None  # offered by name to functions that take it; a constant, not a tensor
    return arranged(head.inputs(case, s, tensors, head.leaves(s), cotangents))


def oracle(x: Inputs) -> dict[str, torch.Tensor]:
    """logps and entropy, (…, B, T)."""
    z = head.logits(x)
    all_logps = head.log_softmax(x, z)
    ignored = x.ids == IGNORE_INDEX
    logps, s = head.selected(x, all_logps), x.settings
    if s.smoothing:
        logps = (1 - s.smoothing) * logps + s.smoothing * all_logps.mean(-1).unflatten(-1, ignored.shape)
    if s.z_loss:
        logps = logps - s.z_loss * head.log_partition(z, all_logps).square().unflatten(-1, ignored.shape)
    out = {"logps": logps.masked_fill(ignored, 0.0)}
    if x.settings.entropy != "none":
        out["entropy"] = head.entropy(x, z, log_softmax_again(z, all_logps)).masked_fill(ignored, 0.0)
    return out


def zeros(x: Inputs) -> dict[str, torch.Tensor]:
    """Ignored positions: exactly zero value and exactly zero gradient of their hidden states."""
    ignored = x.ids == IGNORE_INDEX
    return {"logps": ignored, "entropy": ignored, "grad_hidden": ignored}


def features(case: Case) -> dict[str, Any]:
    """Facts for coverage and ledger scopes besides the settings themselves."""
    s = FAMILY.full_settings(case)
    capped = s.softcap is not None  # a cap makes what is infinite finite again, a ban too
    banned = s.bias == "banned" and not capped
    overflow = product_dtype(case, s) == "fp16" and (
        min(head.largest(s), s.softcap / s.temperature) if capped else head.largest(s)
    )
    found = head.features(case, s)
    return found | {
        "nearly equal": found["nearly equal"] and s.rare is None,
        "one token": s.B * s.T == 1,
        "V off block": s.V % 256 != 0,
        "a ban": banned,
        "a log-prob of -inf": banned or 2 * overflow > LARGEST["fp16"],  # from the largest to the smallest
        "logit_std": max(s.peak, 4.0 if s.rare is not None else 0.0) * s.logit_scale / s.temperature,
    }


def parameters(x: Inputs) -> set[str]:
    """The tensors, and what moves the value: temperature, softcap, scale, smoothing, z-loss, bias, ignored labels."""
    names = ("temperature", "softcap", "logit_scale", "smoothing", "z_loss")
    needed = head.needed(x, SETTINGS, names, ("bias",))
    return needed | ({"ignore_index"} if x.settings.ignored != "none" else set())


def _zero_cotangents(x: Inputs) -> Inputs | None:
    return dataclasses.replace(x, cotangents={k: like(torch.zeros_like(g), g) for k, g in x.cotangents.items()})


FAMILY: Family = Family(
    name="logprobs",
    settings=SETTINGS,
    build=build,
    oracle=oracle,
    outputs={"logps": "required", "entropy": "optional"},
    zeros=zeros,
    features=features,
    parameters=parameters,
    draw=draw,
    canonical=canonical,
    stored=stored_tensors.HEAD,
    derived=lambda tensors, where: stored_tensors.of_labels(FAMILY, tensors, where),
    relations={
        "cotangent x2": head.LINEAR,
        "cotangent 0": Relation(_zero_cotangents, dict.fromkeys(head.GRADIENTS, 0.0), "no upstream gradient, none"),
    },
)
