"""Settings of family `policy`, and how they are drawn."""

from typing import Any

import torch

from parity import recording
from parity.case.inputs import Setting
from parity.families import head
from parity.families.policy_losses import CLIPPED, WINDOW_NORMALISED

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

MASKS = {"int64": torch.int64, "bool": torch.bool, "fp32": torch.float32, "int32": torch.int32, "uint8": torch.uint8}

SETTINGS = head.SETTINGS | {
    "lengths": Setting(None, "completion length of each row, 0 to T; none: all T"),
    "holes": Setting(False, "tool mask: tokens inside a completion that carry no loss", (False, True)),
    "mask_dtype": Setting("int64", "dtype of the completion mask", tuple(MASKS)),
    "loss_type": Setting("grpo", "loss type", LOSS_TYPES),
    "importance_sampling_level": Setting("token", "ratio per token or per sequence", ("token", "sequence")),
    "epsilon": Setting(0.2, "lower clip ε", within="[0, 1)"),
    "epsilon_high": Setting(None, "upper clip ε, 0 too; for cispo the bound itself; none: ε", within="[0, inf)"),
    "delta": Setting(None, "cap of the unclipped ratio, or none", within="(0, inf)"),
    "beta": Setting(0.0, "weight of the KL term"),
    "use_bias_correction_kl": Setting(False, "KL times importance weight", (False, True)),
    "ref": Setting(
        "near",
        "reference log-probs: the policy's, within about 0.01, 0.5 or 4 of them; 'unused': given at beta 0 too",
        ("near", "close", "apart", "far", "unused"),
    ),
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
        "signs and shape; 'fine' ones have all bits of float32, others are bf16 numbers; 'zero': of every second sequence, "
        "'zeros': of all",
        ("mixed", "fine", "positive", "negative", "zero", "zeros", "equal", "token", "repeated"),
    ),
    "accumulation": Setting(1, "micro-batches in an optimizer step", within="[1, inf)"),
    "steps_per_generation": Setting(1, "micro-batches in a generation batch", within="[1, inf)"),
    "other_tokens": Setting(0, "loss tokens in the other micro-batches of the generation batch"),
    "max_completion_length": Setting(16, "L of dr_grpo", within="[1, inf)"),
    "sapo_temperature_pos": Setting(1.0, "τ of sapo for A > 0", within="(0, inf)"),
    "sapo_temperature_neg": Setting(1.05, "τ of sapo for A ≤ 0", within="(0, inf)"),
    "vespo_k_pos": Setting(2.0, "k of vespo for A ≥ 0"),
    "vespo_lambda_pos": Setting(3.0, "λ of vespo for A ≥ 0"),
    "vespo_k_neg": Setting(3.0, "k of vespo for A < 0"),
    "vespo_lambda_neg": Setting(2.0, "λ of vespo for A < 0"),
    "mode": Setting("train", "training or evaluation", ("train", "eval")),
    "head": Setting(
        "plain", "LM head: plain, tied to the embeddings, or carrying a LoRA adapter", ("plain", "tied", "lora")
    ),
    "lora_rank": Setting(2, "rank of the LoRA adapter", within="[1, inf)"),
    "chunk_size": Setting(1, "sequences a chunk, for implementations that chunk", within="[1, inf)"),
}


WIRING = (
    "softcap logit_scale off_policy_mask_threshold entropy_quantile entropy_coef accumulation steps_per_generation mode head"
).split()
"""Settings that bare fused losses have no parameter for."""

CLIPS = ("epsilon", "epsilon_high", "delta")
KL = ("beta", "use_bias_correction_kl", "ref")
GROUPS: tuple[tuple[str, ...], ...] = (
    *(
        (name,)
        for name in (
            "temperature softcap logit_scale bias head_dtype context lengths holes importance_sampling_level old "
            "entropy_quantile entropy_coef advantages mode chunk_size"
        ).split()
    ),
    ("head", "lora_rank"),
    ("level", "padded_rows"),
    ("layout", "layouts", "ids_dtype", "mask_dtype"),
    CLIPS,
    KL,
    ("ratio", "ratio_range", "recording"),
    ("off_policy_mask_threshold", "sampler"),
    ("accumulation", "steps_per_generation", "other_tokens"),
)
"""Settings that are moved together. A third of the cases move one or two groups and the loss type, nothing else: what a
release refuses, or computes wrongly, elsewhere then hides no failure of theirs."""


SELDOM = (("context",), ("level", "padded_rows"), ("head_dtype",), ("head", "lora_rank"))
"""Groups that few cases move: chosen more often where one does."""


FOCUSES: dict[str, dict[str, tuple[Any, ...]]] = {
    "entropy mask": {  # entropies that rounding cannot exchange
        "entropy_quantile": (True,),
        "entropy_coef": (0.0, 0.0, 0.3),
        "peak": (1.0, 2.0),
        "temperature": (1.0, 2.0),
        "logit_scale": (1.0,),
        "B": (2, 1),
        "T": (4, 3, 6),
        "H": (2, 1, 4),
    },
    "off-policy mask": {
        "off_policy_mask_threshold": (0.1, 1.0, 0.0),
        "sampler": ("given", "nan", "old"),
        "old": ("mixed", "inside", "absent"),
    },
    "token advantages": {"advantages": ("token",)},
    "evaluation": {"mode": ("eval",), "accumulation": (2, 5), "steps_per_generation": (2, 4, 10)},
    "sapo": {"loss_type": ("sapo",), "sapo_temperature_pos": (0.6, 2.0, 0.25), "sapo_temperature_neg": (2.0, 0.5)},
    "vespo": {
        "loss_type": ("vespo",),
        "vespo_k_pos": (1.0, 2.5),
        "vespo_lambda_pos": (1.5, 0.5),
        "vespo_k_neg": (1.5, 0.5),
        "vespo_lambda_neg": (1.0, 0.25),
    },
    "dr_grpo": {"loss_type": ("dr_grpo",), "max_completion_length": (512, 1000, 4096)},
    "window": {
        "loss_type": WINDOW_NORMALISED,
        "accumulation": (1, 4, 16),
        "steps_per_generation": (1, 2, 8, 32),
        "other_tokens": (7, 1000),
    },
    "clip": {
        "loss_type": CLIPPED,
        "epsilon": (0.05, 0.3, 0.003),
        "epsilon_high": (None, 0.28, 0.5),
        "delta": (None, 1.8, 4.0, 1.02),
        "old": ("mixed", "mixed", "extreme"),
    },
    "sequences": {
        "importance_sampling_level": ("sequence",),
        "loss_type": CLIPPED,
        "beta": (0.0, 0.0, 0.04),
        "entropy_coef": (0.0,),
        "old": ("mixed", "extreme"),
    },
    "kl": {"beta": (0.04, 0.5), "use_bias_correction_kl": (False, True), "ref": ("close", "apart"), "old": ("mixed",)},
}
"""Settings that change the loss in few draws: what they need to do so. Half of the cases have two or three of them."""
SELDOM_SEEN = ("entropy mask", "entropy mask", "off-policy mask", "clip", "sequences")
"""Those that even then often do not: chosen more often."""
READABLE: dict[str, tuple[Any, ...]] = {
    "peak": (1.0, 4.0),
    "level": (0.0, 0.0, 0.0, 0.0, 0.0, 150.0),
    "temperature": (1.0, 0.7, 2.0),
    "logit_scale": (1.0, 1.0, 2.5, 0.3),
    "padded_rows": ("none", "none", "none", "zero", "equal"),
    "cotangent": ("ones", "ones", "fine", "scaled"),
    "bias": ("none", "none", "random"),
}
"""Of such a case: rounding moves no token over a threshold, and no gradient is 0 whatever the loss is."""


def _focused(draw: Any, st: Any, out: dict[str, Any]) -> set[str]:
    """Move the settings of some of `FOCUSES`; their names."""

    pick = head.picking(draw, st)
    chosen = draw(st.lists(st.sampled_from([*FOCUSES, *SELDOM_SEEN]), min_size=2, max_size=3, unique=True))
    options: dict[str, tuple[Any, ...]] = {}
    for name, values in ((n, v) for focus in chosen for n, v in FOCUSES[focus].items()):
        options[name] = tuple(v for v in options.get(name, values) if v in values) or values
    wanted = {n: pick(*v) for n, v in options.items()}
    out |= {n: pick(*v) for n, v in READABLE.items()} | wanted
    out["T"], out["V"] = max(out["T"], 2), max(out["V"], 3)
    if out["advantages"] in ("zero", "equal", "positive"):
        out["advantages"] = pick("mixed", "fine", "negative")
    if out["lengths"] is not None:
        out["lengths"] = [min(max(1, n), out["T"]) for n in (out["lengths"] * out["B"])[: out["B"]]]
    return {*wanted, *READABLE, "advantages", "lengths"}


def draw(draw: Any, st: Any, dtype: str, profile: str, contexts: tuple[str, ...]) -> dict[str, Any]:
    """Settings of one case; every dimension independently, so that they combine."""

    pick = head.picking(draw, st)

    def number(low: float, high: float, *usual: Any) -> Any:
        return draw(head.number(st, low, high, *usual))

    out = head.draw_head(draw, st, dtype, profile=profile, contexts=contexts)
    if out["context"] == "checkpoint" and draw(st.booleans()):  # few losses of whole trainers can be called so
        out["context"] = "plain"
    out["cotangent"] = pick("ones", "ones", "ones", "random", "fine", "zero", "scaled", "small")
    rows, width = out["B"], out["T"]
    few = min(rows, 16)
    lengths = draw(st.one_of(st.none(), st.lists(st.integers(0, width), min_size=few, max_size=few)))
    out |= {
        "lengths": None if lengths is None else (lengths * -(-rows // few))[:rows],
        "holes": pick(False, False, True),
        # a count of tokens wraps at 256 in the narrowest of them
        "mask_dtype": pick(*["uint8" if width > 128 else "int64"] * 2, "bool", "fp32", "int32", "uint8"),
        "loss_type": pick(*LOSS_TYPES),
        "importance_sampling_level": pick("token", "token", "sequence"),
        "epsilon": number(1e-4, 0.9, 0.2, 0.2, 0.05, 0.3),
        "epsilon_high": number(1e-4, 10.0, None, None, 0.28, 0.5),
        "delta": number(1.01, 20.0, None, None, 1.8, 4.0),
        "beta": number(1e-4, 10.0, 0.0, 0.0, 0.04, 0.5),
        "use_bias_correction_kl": pick(False, True),
        "ref": pick("near", "apart", "far", "unused"),
        "old": pick("mixed", "mixed", "inside", "absent", "extreme"),
        "ratio": pick("none", "none", "token", "sequence"),
        "ratio_range": pick("unit", "wide", "zeros"),
        "off_policy_mask_threshold": pick(None, None, None, 0.1, 1.0, 0.0),
        "sampler": pick("none", "given", "nan", "old"),
        "entropy_quantile": pick(False, False, False, True),
        "entropy_coef": draw(st.one_of(*[st.just(0.0)] * 9, head.number(st, 1e-4, 1.0, 0.01, 0.3))),
        "advantages": pick("fine", "mixed", "positive", "negative", "zero", "equal", "token", "repeated"),
        "accumulation": pick(1, 1, 2, 5, 32),
        "other_tokens": pick(0, 0, 7, 100, 20000),
        "max_completion_length": pick(16, width, 512, 8192),
        "sapo_temperature_pos": number(0.1, 10.0, 1.0, 0.6),
        "sapo_temperature_neg": number(0.1, 10.0, 1.05, 2.0),
        "vespo_k_pos": number(0.1, 4.0, 2.0, 1.0),
        "vespo_lambda_pos": number(0.1, 4.0, 3.0, 1.5),
        "vespo_k_neg": number(0.1, 4.0, 3.0, 1.5),
        "vespo_lambda_neg": number(0.1, 4.0, 2.0, 1.0),
        "mode": pick("train", "train", "train", "eval"),
        "head": pick("plain", "plain", "plain", "plain", "tied", "lora"),
        "lora_rank": pick(2, 1, 8, 16, 64),
        "chunk_size": pick(1, 2, rows),
    }
    out["steps_per_generation"] = pick(*[out["accumulation"]] * 3, 2 * out["accumulation"], 1, 3)
    if out["advantages"] == "token" and draw(st.booleans()):
        out["advantages"] = "mixed"
    kind = draw(st.integers(0, 5))  # 1 to 3: focused; 3 to 5: apart
    kept: set[str] = set()
    if kind == 0:  # leave what only a trainer honours at its default, so that fused losses meet the rest
        out |= {name: SETTINGS[name].default for name in WIRING}
    if kind in (1, 2, 3):
        kept |= _focused(draw, st, out)
    if out["loss_type"] == "cispo":
        out["epsilon_high"] = number(1.001, 10.0, 5.0, 2.0, 1.3, 1.0)
    elif (out["epsilon_high"] or 1.0) < 3e-4 or (out["epsilon_high"] == 0.28 and head.one_in(2, out)):
        out["epsilon_high"] = 0.0
    if out["beta"] != 0.0 and out["ref"] == "unused":
        out["ref"] = "close"
    if out["off_policy_mask_threshold"] == 0.0 and draw(st.booleans()):  # every drift is 0
        out["old"], out["sampler"] = "absent", "old"
    if out["old"] == "absent":  # every ratio is 1, which is then a bound
        out["epsilon"] = pick(out["epsilon"], out["epsilon"], 0.0)
    if out["ratio"] != "none":
        out["recording"] = pick(*["none"] * 3 * len(recording.shipped()), *recording.shipped())
    out = canonical(dtype, out)
    large = rows * out["T"] > 128 or out["V"] > 4096
    if kind > 2 and not (large and draw(st.booleans())):  # a third of the focused ones too
        moved = [g for g in GROUPS if any(out.get(n, SETTINGS[n].default) != SETTINGS[n].default for n in g)]
        moved += 3 * [g for g in moved if g in SELDOM]
        few_groups = draw(st.lists(st.sampled_from(moved), min_size=1, max_size=2)) if moved else []
        kept |= {n for g in few_groups for n in g} | ({"epsilon_high"} if out["loss_type"] == "cispo" else set())
        if out["advantages"] == "zero" and "advantages" in kept:
            kept |= {*KL}
        out |= {n: SETTINGS[n].default for g in GROUPS for n in g if n not in kept}
    if out["advantages"] == "zero" and out["beta"] != 0.0 and head.one_in(2, out):  # what is left of the loss is the KL
        out["advantages"] = "zeros"
    if draw(st.integers(0, 19)) == 19:  # a batch without a loss token, whatever else moves
        out["lengths"] = [0] * out["B"]
    return canonical(dtype, out)


OF_A_LOSS = tuple(name for name in SETTINGS if name.startswith(("sapo_", "vespo_")))
"""Settings that the loss types in front of their names have alone."""


def silent_beside(loss_type: str, beta: float) -> set[str]:
    """Settings that mean nothing to a loss."""
    silent = set() if loss_type in CLIPPED else {"delta", "epsilon"} if loss_type == "cispo" else {*CLIPS}
    silent |= {n for n in OF_A_LOSS if not n.startswith(loss_type)}
    silent |= {"max_completion_length"} if loss_type != "dr_grpo" else set()
    silent |= {"other_tokens", "steps_per_generation"} if loss_type not in WINDOW_NORMALISED else set()
    return silent | ({"use_bias_correction_kl"} if beta == 0.0 else set())


def canonical(dtype: str, out: dict[str, Any]) -> dict[str, Any]:
    """Settings of a case, with those at their defaults that say nothing beside the others."""
    silent = silent_beside(out["loss_type"], out["beta"])
    silent |= {"ref"} if (out["beta"] == 0.0) != (out["ref"] == "unused") else set()
    silent |= {"ratio_range", "recording"} if out["ratio"] == "none" else set()
    silent |= {"sampler"} if out["off_policy_mask_threshold"] is None and out["sampler"] == "old" else set()
    silent |= {"advantages"} if out["advantages"] == "zeros" and out["beta"] == 0.0 else set()  # no loss at all
    silent |= {"lora_rank"} if out["head"] != "lora" else set()
    silent |= {"head_dtype"} if out["head"] != "plain" else set()  # adapter and embeddings have the dtype of the model
    silent |= {"level"} if out["head"] == "tied" else set()  # its square would be added
    return head.canonical(dtype, out | {n: SETTINGS[n].default for n in silent})
