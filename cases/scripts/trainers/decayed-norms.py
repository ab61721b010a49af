# transformers 5.23.0: weight_decay shrinks the last norm, A_log and D of Mamba, A_log of Qwen3-Next and Falcon-H1, and the attention sinks of GPT-OSS
# transformers/trainer.py:Trainer.get_decay_parameter_names leaves out nn.LayerNorm and some names ("norm", "…_norm", "…layernorm", "bias"): "norm_f", "A_log", "D" and "sinks" are none of them
import torch
import transformers
from setup_tiny import options

SIZE = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8)
LINEAR = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)
KINDS = {
    "LlamaForCausalLM": {},
    "MambaForCausalLM": dict(state_size=4),
    "FalconH1ForCausalLM": dict(mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4),
    "Qwen3NextForCausalLM": LINEAR | EXPERTS | dict(layer_types=["linear_attention", "full_attention"]),
    "GptOssForCausalLM": dict(num_local_experts=4),
}
transformers.logging.set_verbosity_error()
print(
    "| AdamW, learning rate 0.1, weight_decay 1, gradients of 0, one step | norms and scalars that shrank, right: none |\n|---|---|"
)
wrong = False
for name, more in KINDS.items():
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZE | more))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    args = transformers.TrainingArguments(**options(learning_rate=0.1, weight_decay=1.0))
    optimizer = transformers.Trainer(model, args).create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = [n for n, p in model.named_parameters() if p.ndim == 1 and torch.any(p.detach() != before[n])]
    told = {n.replace(".0.", ".N.").replace(".1.", ".N.") for n in moved}
    print(f"| {name} | {', '.join(sorted(told)) or '-'} |")
    wrong |= bool(told)
raise SystemExit(int(wrong))
