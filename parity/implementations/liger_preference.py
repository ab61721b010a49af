"""Liger's chunked preference losses: DPO, CPO, SimPO, ORPO and KTO on hidden states and LM head, eager."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.families.preference import KTO_PARTS, PARTS
from parity.implementations import plain
from parity.implementations.implementation import Outputs, implementation
from parity.implementations.liger import NO_SCALE, NO_SOFTCAP
from parity.implementations.liger_grpo import NEEDED
from parity.implementations.limits import ONE_DTYPE, Limit, accepted, fitting, only, taking
from parity.implementations.trl_preference import UNSMOOTHED
from parity.judge.recipe import Recipe

MODULE = "liger_kernel.chunked_loss"
Wanted = Mapping[str, tuple[Any, Any]]


def _chunks(x: Inputs) -> Recipe:
    """Logits in the dtype of the inputs, float32 from their log-softmax on (under autocast from a bias on); gradients are
    taken in the forward pass, those of the chunks summed in the dtype of the head."""
    dtype = plain.head_dtype(x)
    logits, bias = x.autocast or dtype, dtype if x.autocast else None
    return Recipe(logits=logits, dlogits=logits, bias=bias, accumulate=dtype, partials=x.settings.B, **plain.late(x))


def _offer(kind: str, wanted: Callable[[Any], Wanted], *limits: Limit) -> None:
    """Register `KIND(compiled=False)` as `liger.KIND`: its constructor takes `wanted` of the settings."""

    def call(x: Inputs) -> Outputs:
        made, s = accepted(f"{MODULE}:{kind}"), x.settings
        loss = made(ignore_index=IGNORE_INDEX, compiled=False, **taking(made, wanted(s)))
        ids = x.ids.long()
        reference = (x.ref_hidden, x.ref_weight, x.ref_bias)
        if s.method == "kto":
            kl = torch.tensor(s.kl, device=x.device) if s.loss_type == "kto" and s.kl else None
            value, (*logps, _, _, chosen, rejected) = loss(x.hidden, x.weight, ids, x.bias, x.labels, *reference, kl=kl)
            return {"loss": value} | dict(zip(KTO_PARTS, (*logps, chosen, rejected), strict=True))
        other = reference if s.method == "dpo" else ()
        again = s.method == "orpo" and x.case.seed % 2  # the labels of the likelihood, which they are without
        labels = taking(made.forward, {"nll_target": (own := ids.contiguous(), own)}) if again else {}
        value, (chosen, rejected, _, _, nll, *rewards) = loss(x.weight, x.hidden, ids, x.bias, *other, **labels)
        parts = dict(zip(PARTS, (chosen, rejected, nll, *rewards[:2]), strict=True))
        return {"loss": value} | {n: part for n, part in parts.items() if n != "nll_loss" or s.nll}

    implementation(
        f"liger.{kind.removeprefix('Liger')}",
        family="preference",
        library="liger-kernel",
        recipe=_chunks,
        outputs=frozenset({*PARTS, *KTO_PARTS}),
        contexts=frozenset({"plain", "autocast", "checkpoint"}),
        sources=(f"{MODULE}.{kind}",),
        limits=(
            *limits,
            only("no temperature parameter", lambda s: s.temperature == 1.0),
            NO_SOFTCAP,
            NO_SCALE,
            ONE_DTYPE,
            fitting(f"{MODULE}:{kind}", wanted),
        ),
    )(call)


def _common(s: Any) -> dict[str, tuple[Any, Any]]:
    return {"beta": (s.beta, NEEDED), "chunk_size": (s.chunk_size, 1)}


def _nll(s: Any) -> dict[str, tuple[Any, Any]]:
    return {"compute_nll_loss": (s.nll != 0.0, NEEDED), "alpha": (s.nll or 1.0, 1.0)}


def _method(name: str) -> Limit:
    return only(f"{name} only", lambda s: s.method == name)


_offer(
    "LigerFusedLinearDPOLoss",
    lambda s: (
        _common(s)
        | _nll(s)
        | {
            "use_ref_model": (s.reference == "head", NEEDED),
            "average_log_prob": (s.average, False),
            "loss_type": (s.loss_type, "sigmoid"),
            "label_smoothing": (s.smoothing, 0.0),
            "discopop_tau": (s.tau, 0.05),
        }
    ),
    _method("dpo"),
    UNSMOOTHED,
    only("no such loss type", lambda s: s.loss_type not in ("ipo", "aot", "aot_unpaired", "sigmoid_norm")),
    only("no f-divergence", lambda s: s.divergence == "reverse_kl"),
    only("no ld_alpha", lambda s: s.ld_alpha == 1.0),
    only("no weights of pairs", lambda s: not s.weighting),
)
_offer(
    "LigerFusedLinearCPOLoss",
    lambda s: _common(s) | _nll(s) | {"average_log_prob": (s.average, False), "label_smoothing": (s.smoothing, 0.0)},
    _method("cpo"),
    only("no such loss type", lambda s: s.loss_type == "sigmoid"),
)
_offer(
    "LigerFusedLinearSimPOLoss",
    lambda s: _common(s) | _nll(s) | {"gamma": (s.gamma, NEEDED), "label_smoothing": (s.smoothing, 0.0)},
    _method("cpo"),
    only("no such loss type", lambda s: s.loss_type == "simpo"),
)
_offer(
    "LigerFusedLinearORPOLoss",
    lambda s: _common(s) | {"compute_nll_loss": (s.nll != 0.0, NEEDED)},
    _method("orpo"),
    only("the likelihood has no weight", lambda s: s.nll in (0.0, 1.0)),
)
_offer(
    "LigerFusedLinearKTOLoss",
    lambda s: _common(s) | {"use_ref_model": (s.reference == "head", NEEDED), "average_log_prob": (s.average, False)},
    _method("kto"),
    only("no such loss type", lambda s: s.loss_type == "kto"),
    only("no weights of the labels", lambda s: s.desirable == s.undesirable == 1.0),
)
