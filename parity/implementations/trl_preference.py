"""TRL's preference losses on given log-probs: CPO's and ORPO's functions, on log-probs by `get_batch_logps`, and the losses
of DPOTrainer and KTOTrainer on a model that returns stored hidden states."""

import collections
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.families.preference import PER_TOKEN
from parity.implementations import plain
from parity.implementations.implementation import EVERY_CONTEXT, Outputs, implementation
from parity.implementations.limits import Limit, accepted, only
from parity.implementations.trl import tiles
from parity.upstream import trl

FIELDS: dict[str, Any] = {"family": "preference", "role": "reference", "library": "trl"}
PLAIN: dict[str, Any] = FIELDS | {"recipe": plain.narrow, "contexts": EVERY_CONTEXT}
NO_NLL = only("the likelihood is the trainer's", lambda s: s.nll == 0.0)
UNSMOOTHED = only("DPO's sigmoid is not smoothed", lambda s: not (s.loss_type == "sigmoid" and s.smoothing))
NO_TEMPERATURE = only("no temperature parameter", lambda s: s.temperature == 1.0)


def _logps(kind: Any, x: Inputs, average: bool) -> list[torch.Tensor]:
    """Log-probs of chosen and rejected; TRL shifts the labels, so both get a position more."""
    z = plain.logits(x)
    z = torch.cat([z, torch.zeros_like(z[:, :1])], 1)
    ids = torch.cat([torch.full_like(x.ids[:, :1], IGNORE_INDEX), x.ids], 1).long()
    return list(kind.get_batch_logps(z, ids, average_log_prob=average).chunk(2))


def _self(x: Inputs, **more: Any) -> Any:
    """What the losses read of their trainer, on one process."""
    s = x.settings
    alone = SimpleNamespace(device=x.device, gather=lambda value: value, gather_for_metrics=lambda value: value)
    return SimpleNamespace(beta=s.beta, label_smoothing=s.smoothing, accelerator=alone, **more)


@implementation(
    "trl.cpo_loss",
    sources=("trl.experimental.cpo.CPOTrainer.cpo_loss",),
    limits=(only("cpo only", lambda s: s.method == "cpo"), NO_NLL, NO_TEMPERATURE),
    **PLAIN,
)
def cpo_loss(x: Inputs) -> Outputs:
    """`CPOTrainer.cpo_loss`, averaged as the trainer averages it."""
    kind: Any = trl.class_named("CPOTrainer")
    s = x.settings
    chosen, rejected = _logps(kind, x, s.average or s.loss_type in PER_TOKEN["cpo"])
    own = _self(x, alpha=0.0, loss_type=s.loss_type, simpo_gamma=s.gamma)
    losses, *_ = kind.cpo_loss(own, chosen, rejected)
    return {"loss": losses.mean()}


@implementation(
    "trl.odds_ratio_loss",
    sources=("trl.experimental.orpo.ORPOTrainer.odds_ratio_loss",),
    limits=(only("orpo only", lambda s: s.method == "orpo"), NO_NLL, NO_TEMPERATURE),
    **PLAIN,
)
def odds_ratio_loss(x: Inputs) -> Outputs:
    """Minus the mean of `ORPOTrainer.odds_ratio_loss`, which the trainer subtracts from the likelihood's loss."""
    kind: Any = trl.class_named("ORPOTrainer")
    losses, *_ = kind.odds_ratio_loss(_self(x), *_logps(kind, x, average=True))
    return {"loss": -losses.mean()}


class _Model(torch.nn.Module):
    """A model whose backbone returns stored hidden states, under TRL's own fused LM head."""

    is_gradient_checkpointing = False

    def __init__(self, x: Inputs, prefix: str = ""):
        super().__init__()
        self.kl = 0.0 if prefix else x.settings.kl
        hidden, weight, bias = (getattr(x, prefix + name) for name in ("hidden", "weight", "bias"))
        text = SimpleNamespace(final_logit_softcapping=x.settings.softcap, logit_scale=x.settings.logit_scale)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        states = torch.nn.functional.pad(hidden, (0, 0, 0, 1))  # of the last token, which predicts nothing
        self.base_model = lambda **_: SimpleNamespace(last_hidden_state=states)
        self.get_output_embeddings = lambda: SimpleNamespace(weight=weight, bias=bias)
        more = ("entropy", "mean_logits", "is_top1", *(["log_sum_sq_probs"] if x.settings.weighting else []))
        accepted("trl.trainer.utils:add_fused_lm_head")(self, outputs=("log_probs", *more))


def _asked(x: Inputs, kind: Any, **more: Any) -> torch.Tensor:
    """Loss by `kind._compute_loss` of one micro-batch."""
    policy = _Model(x)
    reference = (
        _Model(x, "ref_")
        if x.settings.reference == "head"
        else lambda **_: SimpleNamespace(log_probs=torch.zeros(x.ids.shape, device=x.device))
    )
    ids = torch.cat([x.ids[:, :1], x.ids], 1).long()
    mask = (ids != IGNORE_INDEX).long()
    mask[:, 0] = 0
    own = _self(
        x,
        model=policy,
        ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=x.settings.tau),
        precompute_ref_logps=False,
        aux_loss_enabled=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **more,
    )
    batch = {"input_ids": ids.clamp(min=0), "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    batch |= {"label": x.labels} if x.labels is not None else {}
    return kind._compute_loss(own, policy, batch, False)


def _fused(name: str) -> Limit:
    return only("another loss in the installed version", lambda s: trl.mentions("fused_lm_head", trl.class_named(name)))


TRAINERS: dict[str, Any] = FIELDS | {
    "recipe": tiles,
    "contexts": frozenset({"plain", "autocast", "checkpoint"}),
    "interpreted": trl.chunks_are_triton(),
}
NO_MEAN = only("no mean of log-probs", lambda s: not s.average)


@implementation(
    "trl.DPOTrainer",
    sources=("trl.trainer.dpo_trainer.DPOTrainer._compute_loss",),
    limits=(only("dpo only", lambda s: s.method == "dpo"), NO_MEAN, NO_TEMPERATURE, UNSMOOTHED, _fused("DPOTrainer")),
    rejects=(
        only(
            "hinge and the likelihood have no weights",
            lambda s: not (s.weighting and (s.loss_type == "hinge" or s.nll)),
        ),
    ),
    **TRAINERS,
)
def dpo_loss(x: Inputs) -> Outputs:
    """`DPOTrainer._compute_loss`; the likelihood is its loss type `sft`."""
    s = x.settings
    loss = _asked(
        x,
        trl.class_named("DPOTrainer"),
        loss_types=[s.loss_type, "sft"][: 1 + bool(s.nll)],
        loss_weights=[1.0, s.nll][: 1 + bool(s.nll)],
        f_divergence_type=s.divergence,
        f_alpha_divergence_coef=s.alpha,
        ld_alpha=None if s.ld_alpha == 1.0 else s.ld_alpha,
        use_weighting=s.weighting,
    )
    return {"loss": loss}


@implementation(
    "trl.KTOTrainer",
    sources=("trl.trainer.kto_trainer.KTOTrainer._compute_loss",),
    limits=(only("kto only", lambda s: s.method == "kto"), NO_MEAN, NO_TEMPERATURE, _fused("KTOTrainer")),
    **TRAINERS,
)
def kto_loss(x: Inputs) -> Outputs:
    """`KTOTrainer._compute_loss`, given the log-probs of the completions whose mean log-ratio is z."""
    s = x.settings
    loss = _asked(
        x,
        trl.class_named("KTOTrainer"),
        loss_type=s.loss_type,
        calculate_KL=s.loss_type == "kto",
        desirable_weight=s.desirable,
        undesirable_weight=s.undesirable,
        _compute_kl_logps=lambda model, _: torch.full((s.B,), getattr(model, "kl", 0.0), device=x.device),
    )
    return {"loss": loss}
