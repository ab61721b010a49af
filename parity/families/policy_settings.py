"""Settings of family `policy`, and how they are drawn."""

from __future__ import annotations

from typing import Any

import torch

from parity import recording
from parity.case.inputs import Setting
from parity.families import head

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

MASKS = {"int64": torch.int64, "bool": torch.bool, "fp32": torch.float32, "int32": torch.int32, "uint8": torch.uint8}

SETTINGS = head.SETTINGS | {
    "lengths": Setting(None, "completion length of each row, 0 to T; none: all T"),
    "holes": Setting(False, "tool mask: tokens inside a completion that carry no loss", (False, True)),
    "mask_dtype": Setting("int64", "dtype of the completion mask", tuple(MASKS)),
    "loss_type": Setting("grpo", "loss type", LOSS_TYPES),
    "importance_sampling_level": Setting("token", "ratio per token or per sequence", ("token", "sequence")),
    "epsilon": Setting(0.2, "lower clip ε"),
    "epsilon_high": Setting(None, "upper clip ε; for cispo the bound itself; none: ε"),
    "delta": Setting(None, "cap of the unclipped ratio, or none"),
    "beta": Setting(0.0, "weight of the KL term"),
    "use_bias_correction_kl": Setting(False, "KL times importance weight", (False, True)),
    "ref": Setting("near", "reference log-probs beside the policy's", ("near", "apart", "far")),
    "old": Setting("mixed", "regions of the ratio to the old policy", ("absent", "inside", "mixed", "extreme")),
    "ratio": Setting("none", "sampler's importance ratio", ("none", "token", "sequence")),
    "ratio_range": Setting("unit", "its size: about 1, 1e-3 to 1e2, or with zeros", ("unit", "wide", "zeros")),
    "recording": Setting("none", "log-ratios to the sampler: generated, or those of a recording in fixtures/rollouts"),
    "off_policy_mask_threshold": Setting(None, "threshold of the off-policy sequence mask, or none"),
    "sampler": Setting(
        "none",
        "sampling log-probs given, and with NaN tokens; 'old': absent where the old ones, or none, decide the off-policy mask",
        ("none", "given", "nan", "old"),
    ),
    "entropy_quantile": Setting(False, "keep only the tokens of highest entropy", (False, True)),
    "entropy_coef": Setting(0.0, "weight of the entropy bonus"),
    "advantages": Setting(
        "mixed",
        "signs and shape; 'fine' ones have all bits of float32, others are bf16 numbers",
        ("mixed", "fine", "positive", "negative", "zero", "equal", "token", "repeated"),
    ),
    "accumulation": Setting(1, "micro-batches in an optimizer step"),
    "steps_per_generation": Setting(1, "micro-batches in a generation batch"),
    "other_tokens": Setting(0, "loss tokens in the other micro-batches of the generation batch"),
    "max_completion_length": Setting(16, "L of dr_grpo"),
    "sapo_temperature_pos": Setting(1.0, "τ of sapo for A > 0"),
    "sapo_temperature_neg": Setting(1.05, "τ of sapo for A ≤ 0"),
    "vespo_k_pos": Setting(2.0, "k of vespo for A ≥ 0"),
    "vespo_lambda_pos": Setting(3.0, "λ of vespo for A ≥ 0"),
    "vespo_k_neg": Setting(3.0, "k of vespo for A < 0"),
    "vespo_lambda_neg": Setting(2.0, "λ of vespo for A < 0"),
    "mode": Setting("train", "training or evaluation", ("train", "eval")),
    "head": Setting(
        "plain", "LM head: plain, tied to the embeddings, or carrying a LoRA adapter", ("plain", "tied", "lora")
    ),
    "chunk_size": Setting(1, "sequences a chunk, for implementations that chunk"),
}


WIRING = (
    "softcap logit_scale off_policy_mask_threshold entropy_quantile entropy_coef accumulation steps_per_generation mode head"
).split()
"""Settings that bare fused losses have no parameter for."""

GROUPS: tuple[tuple[str, ...], ...] = (
    *(
        (name,)
        for name in (
            "temperature softcap logit_scale bias head_dtype head context lengths holes importance_sampling_level old "
            "entropy_quantile entropy_coef advantages mode chunk_size"
        ).split()
    ),
    ("level", "padded_rows"),
    ("layout", "layouts", "ids_dtype", "mask_dtype"),
    ("epsilon", "epsilon_high", "delta"),
    ("beta", "use_bias_correction_kl", "ref"),
    ("ratio", "ratio_range", "recording"),
    ("off_policy_mask_threshold", "sampler"),
    ("accumulation", "steps_per_generation", "other_tokens"),
)
"""Settings that are moved together. A third of the cases move one or two groups and the loss type, nothing else: what a
release refuses, or computes wrongly, elsewhere then hides no failure of theirs."""


SELDOM = (("context",), ("level", "padded_rows"))
"""Groups that few cases move: chosen more often where one does."""


def draw(draw: Any, st: Any, dtype: str, profile: str, contexts: tuple[str, ...]) -> dict[str, Any]:
    """Settings of one case; every dimension independently, so that they combine."""

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    out = head.draw_head(draw, st, dtype, profile=profile, contexts=contexts)
    if out["context"] == "checkpoint" and draw(st.booleans()):  # few losses of whole trainers can be called so
        out["context"] = "plain"
    out["cotangent"] = pick("ones", "ones", "ones", "random", "fine", "zero", "scaled", "small")
    rows, width = out["B"], out["T"]
    lengths = draw(st.one_of(st.none(), st.lists(st.integers(0, width), min_size=rows, max_size=rows)))
    out |= {
        "lengths": lengths,
        "holes": pick(False, False, True),
        "mask_dtype": pick("int64", "int64", "bool", "fp32", "int32", "uint8"),
        "loss_type": pick(*LOSS_TYPES),
        "importance_sampling_level": pick("token", "token", "sequence"),
        "epsilon": pick(0.2, 0.2, 0.05, 0.3),
        "epsilon_high": pick(None, None, 0.28, 0.5),
        "delta": pick(None, None, 1.8, 4.0),
        "beta": pick(0.0, 0.0, 0.04, 0.5),
        "use_bias_correction_kl": pick(False, True),
        "ref": pick("near", "apart", "far"),
        "old": pick("mixed", "mixed", "inside", "absent", "extreme"),
        "ratio": pick("none", "none", "token", "sequence"),
        "ratio_range": pick("unit", "wide", "zeros"),
        "off_policy_mask_threshold": pick(None, None, None, 0.1, 1.0, 0.0),
        "sampler": pick("none", "given", "nan", "old"),
        "entropy_quantile": pick(False, False, False, True),
        "entropy_coef": pick(0.0, 0.0, 0.0, 0.01, 0.3),
        "advantages": pick("fine", "mixed", "positive", "negative", "zero", "equal", "token", "repeated"),
        "accumulation": pick(1, 1, 2, 5),
        "other_tokens": draw(st.sampled_from([0, 0, 7, 100])),
        "max_completion_length": pick(16, width, 512),
        "sapo_temperature_pos": pick(1.0, 0.6),
        "sapo_temperature_neg": pick(1.05, 2.0),
        "vespo_k_pos": pick(2.0, 1.0),
        "vespo_lambda_pos": pick(3.0, 1.5),
        "vespo_k_neg": pick(3.0, 1.5),
        "vespo_lambda_neg": pick(2.0, 1.0),
        "mode": pick("train", "train", "train", "eval"),
        "head": pick("plain", "plain", "plain", "plain", "tied", "lora"),
        "chunk_size": pick(1, 2, rows),
    }
    out["steps_per_generation"] = out["accumulation"] * pick(1, 1, 2)
    if out["advantages"] == "token" and draw(st.booleans()):
        out["advantages"] = "mixed"
    apart = draw(st.integers(0, 2)) == 2
    if not apart and draw(
        st.booleans()
    ):  # half of the others leave what only a trainer honours at its default, so that fused losses meet the rest
        for name in WIRING:
            out[name] = SETTINGS[name].default
    if out["loss_type"] == "cispo":
        out["epsilon_high"] = pick(5.0, 2.0, 1.3, 1.0)
    if out["off_policy_mask_threshold"] == 0.0 and draw(st.booleans()):  # every drift is 0
        out["old"], out["sampler"] = "absent", "old"
    if out["old"] == "absent":  # every ratio is 1, which is then a bound
        out["epsilon"] = pick(out["epsilon"], out["epsilon"], 0.0)
    if out["loss_type"] in ("cispo", "sapo", "vespo") or (out["delta"] is not None and out["epsilon_high"] == 0.5):
        out["delta"] = None if out["loss_type"] in ("cispo", "sapo", "vespo") else out["delta"]
    if out["ratio"] == "none":
        out["ratio_range"] = "unit"
    if out["ratio"] != "none":
        out["recording"] = pick(*["none"] * 3 * len(recording.shipped()), *recording.shipped())
    if apart:
        moved = [g for g in GROUPS if any(out.get(n, SETTINGS[n].default) != SETTINGS[n].default for n in g)]
        moved += 3 * [g for g in moved if g in SELDOM]
        kept = (
            {n for g in draw(st.lists(st.sampled_from(moved), min_size=1, max_size=2)) for n in g} if moved else set()
        )
        kept |= {"epsilon_high"} if out["loss_type"] == "cispo" else set()
        out |= {n: SETTINGS[n].default for g in GROUPS for n in g if n not in kept}
        if out["bias"] == "none" and out["grad"] == "bias":
            out["grad"] = "weight"
    if draw(st.integers(0, 19)) == 19:  # a batch without a loss token, whatever else moves
        out["lengths"] = [0] * rows
    return canonical(dtype, out)


def canonical(dtype: str, out: dict[str, Any]) -> dict[str, Any]:
    """Settings of a case, with those at their defaults that say nothing beside the others."""
    if out["loss_type"] in ("cispo", "sapo", "vespo"):
        out["delta"] = None
    if out["ratio"] == "none":
        out |= {"ratio_range": "unit", "recording": "none"}
    if out["head"] != "plain":  # the adapter and the embeddings have the dtype of the model
        out["head_dtype"] = "same"
    if out["head"] == "tied":  # its square would be added
        out["level"] = 0.0
    return head.canonical(dtype, out)


CONFIG_FIELDS = tuple(
    (
        "loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl temperature "
        "off_policy_mask_threshold entropy_coef sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos "
        "vespo_k_neg vespo_lambda_neg max_completion_length"
    ).split()
)
"""Settings that a field of the same name decides in the configuration of TRL's trainer."""
