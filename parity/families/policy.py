"""Family `policy`: the GRPO losses, from hidden states x LM head to one scalar.

Definitions: grpo (arXiv 2402.03300), bnpo, dr_grpo (2503.20783), dapo (2503.14476), cispo (2506.13585), sapo
(2511.20347), luspo (2602.05261), vespo (2602.10693), sequence-level ratios (GSPO, 2507.18071), delta (INTELLECT-2,
2505.07291), bias-corrected KL and off-policy sequence mask (DeepSeek-V3.2, 2512.02556), entropy mask (2506.01939); where
no paper fixes a combination, the documentation of TRL 1.16. Settings: `policy_settings`; inputs: `policy_inputs`.
"""

from typing import Any

import torch

from parity.case.case import Case
from parity.case.family import Family, Relation
from parity.case.inputs import Inputs
from parity.case.layouts import like
from parity.families import head
from parity.families import policy_inputs as inputs_of
from parity.families import policy_settings as settings_of
from parity.families.policy_losses import CONFIG_FIELDS, WINDOW_NORMALISED, cap_below_clip, divergence, losses
from parity.judge.stages import log_softmax_again

KL_CAP, KL_LOG_RATIO_CAP = 10.0, 20.0
"""Of the variant "capped KL", nats a token: the KL term and |lp_ref - lp|."""


def oracle(x: Inputs) -> dict[str, torch.Tensor]:
    """The loss of one micro-batch, (…), and its metrics; `_logps` and `_terms` are (…, B, T)."""
    return _losses(x, divergence)


def _losses(x: Inputs, measure: Any) -> dict[str, torch.Tensor]:
    s = x.settings
    z = head.logits(x)
    all_logps = head.log_softmax(x, z)
    lp = head.selected(x, all_logps)
    entropy = head.entropy(x, z, all_logps if s.entropy_coef == 0.0 else log_softmax_again(z, all_logps))
    return losses(s, x, lp, entropy, measure)


def capped_kl(x: Inputs) -> dict[str, torch.Tensor]:
    """The loss with |log r| capped at 20 before k3 and the KL term at 10 after its bias correction, as Unsloth has it. A
    token at the cap (log r above 2.6 or below -11 where nothing is corrected) has no gradient from its KL term."""

    def measure(log_r: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        return divergence(log_r.clamp(-KL_LOG_RATIO_CAP, KL_LOG_RATIO_CAP), w).clamp(max=KL_CAP)

    return _losses(x, measure)


def zeros(x: Inputs) -> dict[str, torch.Tensor]:
    """Masked tokens: exactly zero gradient of their hidden states."""
    return {"grad_hidden": ~x.mask.bool()}


def features(case: Case) -> dict[str, Any]:
    """Facts for coverage and ledger scopes besides the settings themselves."""
    s = FAMILY.full_settings(case)
    lengths = s.lengths or [s.T] * s.B
    return head.features(case, s) | {
        "one sequence": s.B == 1,
        "ragged": len(set(lengths)) > 1,
        "padding": any(n < s.T for n in lengths),
        "masked tokens": s.holes or any(n < s.T for n in lengths),
        "empty row": 0 in lengths,
        "all masked": not any(lengths),
        "one position": s.T == 1,
        "delta active": s.delta is not None,
        "cap below the clip": cap_below_clip(s),
        "kl": s.beta != 0.0,
        "old given": s.old != "absent",
    }


def parameters(x: Inputs) -> set[str]:
    """The tensors, and what changes the loss of this case: nothing of another loss type, or of an absent term."""
    s, table = x.settings, settings_of.SETTINGS
    names = {*CONFIG_FIELDS, "softcap", "logit_scale"} - settings_of.silent_beside(s.loss_type, s.beta)
    optional = ("bias", "old_logps", "importance_sampling_ratio", "top_entropy_quantile", "lora_a")
    out = head.needed(x, table, names, optional) | {"mask", "advantages"}
    out |= {"cispo": {"epsilon_high"}, "dr_grpo": {"max_completion_length"}}.get(s.loss_type, set())
    out |= {"ref_logps"} if s.beta != 0.0 else set()
    if s.loss_type in WINDOW_NORMALISED:
        out |= {"num_items_in_batch"}
        if s.mode == "eval" or s.accumulation != s.steps_per_generation:
            out |= {"accumulation", "steps_per_generation", "mode"}
    elif s.accumulation != 1:
        out |= {"accumulation"} | ({"mode"} if s.mode != table["mode"].default else set())
    if s.off_policy_mask_threshold is not None and x.sampling_logps is not None:
        out |= {"sampling_logps"}
    return out | ({"previous_ids"} if s.head == "tied" else set())


def _double_advantages(x: Inputs) -> Inputs | None:
    s = x.settings
    if s.beta != 0.0 or s.entropy_coef != 0.0:
        return None  # the KL and the bonus do not scale with the advantages
    return x.replace(advantages=like(x.advantages * 2, x.advantages))


def _garbage(x: Inputs) -> Inputs | None:
    """Finite garbage wherever the mask is zero, except in the sampler ratio, which is 1 at padding by contract. None of
    it makes an exponential of two log-probs larger: that would overflow, mask or not."""
    masked = ~x.mask.bool()
    if not masked.any() or x.settings.targets == "edge":
        return None
    tensors = {}
    if x.settings.beta == 0.0 and x.old_logps is None:
        ids = torch.arange(x.settings.V, device=x.ids.device)
        ids = ids if x.bias is None else ids[x.bias.isfinite()]  # a banned token's log-prob is -inf
        other = ids[(torch.searchsorted(ids, x.ids.long().contiguous()) + 1) % len(ids)]
        tensors["ids"] = like(torch.where(masked, other, x.ids).to(x.ids.dtype), x.ids)
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        value = x.tensors.get(name)
        if value is not None:
            tensors[name] = like(torch.where(masked, value + (3.5 if name == "old_logps" else -3.5), value), value)
    return x.replace(**tensors)


QUANTITIES = ("loss", *head.GRADIENTS)
FAMILY: Family = Family(
    name="policy",
    settings=settings_of.SETTINGS,
    build=lambda case: inputs_of.build(FAMILY, case),
    oracle=oracle,
    outputs={
        "loss": "required",
        "kl": "optional",
        "entropy": "optional",
        "clip_ratio": "counted",
        "clip_low": "counted",
        "clip_high": "counted",
    },
    zeros=zeros,
    features=features,
    variants={"capped KL": capped_kl},
    parameters=parameters,
    draw=settings_of.draw,
    canonical=settings_of.canonical,
    stored=inputs_of.STORED,
    derived=lambda tensors, where: inputs_of.derived(FAMILY, tensors, where),
    relations={
        "advantages x2": Relation(_double_advantages, dict.fromkeys(QUANTITIES, 2.0), "it is linear in the advantages"),
        "masked garbage": Relation(_garbage, {}, "what the mask hides changes nothing"),
    },
)
