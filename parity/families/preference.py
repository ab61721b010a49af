"""Family `preference`: losses on pairs of completions (DPO, CPO, SimPO, ORPO) or on completions with a label (KTO), from
hidden states x LM head to one scalar.

Definitions: `preference_losses`, of log-probs summed over the tokens whose id is not -100 (`average`: their mean). The first
half of the B sequences is chosen, the other rejected. The loss is the mean over pairs, with `nll` times minus the mean
log-prob of the chosen tokens. A KTO loss is the mean over sequences.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.case import Case
from parity.case.family import Family, Kind
from parity.case.inputs import Inputs, Setting
from parity.case.layouts import arranged
from parity.errors import UsageError
from parity.families import head
from parity.families.head import IGNORE_INDEX
from parity.families.preference_losses import AVERAGED, CDPO, DIVERGENCES, DPO, SCORED, Pairs, cpo, log_odds, unpaired
from parity.judge.recipe import DTYPES
from parity.judge.stages import of_teacher
from parity.judge.values import normal, uniform

LOSS_TYPES = {
    "dpo": tuple(name for name in DPO if name != "sft"),
    "cpo": ("sigmoid", "hinge", "ipo", "simpo"),
    "orpo": ("sigmoid",),
    "kto": ("kto", "apo_zero_unpaired"),
}
"""Method -> its loss types."""
SMOOTHED = {"dpo": ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"), "cpo": ("sigmoid", "simpo")}
PER_TOKEN = {"dpo": ("ipo", "sigmoid_norm"), "cpo": AVERAGED}
"""Method -> loss types that are of means by definition."""

SETTINGS = head.SETTINGS | {
    "B": Setting(2, "sequences, at least 1; of pairs the first half is chosen, the second rejected", size="rows"),
    "method": Setting("dpo", "how completions are compared", tuple(LOSS_TYPES)),
    "loss_type": Setting(
        "sigmoid", "loss of a pair or a completion", tuple(dict.fromkeys(sum(LOSS_TYPES.values(), ())))
    ),
    "beta": Setting(0.1, "β, times log-ratios; ORPO: times the odds ratio's loss", within="(0, inf)"),
    "average": Setting(
        False,
        "log-probs of a completion: the mean of its tokens, not their sum; of DPO but ipo and sigmoid_norm, of CPO's sigmoid and "
        "hinge, and of KTO; the others are of means",
        (False, True),
    ),
    "nll": Setting(0.0, "weight of the chosen tokens' negative log-likelihood"),
    "smoothing": Setting(
        0.0, "share ε of labels taken to be wrong; TRL and Liger have none in DPO's sigmoid", within="[0, 0.5)"
    ),
    "gamma": Setting(0.5, "margin of SimPO"),
    "tau": Setting(0.05, "temperature of discopop", within="(0, inf)"),
    "divergence": Setting("reverse_kl", "DPO: f of f-DPO", DIVERGENCES),
    "alpha": Setting(
        0.5, "α of alpha_divergence, (1 - u^-α)/α as in f-DPO's paper; TRL 1.16's is 1 - α", within="(0, inf)"
    ),
    "ld_alpha": Setting(1.0, "DPO: weight of the tokens behind the shorter completion's length (LD-DPO)"),
    "weighting": Setting(False, "DPO: a pair times its WPO weight", (False, True)),
    "reference": Setting("head", "the reference's hidden states and head, or none: log-probs 0", ("head", "none")),
    "gap": Setting("near", "reference beside policy: independent, close, the same", ("apart", "near", "equal")),
    "labels": Setting("mixed", "KTO: which completions are desirable", ("mixed", "all", "none")),
    "kl": Setting(0.0, "KTO: z, subtracted from log-ratios; no gradient goes through it"),
    "desirable": Setting(1.0, "KTO: weight λ_D"),
    "undesirable": Setting(1.0, "KTO: weight λ_U"),
    "ignored": Setting("some", "positions with id -100, one at least of each sequence is kept", ("none", "some")),
    "chunk_size": Setting(1, "pairs (KTO: sequences) a chunk, for implementations that chunk"),
}
WIRING = ("softcap", "logit_scale", "temperature")
"""Settings that no preference loss has a parameter for."""
LARGEST_RATIO = 30.0
"""Log-ratio whose exponential, squared and times a few factors, float32 holds."""
PARTS = ("chosen_logps", "rejected_logps", "nll_loss", "chosen_rewards", "rejected_rewards")
KTO_PARTS = ("chosen_logps_sum", "rejected_logps_sum", "chosen_rewards_sum", "rejected_rewards_sum")
"""Of KTO, over the desirable completions and over the others."""
OUTPUTS: dict[str, Kind] = {"loss": "required", **dict.fromkeys((*PARTS, *KTO_PARTS), "optional")}


def draw(draw: Any, st: Any, dtype: str, profile: str, contexts: tuple[str, ...]) -> dict[str, Any]:
    """Settings of one case; every dimension independently, so that they combine."""
    pick = head.picking(draw, st)
    out = head.draw_head(draw, st, dtype, profile=profile, contexts=contexts)
    out["method"] = pick("dpo", "dpo", "dpo", "dpo", "cpo", "cpo", "orpo", "kto", "kto")
    out |= {
        "loss_type": pick(*LOSS_TYPES[out["method"]]),
        "beta": draw(head.number(st, 0.0005, 64.0, 0.1, 0.05, 0.5, 1.0)),
        "average": pick(False, False, True) or (out["T"] > 256 and dtype == "bf16"),  # which counts no further
        "nll": pick(0.0, 0.0, 1.0, 0.4),
        "smoothing": pick(0.0, 0.1, 0.3, 0.001, 0.49),
        "gamma": draw(head.number(st, 0.05, 32.0, 0.5, 1.0, 0.0)),
        "tau": draw(head.number(st, 0.01, 2.0, 0.05)),
        "reference": pick("head", "head", "head", "none"),
        "gap": pick("near", "near", "apart", "equal"),
        "labels": pick("mixed", "mixed", "mixed", "all", "none"),
        "kl": pick(0.0, 0.3, 4.0),
        "desirable": pick(1.0, 1.0, 0.7),
        "undesirable": pick(1.0, 1.0, 1.3),
        "ignored": pick("some", "some", "none"),
        "chunk_size": pick(1, 1, 2, 3),
        "cotangent": pick("ones", "ones", "ones", "random", "fine", "zero", "scaled", "small"),
    }
    if pick(True, True, True, False):
        out |= {name: SETTINGS[name].default for name in WIRING}
    out |= {
        "divergence": pick("reverse_kl", *DIVERGENCES),
        "alpha": pick(0.5, 0.3),
        "ld_alpha": pick(1.0, 1.0, 1.0, 0.4, 0.0),
        "weighting": pick(False, False, False, True),
    }
    if out["loss_type"] in ("aot", "aot_unpaired"):  # sorts one pair, or what has the reference's order, without effect
        more, gap = pick(1, 4, 4, 6), pick("apart", "apart", out["gap"])
        out |= {"B": max(out["B"], more if out["T"] <= 64 else 1), "gap": gap}
    return canonical(dtype, out)


def canonical(dtype: str, out: dict[str, Any]) -> dict[str, Any]:
    """Settings of a case, with those at their defaults that say nothing beside the others."""
    method = out["method"]
    if out["loss_type"] not in LOSS_TYPES[method]:
        out["loss_type"] = LOSS_TYPES[method][0]
    if method != "kto":
        out["B"] += out["B"] % 2
    silent = _silent(out)
    if out["loss_type"] == "exo_pair" and not out["smoothing"]:
        out["smoothing"] = 0.001  # as its paper recommends
    if method == "orpo":  # odds of a probability of 1 are infinite
        silent |= {"level", "logit_scale", "softcap", "temperature"}
        out |= {"peak": min(out["peak"], 4.0), "V": max(out["V"], 3)}
    out |= {name: SETTINGS[name].default for name in silent}
    if out["divergence"] in ("forward_kl", "alpha_divergence") and _farthest(out) > LARGEST_RATIO:
        out |= {"divergence": "js_divergence", "alpha": SETTINGS["alpha"].default}
    return head.canonical(dtype, out)


def _silent(s: dict[str, Any]) -> set[str]:
    """Settings that mean nothing beside the others."""
    method, loss = s["method"], s["loss_type"]
    silent = {"labels", "desirable", "undesirable"} if method != "kto" else {"nll"}
    silent |= {"kl"} if loss != "kto" else set()
    silent |= {"reference", "gap"} if method in ("cpo", "orpo") else {"gap"} if s["reference"] == "none" else set()
    silent |= {"smoothing"} if loss not in SMOOTHED.get(method, ()) else set()
    silent |= {"gamma"} if loss != "simpo" else set()
    silent |= {"tau"} if loss != "discopop" else set()
    silent |= {"ld_alpha", "weighting"} if method != "dpo" else set()
    silent |= {"weighting"} if loss in ("aot", "aot_unpaired") else set()  # order statistics are of no pair
    silent |= {"divergence"} if method != "dpo" or loss not in SCORED else set()
    silent |= {"alpha"} if "divergence" in silent or s["divergence"] != "alpha_divergence" else set()
    return silent | ({"average"} if method == "orpo" or loss in PER_TOKEN.get(method, ()) else set())


def _farthest(s: dict[str, Any]) -> float:
    """About the largest log-ratio of a completion: terms of either sign where the reference is near."""
    each = head.largest(SimpleNamespace(**s))
    near = s["gap"] != "apart" and s["reference"] == "head"
    return each / 16 * float(s["T"]) ** 0.5 if near else 2 * each * s["T"]


def build(case: Case) -> Inputs:
    """The inputs of a case, on the CPU. Tensors besides those of `head.build`: ref_hidden (B, T, H), ref_weight (V, H),
    ref_bias (V,) or None; labels (B,) bool. Raises UsageError for settings outside their range."""
    s = FAMILY.full_settings(case)
    head.check(s, case)
    if s.method != "kto" and s.B % 2:
        raise UsageError(f"case {case.id}: B={s.B} must be even, pairs of sequences")
    if s.loss_type not in LOSS_TYPES[s.method]:
        raise UsageError(f"case {case.id}: loss_type={s.loss_type!r} is none of {s.method}'s")
    if s.loss_type == "exo_pair" and s.smoothing < 1e-9:
        raise UsageError(f"case {case.id}: smoothing={s.smoothing} must be above 0 for exo_pair")
    tensors = head.build(case, s)
    tensors |= dict.fromkeys(("ref_hidden", "ref_weight", "ref_bias", "labels"))
    if s.reference == "head" and s.method in ("dpo", "kto"):
        states, weight = head.beside(case, s, tensors, "ref", s.H, s.V, s.peak)
        tensors |= {"ref_hidden": states.to(DTYPES[case.dtype]), "ref_weight": weight.to(tensors["weight"].dtype)}
        tensors["ref_bias"] = bias = tensors["bias"]
        if bias is not None and s.gap == "apart":  # of the same banned tokens, or a ratio were infinite
            tensors["ref_bias"] = bias + normal(case.seed, "ref_bias", bias.shape).to(bias)
    if s.method == "kto":
        labels = uniform(case.seed, "labels", (s.B,)) < {"mixed": 0.5, "all": 2.0, "none": -1.0}[s.labels]
        if s.labels == "mixed":
            labels[[0, -1]] = torch.tensor([True, False])
        tensors["labels"] = labels
    ignored = head.ignored(case, s)
    kept = (uniform(case.seed, "kept", (s.B,)) * s.T).long()
    ignored[torch.arange(s.B), kept] = False
    tensors["ids"] = tensors["ids"].masked_fill(ignored, IGNORE_INDEX)
    inputs = head.inputs(case, s, tensors, head.leaves(s), {"loss": head.of_a_loss(case, s)})
    return arranged(head.shared(inputs, "ref_"))


def oracle(x: Inputs) -> dict[str, torch.Tensor]:
    """The loss, (…), and its parts; `_logps` (…, B, T), `_terms` (…, pairs or B) are what it sums."""
    s, mask = x.settings, x.ids != IGNORE_INDEX
    counts = mask.sum(-1).double()
    table = head.log_softmax(x, head.logits(x))
    lp = head.selected(x, table).masked_fill(~mask, 0.0)
    weights = _weights(s, mask)
    sums = (lp * weights).sum(-1)
    per_token = sums / counts
    of_ref = torch.zeros(x.ids.shape[0], dtype=torch.float64, device=x.ids.device)
    if x.ref_hidden is not None:
        of = {"hidden": x.ref_hidden, "weight": x.ref_weight, "bias": x.ref_bias, "settings": s, "ids": x.ids}
        other: Any = SimpleNamespace(**of)
        with of_teacher("softmax"), torch.no_grad():
            of_other = torch.log_softmax(head.logits(other, of_teacher=True), -1)
            of_ref = (head.selected(other, of_other).masked_fill(~mask, 0.0) * weights).sum(-1)
    value, ref = (per_token, of_ref / counts) if s.average else (sums, of_ref)
    if s.method == "kto":
        z = torch.tensor(s.kl, dtype=torch.float64) if s.loss_type == "kto" else None
        terms = unpaired(value - ref, x.labels, s, z) / s.B
        rewards = s.beta * (value - ref)
        sums = [v.where(of, 0.0).sum(-1).detach() for v in (value, rewards) for of in (x.labels, ~x.labels)]
        return {"loss": terms.sum(-1), "_logps": lp, "_terms": terms} | dict(zip(KTO_PARTS, sums, strict=True))
    half = s.B // 2
    nll = -lp[..., :half, :].flatten(-2).sum(-1) / counts[:half].sum()

    def sides(of: torch.Tensor) -> list[torch.Tensor]:
        return [of[..., :half], of[..., half:]]

    if s.method == "dpo":
        pairs = CDPO[s.loss_type](Pairs(s, sides(value), sides(ref), sides(counts), nll))
    elif s.method == "cpo":
        value = per_token if s.loss_type in PER_TOKEN["cpo"] else value
        pairs = cpo(sides(value), SimpleNamespace(**vars(s), power=0.0), s.loss_type)
    else:
        value = per_token
        chosen, rejected = sides(log_odds(value))
        pairs = -s.beta * torch.nn.functional.logsigmoid(chosen - rejected)
    terms = (pairs + s.nll * nll.unsqueeze(-1)) / half
    if s.weighting and "weighting" not in _silent(vars(s)):
        terms = terms * math.prod(sides(_alignment(lp, table, mask)))
    parts = dict(zip(PARTS, (*sides(value), nll, *(s.beta * r for r in sides(value - ref))), strict=True))
    shown = {n: v.detach() for n, v in parts.items() if n != "nll_loss" or s.nll}
    return {"loss": terms.sum(-1), "_logps": lp, "_terms": terms} | shown


def _weights(s: SimpleNamespace, mask: torch.Tensor) -> torch.Tensor:
    """Weight of each token in its completion's sum, (B, T): `ld_alpha` behind as many tokens as the shorter completion of
    the pair has, else 1 (LD-DPO, arXiv 2409.06411, equation 10)."""
    if s.ld_alpha == 1.0 or s.method != "dpo":
        return torch.ones(mask.shape, dtype=torch.float64, device=mask.device)
    shared = mask.sum(-1).view(2, -1).amin(0).repeat(2)
    return torch.where(mask.cumsum(-1) > shared.unsqueeze(-1), s.ld_alpha, 1.0).double()


def _alignment(lp: torch.Tensor, table: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp of the mean over a completion's tokens of log p(token) - log Σ p², without gradient, (…, B) (WPO, arXiv 2406.11827,
    equation 2)."""
    of_policy = torch.logsumexp(2 * table.detach(), -1).unflatten(-1, mask.shape)
    return ((lp.detach() - of_policy).masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1)).exp()


def features(case: Case) -> dict[str, Any]:
    """Facts for coverage and ledger scopes besides the settings themselves."""
    s = FAMILY.full_settings(case)
    facts = {"one pair": s.method != "kto" and s.B == 2, "per token": s.average}
    facts |= {"weighted relu or likelihood": s.weighting and (s.loss_type == "hinge" or s.nll > 0)}
    return head.features(case, s) | facts


def parameters(x: Inputs) -> set[str]:
    s = x.settings
    words = "method loss_type beta average nll smoothing gamma tau divergence alpha ld_alpha weighting kl desirable undesirable"
    names = set(words.split()) - (_silent(vars(s)) - {"average"}) | {*WIRING}  # some divide the means again
    return head.needed(x, SETTINGS, names, ("bias", "ref_hidden", "labels")) | {"beta"}


FAMILY: Family = Family(
    name="preference",
    settings=SETTINGS,
    build=build,
    oracle=oracle,
    outputs=OUTPUTS,
    zeros=head.unlabelled,
    features=features,
    parameters=parameters,
    draw=draw,
    canonical=canonical,
    relations={"cotangent x2": head.LINEAR},
)
