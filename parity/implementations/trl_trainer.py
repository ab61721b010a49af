"""TRL's GRPOTrainer itself, on a case's own tensors: the trainer's code makes logits, log-probs and loss.

The model's backbone hands back the case's hidden states, a leaf, at the positions that predict the completion; its LM
head is a real Linear, tied, biased or under a LoRA adapter as the case says. Works for TRL 0.17 to 1.16: settings that a
version does not have are unsupported when the case moves them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import logging
import tempfile
import warnings
from typing import Any

import torch
from torch import nn

from parity.families import Inputs
from parity.implementations import Outputs, implementation, plain, require
from parity.rounding import Recipe

PROMPT = 2
"""Prompt length: a left-padded pair, so that the first completion token is predicted from a real position."""

SETTINGS = (
    "loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl temperature "
    "off_policy_mask_threshold top_entropy_quantile entropy_coef sapo_temperature_pos sapo_temperature_neg vespo_k_pos "
    "vespo_lambda_pos vespo_k_neg vespo_lambda_neg max_completion_length steps_per_generation"
).split()


@functools.cache
def classes() -> tuple[type, type]:
    """A configuration and a causal LM whose backbone returns stored hidden states; made on first use, transformers is slow."""
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

    class ReplayConfig(PretrainedConfig):
        model_type = "parity_replay"

        def __init__(self, vocab_size: int = 8, hidden_size: int = 8, **kwargs: Any):
            self.vocab_size, self.hidden_size = vocab_size, hidden_size
            super().__init__(**{"num_hidden_layers": 1, "num_attention_heads": 1, **kwargs})

    class ReplayBackbone(PreTrainedModel):
        config_class = ReplayConfig

        def __init__(self, config: Any):
            super().__init__(config)
            self.hidden: torch.Tensor | None = None
            self.embed_tokens: nn.Module = nn.Embedding(1, 1)
            self.tied = False
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.embed_tokens

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            assert self.hidden is not None
            hidden = self.hidden
            if self.tied:
                hidden = hidden + self.embed_tokens(self.previous_ids)
            return BaseModelOutputWithPast(last_hidden_state=hidden)

    class ReplayForCausalLM(PreTrainedModel, GenerationMixin):
        config_class = ReplayConfig
        base_model_prefix = "model"

        def __init__(self, config: Any):
            super().__init__(config)
            self.model = ReplayBackbone(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.model.embed_tokens

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, input_ids: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
            hidden = self.model(input_ids).last_hidden_state
            if logits_to_keep:
                hidden = hidden[:, -logits_to_keep:]
            z = self.lm_head(hidden.to(self.lm_head.weight.dtype))
            if self.config.logit_scale is not None:
                z = z * self.config.logit_scale
            if self.config.final_logit_softcapping is not None:
                z = torch.tanh(z / self.config.final_logit_softcapping) * self.config.final_logit_softcapping
            return CausalLMOutputWithPast(logits=z)

    return ReplayConfig, ReplayForCausalLM


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "w": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", model_input_names=["input_ids", "attention_mask"]
    )


@functools.cache
def _dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["w w"] * 8})


@functools.cache
def _output_dir() -> str:
    return tempfile.mkdtemp(prefix="parity-trainer-")


def _zero_reward(completions: Any, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


@contextlib.contextmanager
def quiet() -> Any:
    """Without the warnings that TRL and transformers print at every construction."""
    levels = {name: logging.getLogger(name).level for name in ("transformers", "trl", "accelerate")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def model(x: Inputs) -> Any:
    """The replay model of a case: the case's leaves are its parameters, so that the harness reads their gradients."""
    configuration, model_class = classes()
    s = x.settings
    config = configuration(
        vocab_size=s.V,
        hidden_size=s.H,
        head_bias=x.bias is not None,
        final_logit_softcapping=s.softcap,
        logit_scale=None if s.logit_scale == 1.0 else s.logit_scale,
        tie_word_embeddings=False,
    )
    out = model_class(config)
    out.lm_head.weight = x.weight
    if x.bias is not None:
        out.lm_head.bias = x.bias
    place = torch.zeros(s.B, PROMPT - 1, s.H, dtype=x.hidden.dtype, device=x.hidden.device)
    tail = torch.zeros(s.B, 1, s.H, dtype=x.hidden.dtype, device=x.hidden.device)
    out.model.hidden = torch.cat([place, x.hidden, tail], 1)
    if s.head == "tied":
        edge = torch.zeros(s.B, 1, dtype=torch.long, device=x.hidden.device)
        out.model.tied = True
        out.model.previous_ids = torch.cat([edge.expand(s.B, PROMPT - 1), x.previous_ids, edge], 1)
        out.model.embed_tokens = nn.Embedding(s.V, s.H)
        out.model.embed_tokens.weight = out.lm_head.weight
    return out


def config_class() -> Any:
    """The installed GRPOConfig."""
    from trl import GRPOConfig

    return GRPOConfig


@functools.cache
def fields() -> dict[str, Any]:
    """Name -> default of every field of the installed GRPOConfig."""
    return {f.name: f.default for f in dataclasses.fields(config_class())}


def arguments(x: Inputs, liger: bool = False) -> Any:
    """A GRPOConfig for the case; what the version lacks must be at the case's default.

    Raises:
        Unsupported: for a moved setting that the installed version has no field for.
    """
    from parity.families.policy_inputs import SETTINGS as defaults

    s = x.settings
    wanted = {name: getattr(s, name) for name in SETTINGS if name != "top_entropy_quantile"}
    wanted["top_entropy_quantile"] = 1.0 if x.top_entropy_quantile is None else float(x.top_entropy_quantile)
    relevant = {n for n in wanted if not (n.startswith("sapo") and s.loss_type != "sapo") and not (n.startswith("vespo") and s.loss_type != "vespo")}
    known = fields()
    for name in relevant - set(known):
        default = 1.0 if name == "top_entropy_quantile" else defaults[name].default
        require(wanted[name] == default, f"GRPOConfig has no {name} in the installed version")
    kwargs = {n: v for n, v in wanted.items() if n in known}
    fixed = {
        "output_dir": _output_dir(),
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "gradient_accumulation_steps": s.accumulation,
        "top_k": 0,
        "report_to": [],
        "use_cpu": not x.hidden.is_cuda,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "scale_rewards": False,
        "router_aux_loss_coef": None if known.get("router_aux_loss_coef", 0) is None else 0.0,
        "max_prompt_length": None,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    kwargs |= {n: v for n, v in fixed.items() if n in known and n not in kwargs}
    if liger:
        kwargs |= _liger_flags(known)
    return config_class()(**kwargs)


def _liger_flags(known: dict[str, Any]) -> dict[str, Any]:
    """The loss path alone: since 0.25 `use_liger_kernel` would patch the model's layers as well."""
    if known.get("use_liger_loss") is False:
        return {"use_liger_loss": True}
    require("use_liger_kernel" in known, "GRPOConfig has neither use_liger_loss nor use_liger_kernel")
    layers = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
    return {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(layers, False)}


def trainer(x: Inputs, liger: bool = False) -> Any:
    """A real GRPOTrainer over the replay model, in the mode of the case."""
    from trl import GRPOTrainer

    s = x.settings
    extra: dict[str, Any] = {}
    if s.head == "lora":
        extra["peft_config"] = _lora_config(x)
    built = model(x)
    args = arguments(x, liger)
    with quiet():
        beta, args.beta = args.beta, 0.0  # reference log-probs are given: no reference model has to be loaded
        out = GRPOTrainer(
            model=built,
            reward_funcs=_zero_reward,
            args=args,
            train_dataset=_dataset(),
            processing_class=_tokenizer(),
            **extra,
        )
        args.beta = out.beta = beta
        for holder in (getattr(out, "liger_grpo_loss", None), getattr(out, "liger_loss", None)):
            if holder is not None:
                holder.beta, holder.use_ref_model = beta, beta != 0.0
                if hasattr(holder, "compiled"):
                    holder.compiled = False
    out.model.train(s.mode == "train")
    out.current_gradient_accumulation_steps = s.accumulation
    return out


def _lora_config(x: Inputs) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=2, lora_dropout=0.0, target_modules=["lm_head"], bias="none", task_type="CAUSAL_LM")


def batch(x: Inputs, out: Any) -> dict[str, Any]:
    """The inputs dict of `compute_loss`: prompts padded left, completions right, and what the case adds."""
    s = x.settings
    device = x.hidden.device
    require(x.tool_mask is None or _reads("tool_mask"), "the installed version reads no tool_mask")
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(s.B, PROMPT, dtype=torch.long, device=device),
        "prompt_mask": torch.ones(s.B, PROMPT, dtype=torch.long, device=device),
        "completion_ids": x.ids.long(),
        "completion_mask": x.completion_mask,
        "advantages": x.advantages,
        "old_per_token_logps": x.old_logps,
        "ref_per_token_logps": x.ref_logps,
        "num_items_in_batch": x.num_items_in_batch.to(device),
    }
    if x.tool_mask is not None:
        inputs["tool_mask"] = x.tool_mask
    if x.sampling_logps is not None:
        inputs["sampling_per_token_logps"] = x.sampling_logps
    if x.importance_sampling_ratio is not None:
        require(_reads("importance_sampling_ratio"), "the installed version reads no importance_sampling_ratio")
        inputs["importance_sampling_ratio"] = x.importance_sampling_ratio
        out.use_vllm, out.vllm_importance_sampling_correction = True, True
    return inputs


@functools.cache
def _reads(key: str) -> bool:
    """Whether the installed trainer's loss mentions an inputs key."""
    from trl import GRPOTrainer

    return any(key in inspect.getsource(getattr(GRPOTrainer, n)) for n in ("_compute_loss", "compute_liger_loss") if hasattr(GRPOTrainer, n))


def outputs(x: Inputs, liger: bool) -> Outputs:
    """Loss and metrics of one micro-batch as the trainer computes and logs them."""
    out = trainer(x, liger)
    _install_adapter(x, out)
    with quiet():
        loss = out.compute_loss(out.model, batch(x, out))
    logged = out._metrics["train" if x.settings.mode == "train" else "eval"]
    found = {"loss": loss}
    for name, keys in METRICS.items():
        for key in keys:
            if logged.get(key):
                found[name] = torch.tensor(float(logged[key][-1]))
                break
    return found


METRICS = {
    "kl": ("kl",),
    "entropy": ("entropy",),
    "clip_ratio": ("clip_ratio/region_mean", "clip_ratio", "cispo_clip_ratio"),
    "clip_low": ("clip_ratio/low_mean",),
    "clip_high": ("clip_ratio/high_mean",),
}


def _install_adapter(x: Inputs, out: Any) -> None:
    """Put the case's A and B into the LoRA layer on the head."""
    if x.settings.head != "lora":
        return
    layer = out.model.get_base_model().lm_head
    for linear, tensor in ((layer.lora_A["default"], x.lora_a), (layer.lora_B["default"], x.lora_b)):
        linear.weight = tensor


def _recipe(x: Inputs) -> Recipe:
    """TRL since 1.14 tiles logits and their gradient in the dtype of the hidden states; before, the plain path's dtype."""
    from importlib.metadata import version

    from packaging.version import Version

    tied = Recipe(logits="input", dlogits="input", inputs=None if x.weight.dtype == x.hidden.dtype else "input")
    if Version(version("trl")) >= Version("1.14"):
        return tied
    dtype = plain.head_dtype(x)
    return Recipe(logits=dtype, dlogits=dtype, elementwise=dtype, softmax=dtype)


METRIC_NAMES = frozenset(METRICS)


@implementation(
    "trl.GRPOTrainer",
    family="policy",
    role="reference",
    library="trl",
    recipe=_recipe,
    outputs=METRIC_NAMES,
    contexts=frozenset({"plain", "autocast"}),
    sources=("trl.trainer.grpo_trainer.GRPOTrainer._compute_loss",),
)
def grpo_trainer(x: Inputs) -> Outputs:
    """`GRPOTrainer.compute_loss`, the trainer's plain path."""
    return outputs(x, liger=False)


def _has_liger_path() -> bool:
    from trl import GRPOTrainer

    return hasattr(GRPOTrainer, "compute_liger_loss")


@implementation(
    "trl.GRPOTrainer.liger",
    family="policy",
    role="candidate",
    library="trl",
    recipe=Recipe(logits="input", accumulate="input", partials=8),
    outputs=METRIC_NAMES - {"entropy"},
    contexts=frozenset({"plain"}),
    sources=("trl.trainer.grpo_trainer.GRPOTrainer.compute_liger_loss",),
)
def grpo_trainer_liger(x: Inputs) -> Outputs:
    """`GRPOTrainer.compute_loss` through the installed version's own Liger path (TRL 0.17 to 1.13)."""
    require(_has_liger_path(), "this version of TRL has no Liger loss path (removed in 1.14)")
    return outputs(x, liger=True)
