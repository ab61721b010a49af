"""How a stand-alone script drives TRL's GRPOTrainer: a Llama whose backbone returns the case's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.implementations import trl_trainer
from parity.tools.issue.calls import Call, Code, arguments, bias, call, ids, states
from parity.upstream import trl

IMPORT = "import datasets, tokenizers, torch, transformers, trl"
TOKENIZER = (
    'processing_class=transformers.PreTrainedTokenizerFast(pad_token="<p>", eos_token="<e>", '
    "tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))"
)


@call("trl.GRPOTrainer")
def grpo_trainer(x: Inputs, names: Sequence[str]) -> Call:
    """The trainer's plain path."""
    return _trainer(x, names, liger=False)


@call("trl.GRPOTrainer.liger")
def grpo_trainer_liger(x: Inputs, names: Sequence[str]) -> Call:
    """Its Liger path, in the versions that have one."""
    return _trainer(x, names, liger=True)


def _trainer(x: Inputs, names: Sequence[str], liger: bool) -> Call:
    imports = (IMPORT, *(("from peft import LoraConfig",) if x.settings.head == "lora" else ()))
    s = x.settings
    lines = [
        *_model(x),
        f"trainer = trl.GRPOTrainer(model, lambda **_: 0, trl.GRPOConfig({_options(x, liger)}), {TOKENIZER}, "
        f'train_dataset=datasets.Dataset.from_list([{{"prompt": "w"}}] * 8){_adapter(x)})',
    ]
    if s.head == "lora":
        lines.append("layer = trainer.model.get_base_model().lm_head")
        lines.append('layer.lora_A["default"].weight, layer.lora_B["default"].weight = lora_a, lora_b')
    if s.beta != 0.0:
        lines.append(f"trainer.args.beta = trainer.beta = {s.beta}  # set late: no model is loaded")
    if s.beta != 0.0 and liger:
        lines.append('engine = getattr(trainer, "liger_loss", None) or trainer.liger_grpo_loss')
        lines.append(f"engine.beta, engine.use_ref_model = {s.beta}, True")
    lines.append(f"trainer.current_gradient_accumulation_steps = {s.accumulation}")
    if s.mode == "eval":
        lines.append("trainer.model.eval()")
    if x.importance_sampling_ratio is not None:
        lines.append("trainer.use_vllm = trainer.vllm_importance_sampling_correction = True")
    lines.append(f"loss = trainer.compute_loss(trainer.model, dict({_batch(x)}))")
    logged = f'trainer._metrics["{s.mode}"]'
    for name in names:
        if name in trl_trainer.METRICS:
            keys = trl_trainer.METRICS[name]
            lines.append(f"{name} = torch.tensor(next({logged}[k][-1] for k in {keys} if {logged}.get(k)))")
    return Call(tuple(lines), imports)


def _model(x: Inputs) -> list[str]:
    s = x.settings
    extra = arguments(final_logit_softcapping=s.softcap) if s.softcap is not None else ""
    extra += arguments(logit_scale=s.logit_scale) if s.logit_scale != 1.0 else ""
    size = f"vocab_size={s.V}, hidden_size={s.H}, head_dim=2, num_attention_heads=1, num_hidden_layers=1"
    size += ", intermediate_size=1"
    lines = [f"model = transformers.LlamaForCausalLM(transformers.LlamaConfig({size}{extra}))"]
    z = f"torch.nn.functional.linear(h.to(weight.dtype), weight, {bias(x)})"
    z += f" * {s.logit_scale}" if s.logit_scale != 1.0 else ""
    z = f"torch.tanh(({z}) / {s.softcap}) * {s.softcap}" if s.softcap is not None else z
    if x.bias is not None:
        lines.append(f"model.lm_head = torch.nn.Linear({s.H}, {s.V})")
        lines.append("model.lm_head.weight, model.lm_head.bias = weight, bias")
    else:
        lines.append("model.lm_head.weight = weight")
    if extra and s.head != "lora":
        # releases with a fused LM head (since 1.15) read the config; before, the model's own head makes the logits
        lines.append(f"model.lm_head.forward = lambda h: ({z})")
    padded = f"torch.nn.functional.pad({states(x)}, (0, 0, {s.T - 1}, 1))"  # the prompt is as long as the completion
    lines.append(f"states = transformers.modeling_outputs.BaseModelOutputWithPast({padded})")
    lines.append("model.model.forward = lambda *_, **__: states")
    return lines


def _options(x: Inputs, liger: bool) -> str:
    """GRPOConfig's arguments: what the case moves away from the installed default, and what keeps it offline."""
    s = x.settings
    config = trl.class_named("GRPOConfig")
    known = trl.fields(config)
    wanted = {name: getattr(s, name) for name in trl_trainer.SETTINGS if name != "top_entropy_quantile"}
    if x.top_entropy_quantile is not None:
        wanted["top_entropy_quantile"] = float(x.top_entropy_quantile)
    wanted |= {"beta": 0.0, "gradient_accumulation_steps": s.accumulation}
    if s.loss_type != "dr_grpo":
        del wanted["max_completion_length"]
    for kind in ("sapo", "vespo"):
        if s.loss_type != kind:
            wanted = {n: v for n, v in wanted.items() if not n.startswith(kind)}
    if s.beta == 0.0:
        wanted.pop("use_bias_correction_kl")
    moved = {n: v for n, v in wanted.items() if n in known and v != known[n]} | {"loss_type": s.loss_type}
    fixed: dict[str, Any] = {"report_to": [], "bf16": False}
    fixed["use_cpu"] = Code('hidden.device.type == "cpu"')
    if s.steps_per_generation == s.accumulation:
        moved.pop("steps_per_generation", None)
    if liger:
        fixed |= trl.liger(config)
    return arguments(**fixed, **moved).removeprefix(", ")


def _adapter(x: Inputs) -> str:
    if x.settings.head != "lora":
        return ""
    config = 'LoraConfig(r=2, lora_alpha=2, lora_dropout=0.0, target_modules=["lm_head"], task_type="CAUSAL_LM")'
    return f", peft_config={config}"


def _batch(x: Inputs) -> str:
    """The inputs of `compute_loss`."""
    entries = {
        "completion_ids": ids(x),
        "completion_mask": "completion_mask",
        "advantages": "advantages",
        "old_per_token_logps": "old_logps",
        "ref_per_token_logps": "ref_logps",
        "sampling_per_token_logps": "sampling_logps",
        "tool_mask": "tool_mask",
        "importance_sampling_ratio": "importance_sampling_ratio",
    }
    if x.tool_mask is None and x.mask.dtype == torch.int64:
        entries["completion_mask"] = "mask"  # one tensor less to write down
    required = ("completion_mask", "mask", "advantages", ids(x))
    given = {k: v for k, v in entries.items() if v in required or x.tensors.get(v) is not None}
    if x.old_logps is None:
        given["old_per_token_logps"] = "None"
    prompt = f"prompt_ids={ids(x)}, prompt_mask=torch.ones_like({ids(x)})"
    given["num_items_in_batch"] = f"torch.tensor({int(x.num_items_in_batch)})"
    return prompt + arguments(**{k: Code(v) for k, v in given.items()})
