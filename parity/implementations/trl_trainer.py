"""TRL's real GRPOTrainer on the tensors of a case: the trainer's own code computes logits, log-probs and loss.

Works for TRL 0.15 to 1.16. What a version does not have is unsupported when the case moves it; what its loss reads from
the trainer rather than from its inputs (tools, num_iterations, the vLLM switch) is set as a training run would have it.
"""

import contextlib
import dataclasses
import functools
import sys
from typing import Any
from unittest import mock

import torch

from parity.case.inputs import Inputs, defaults
from parity.families.policy_losses import CONFIG_FIELDS, GIVEN, WINDOW_NORMALISED
from parity.families.policy_settings import SETTINGS as DEFAULTS
from parity.implementations import plain
from parity.implementations.implementation import REGISTRY, Implementation, Outputs, implementation
from parity.implementations.liger_grpo import FUSED_REJECTS, ONE_DTYPE_BEFORE_08
from parity.implementations.limits import Limit, known_loss_type, only, refused
from parity.implementations.trl import tiles
from parity.implementations.trl_replay import PROMPT, model, prompts, tokenizer
from parity.judge.recipe import Recipe
from parity.upstream import trl

SETTINGS = (*CONFIG_FIELDS, "steps_per_generation", "top_entropy_quantile")
GRPO = "trl.trainer.grpo_trainer"


def _no_adapter(s: Any) -> bool:
    return bool(s.head != "lora")


REJECTS = (
    refused(GRPO, "Applying a PEFT adapter to `lm_head` is not supported", _no_adapter),
    known_loss_type(GRPO),
)
LIGER_REJECTS = (
    *REJECTS,
    refused(GRPO, "only supports `bnpo` for now", lambda s: s.loss_type == "bnpo"),
    refused(GRPO, "Liger loss is not supported with a PEFT model", _no_adapter),
    refused(GRPO, "incompatible with applying a PEFT adapter to `lm_head`", _no_adapter),
    refused(GRPO, "only support token-level importance sampling", lambda s: s.importance_sampling_level == "token"),
    refused(GRPO, "support masking token positions based on entropy", lambda s: not s.entropy_quantile),
    refused(GRPO, "Entropy bonus is not supported with Liger", lambda s: s.entropy_coef == 0.0),
    refused(GRPO, "not support off-policy sequence masking", lambda s: s.off_policy_mask_threshold is None),
    refused("trl.trainer.grpo_config", "does not support two-sided GRPO loss", lambda s: s.delta is None),
)
METRICS = {
    "kl": ("kl",),
    "entropy": ("entropy",),
    "clip_ratio": ("clip_ratio/region_mean", "clip_ratio", "cispo_clip_ratio"),
    "clip_low": ("clip_ratio/low_mean",),
    "clip_high": ("clip_ratio/high_mean",),
}


@functools.cache
def _dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["w w"] * 8})


def _zero_reward(completions: Any, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def config_class(kind: Any = None) -> Any:
    """The installed GRPOConfig, or the subclass of it that `__init__` of a trainer class is annotated with."""
    config = trl.class_named("GRPOConfig")
    return config if kind is None else trl.config_class(kind, config)


def arguments(x: Inputs, liger: bool = False, kind: Any = None) -> Any:
    """A GRPOConfig for the case (of `kind` if given); what the version lacks is at the case's default, see `_fields`."""
    s = x.settings
    wanted = {name: getattr(s, name) for name in SETTINGS if name != "top_entropy_quantile"}
    wanted["top_entropy_quantile"] = 1.0 if x.top_entropy_quantile is None else float(x.top_entropy_quantile)
    config = config_class(kind)
    wanted |= {
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "gradient_accumulation_steps": s.accumulation,
        "gradient_checkpointing": False,
        "top_k": 0,
        "scale_rewards": False,
    }
    if liger:
        wanted |= trl.liger(config)
    return trl.configured(config, x.hidden.device.type, wanted)


def _fields(s: Any) -> str:
    """What the installed GRPOConfig has no field for must be at its default."""
    # the loss type of a version that has one: a mean over each completion up to 0.15, over all tokens in 0.16
    without = defaults(DEFAULTS) | {"loss_type": "bnpo" if trl.since("0.16") else "grpo"}
    relevant = {n for n in SETTINGS if not n.startswith(("sapo", "vespo")) or n.startswith(s.loss_type)}
    relevant -= set() if s.loss_type in WINDOW_NORMALISED else {"steps_per_generation"}
    relevant -= set() if s.beta else {"use_bias_correction_kl"}
    for name in sorted(relevant - set(trl.fields(config_class()))):
        if s.entropy_quantile if name == "top_entropy_quantile" else getattr(s, name) != without[name]:
            return f"GRPOConfig has no {name} in the installed version"
    return ""


def _limits(kind: Any = None, liger: bool = False) -> tuple[Limit, ...]:
    """What the installed GRPOTrainer, or a subclass, takes: which fields its config has, and what its code reads."""

    def reads(text: str) -> bool:
        return trl.mentions(text, kind or trl.class_named("GRPOTrainer"))

    fused = liger and not trl.since("1.14")
    return (
        _fields,
        only("the installed version reads no tool_mask", lambda s: not s.holes or reads("tool_mask")),
        only(
            "the installed version takes reference log-probs from its own reference model",
            lambda s: s.beta == 0.0 or reads('"ref_per_token_logps"'),
        ),
        only(
            "the installed version reads reference log-probs at beta 0 too",
            lambda s: s.beta != 0.0 or reads("self.beta != 0") or not reads("self.beta"),
        ),
        only(
            "the installed version reads no old_per_token_logps",
            lambda s: s.old == "absent" or reads("old_per_token_logps"),
        ),
        only(
            f"{'its Liger path' if fused else 'the installed version'} takes advantages of shape (B,) only",
            lambda s: s.advantages not in ("token", "repeated") or (reads("advantages.dim()") and not fused),
        ),
        only(
            "the installed version leaves the division by the accumulation steps to training_step",
            lambda s: reads("current_gradient_accumulation_steps") or s.accumulation == 1 or s.mode == "eval",
        ),
        only(
            "the installed version reads no importance_sampling_ratio",
            lambda s: s.ratio == "none" or reads("importance_sampling_ratio"),
        ),
    )


def trainer(x: Inputs, liger: bool = False, kind: Any = None) -> Any:
    """A real GRPOTrainer over the replay model, in the mode of the case; of `kind`, a subclass of it, if given."""
    made: Any = kind or trl.class_named("GRPOTrainer")
    s = x.settings
    extra: dict[str, Any] = {}
    if s.head == "lora":
        extra["peft_config"] = trl.lora(["lm_head"], r=s.lora_rank, lora_alpha=s.lora_rank)
    with trl.quiet(), trl.environment_kept(), trl.generators_kept(), _without_reference_model():
        args = arguments(x, liger, kind)
        beta, args.beta = args.beta, 0.0  # reference log-probs are given: no reference model has to be loaded
        out = made(
            model=model(x),
            reward_funcs=_zero_reward,
            args=args,
            train_dataset=_dataset(),
            processing_class=tokenizer(),
            **extra,
        )
        args.beta = out.beta = beta
        for holder in (getattr(out, name, None) for name in LIGER):
            if holder is not None:
                holder.beta, holder.use_ref_model = beta, beta != 0.0
                if hasattr(holder, "compiled"):
                    holder.compiled = False
    out.model.train(s.mode == "train")
    out.current_gradient_accumulation_steps = s.accumulation
    if trl.mentions("control.should_evaluate", made):  # 0.17 asks the control, not the model, which of the two it is
        out.control.should_evaluate = s.mode == "eval"
    return out


def _without_reference_model() -> contextlib.AbstractContextManager[Any]:
    """TRL up to 0.15 copies the model for a reference at any beta; reference log-probs are given."""
    module: Any = sys.modules[trl.class_named("GRPOTrainer").__module__]
    if not hasattr(module, "create_reference_model"):
        return contextlib.nullcontext()
    return mock.patch.object(module, "create_reference_model", return_value=None)


def batch(x: Inputs, out: Any) -> dict[str, Any]:
    """The inputs dict of `compute_loss`: prompts padded left, completions right, and what the case adds."""
    s = x.settings
    kind: Any = type(out)
    device = x.hidden.device
    inputs: dict[str, Any] = {theirs: x.tensors[ours] for theirs, ours in GIVEN.items()}
    inputs |= {
        "prompt_ids": prompts(x),
        "prompt_mask": torch.ones(s.B, PROMPT, dtype=torch.long, device=device),
        "completion_ids": x.ids.long(),
        "num_items_in_batch": x.num_items_in_batch.to(device),
    }
    for name in ("tool_mask", "sampling_per_token_logps", "importance_sampling_ratio"):
        if inputs[name] is None:
            del inputs[name]
    if x.tool_mask is not None and trl.mentions(
        "self.tools", kind
    ):  # 0.26 and 0.27 look at it for trainers with tools only
        out.tools = [_zero_reward]
    if x.old_logps is not None and trl.mentions("self.num_iterations", kind):
        out.num_iterations = 2  # 0.17 looks at them from the second iteration on
    if x.importance_sampling_ratio is not None:
        out.use_vllm, out.vllm_importance_sampling_correction = True, True
    return inputs


def outputs(x: Inputs, liger: bool = False, kind: Any = None) -> Outputs:
    """Loss and metrics of one micro-batch as the trainer computes and logs them."""
    with trl.quiet(), trl.looked_up_once():
        out = trainer(x, liger, kind)
        if x.settings.head == "lora":  # the case's A and B into the LoRA layer on the head
            layer = out.model.get_base_model().lm_head
            layer.lora_A["default"].weight, layer.lora_B["default"].weight = x.lora_a, x.lora_b
        loss = out.compute_loss(out.model, batch(x, out))
    logged = out._metrics.get(x.settings.mode, out._metrics)  # one for both modes up to 0.15
    found = {"loss": loss}
    for name, keys in METRICS.items():
        if key := next(filter(logged.get, keys), ""):
            found[name] = torch.tensor(float(logged[key][-1]))
    return found


def _recipe(x: Inputs) -> Recipe:
    """TRL since 1.15 takes the chunked head for everyone; before, logits and log-softmax have the dtype of the head, under
    autocast as its function has them."""
    return tiles(x) if trl.since("1.15") else dataclasses.replace(plain.narrow(x), output="fp32")


LIGER = ("liger_grpo_loss", "liger_loss")
"""Attributes in which releases before 1.14 keep Liger's loss."""
_SINCE = {"kl": "0.15", "clip_ratio": "0.16", "clip_low": "0.17", "clip_high": "0.17", "entropy": "0.20"}
METRIC_NAMES = frozenset(name for name, version in _SINCE.items() if trl.since(version))


implementation(
    "trl.GRPOTrainer",
    family="policy",
    role="reference",
    library="trl",
    recipe=_recipe,
    outputs=METRIC_NAMES,
    contexts=frozenset({"plain", "autocast"}),
    interpreted=trl.chunks_are_triton(),
    limits=_limits(),
    rejects=REJECTS,
    sources=("trl.trainer.grpo_trainer.GRPOTrainer._compute_loss",),
)(outputs)
# its own Liger path: up to 1.13 Liger's loss, head gradients of its chunks summed in its dtype; TRL's chunked log-probs in 1.14
implementation(
    "trl.GRPOTrainer.liger",
    family="policy",
    library="trl",
    recipe=tiles if trl.since("1.14") else Recipe(logits="input", accumulate="input", partials=8),
    outputs=frozenset({"kl", "clip_ratio"}),
    contexts=frozenset({"plain"}),
    extends="" if trl.since("1.14") else "liger.FusedLinearGRPOLoss",
    rejects=LIGER_REJECTS if trl.since("1.14") else (*LIGER_REJECTS, *FUSED_REJECTS),
    limits=(
        only(
            f"this version of TRL has no Liger path ({'removed in 1.15' if trl.since('1.15') else 'it came later'})",
            lambda s: any(hasattr(trl.class_named("GRPOTrainer"), n) for n in ("compute_liger_loss", "_chunked_logps")),
        ),
        *(() if trl.since("1.14") else (ONE_DTYPE_BEFORE_08,)),
        *_limits(liger=True),
    ),
    sources=("trl.trainer.grpo_trainer.GRPOTrainer.compute_liger_loss",),
)(functools.partial(outputs, liger=True))


def of_subclass(kind: type, id: str) -> Implementation:
    """The loss of a user's subclass of GRPOTrainer, FILE.py:NAME, as a candidate of family `policy`."""

    return dataclasses.replace(
        REGISTRY["trl.GRPOTrainer"],
        id=id,
        role="candidate",
        call=functools.partial(outputs, kind=kind),
        recipe=getattr(kind, "recipe", _recipe),
        limits=_limits(kind),
        extends="trl.GRPOTrainer",
        sources=(f"{kind.__module__}.{kind.__qualname__}",),
    )
