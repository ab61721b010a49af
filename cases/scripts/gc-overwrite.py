# TRL 1.16: a model's own gradient-checkpointing function is gone after the first generation
# disable_gradient_checkpointing ends with gradient_checkpointing_enable, which puts the stock function in its place.
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from trl.models.utils import disable_gradient_checkpointing

config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config).train()
model.gradient_checkpointing_enable()
calls = []


def own(function, *arguments, **options):
    calls.append(function)
    return checkpoint(function, *arguments, use_reentrant=False, **options)


for module in model.modules():
    if hasattr(module, "_gradient_checkpointing_func"):
        module._gradient_checkpointing_func = own
ids = torch.arange(8).view(1, 8)
model(input_ids=ids, labels=ids).loss.backward()
before = len(calls)
with disable_gradient_checkpointing(model, {}):
    pass  # GRPOTrainer generates here
model(input_ids=ids, labels=ids).loss.backward()
after = len(calls) - before
print("| calls of the model's own checkpointing function | a step |\n|---|---|")
print(f"| before the first generation | {before} |\n| after it | {after} |")
raise SystemExit(int(after != before))
