"""The trainers that checks drive: one table of what each is called, what it is given, and what there is of its twins."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class TrainerSpec:
    upstream: str  # class in TRL, or in the `library`
    # what its dataset has: prompts alone, with completions, with completions and labels, or with pairs of them, and a gold one
    data: Literal["prompts", "completions", "labels", "pairs", "triples"] = "prompts"
    # how it generates: in a method of its own, or by the model's `generate`, after which completions end with <eos>; empty
    # where it trains on stored ones
    generates: Literal["", "method", "model"] = ""
    # of its advantages: the mean of a group of completions of one prompt, or of the group's others
    baseline: Literal["", "group", "others"] = ""
    begun: bool = False  # it puts <bos> before each prompt
    scored: bool = False  # it hands out log-probs, of logits over its temperature
    given: Literal["", "ref_model", "teacher_model"] = ""  # the model that it is handed besides the policy
    beta: float | None = None  # of its config, where that is not a setting of the twin
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of its config, for a twin
    loss: str = "sigmoid"  # its loss type, where that is not a setting of its twins
    # which ratios it clips, and logs the share of: of tokens, of sequences, or their logarithms
    clips: Literal["tokens", "sequences", "logarithms"] = "tokens"
    # settings that its twins are accumulated with, the first one also cut and padded; empty: no twins
    twins: tuple[Mapping[str, Any], ...] = ()
    own: tuple[str, ...] = ()  # settings of a twin, or values of one, that not every trainer has
    has: tuple[str, ...] = ()  # fields of its config that not every trainer has, of those that a check is about
    # whether other settings are looked at in accumulated micro-batches; what goes wrong there hides them
    accumulates: bool = True
    library: str = "trl"  # the distribution that has it
    fused_fix: bool = True  # whether the path "fixed" is its fused one; else a fix of ours patches the plain one

    @property
    def paired(self) -> bool:
        """Whether two completions of each prompt reach the loss."""
        return self.data in ("pairs", "triples") or self.generates == "model"

    @property
    def grouped(self) -> bool:
        """Whether its prompts come with a group of completions each."""
        return self.baseline != ""

    @property
    def rewarded(self) -> bool:
        """Whether it takes reward functions."""
        return self.grouped or self.generates == "model"


WHOLE = {"max_completion_length": None}
"""Up to 0.28 they cut completions."""
UNCUT = WHOLE | {"max_length": 256}
"""Older releases cut prompts at 128 and want more than that."""

SPECS = {
    "grpo-trainer": TrainerSpec(
        "GRPOTrainer",
        generates="method",
        baseline="group",
        scored=True,
        twins=({"loss": "dapo", "beta": 0.04}, {"loss": "grpo"}),
        own=("loss", "beta", "tools", "cast_lm_head_to_fp32"),
        has=("mask_truncated_completions", "router_aux_loss_coef", "sync_ref_model"),
    ),
    "rloo-trainer": TrainerSpec(
        "RLOOTrainer",
        generates="method",
        baseline="others",
        scored=True,
        clips="sequences",
        twins=({"beta": 0.04}, {}),
        own=("beta",),
        has=("mask_truncated_completions", "router_aux_loss_coef", "sync_ref_model"),
    ),
    "async-grpo-trainer": TrainerSpec("AsyncGRPOTrainer", scored=True),
    "async-distillation-trainer": TrainerSpec("AsyncDistillationTrainer"),
    "online-dpo-trainer": TrainerSpec(
        "OnlineDPOTrainer", generates="model", given="ref_model", beta=0.3, twins=({},), accumulates=False
    ),
    "dpo-trainer": TrainerSpec(
        "DPOTrainer",
        "pairs",
        given="ref_model",
        beta=0.3,
        options=WHOLE,
        twins=({},),
        has=("precompute_ref_log_probs", "router_aux_loss_coef", "max_length", "truncation_mode", "sync_ref_model"),
    ),
    "kto-trainer": TrainerSpec(
        "KTOTrainer",
        "labels",
        given="ref_model",
        beta=0.3,
        options=WHOLE | {"loss_type": "apo_zero_unpaired"},
        loss="apo_zero_unpaired",
        twins=({},),
        has=("precompute_ref_log_probs", "router_aux_loss_coef", "max_length", "sync_ref_model"),
    ),
    "sft-trainer": TrainerSpec(
        "SFTTrainer",
        "completions",
        loss="nll",
        twins=({},),
        own=("none", "packed"),
        has=("router_aux_loss_coef", "max_length", "truncation_mode"),
    ),
    "distillation-trainer": TrainerSpec(
        "DistillationTrainer",
        generates="method",
        given="teacher_model",
        options={"num_generations": 1, "loss_top_k": 0},  # up to 1.9 prompts are repeated, divergences of one token
        twins=({},),
        own=("tools", "teacher", "temperature", "mixture"),
    ),
    "server-distillation-trainer": TrainerSpec("ServerDistillationTrainer"),
    "gkd-trainer": TrainerSpec("GKDTrainer"),
    "gold-trainer": TrainerSpec("GOLDTrainer"),
    "iw-opd-trainer": TrainerSpec("IWOPDTrainer"),
    "cpo-trainer": TrainerSpec("CPOTrainer", "pairs", begun=True, beta=0.3, options=UNCUT, has=("max_length",)),
    "orpo-trainer": TrainerSpec(
        "ORPOTrainer", "pairs", begun=True, beta=0.3, options=UNCUT, loss="orpo", has=("max_length",)
    ),
    "tpo-trainer": TrainerSpec("TPOTrainer", "triples", beta=0.3, options=UNCUT),
    "reward-trainer": TrainerSpec("RewardTrainer", "pairs"),
    "gmpo-trainer": TrainerSpec(
        "GMPOTrainer",
        generates="method",
        baseline="group",
        clips="logarithms",
        twins=({"beta": 0.04},),
        own=("beta", "tools"),
        has=("router_aux_loss_coef",),
        fused_fix=False,
    ),
    "sdft-trainer": TrainerSpec("SDFTTrainer"),
    "sdpo-trainer": TrainerSpec("SDPOTrainer", baseline="group"),
    "a2po-trainer": TrainerSpec("A2POTrainer"),
    "transformers-trainer": TrainerSpec("Trainer", library="transformers"),
}
"""Family of the rows -> the trainer."""

TRAINERS = {family: spec.upstream for family, spec in SPECS.items()}
"""Family of the rows -> class in TRL or transformers."""
JUDGED = tuple(family for family, spec in SPECS.items() if spec.twins)
"""Families of the trainers that have twins."""
TWINS = tuple(family for family in JUDGED if SPECS[family].fused_fix)
"""Without the one that has a loss of its own in GRPO's trainer, whose adapters and processes it shares."""


def having(field: str) -> tuple[str, ...]:
    """Families of the trainers whose config has a field."""
    return tuple(family for family, spec in SPECS.items() if field in spec.has)


def spec_of(upstream: str) -> TrainerSpec:
    return next(spec for spec in SPECS.values() if spec.upstream == upstream)
