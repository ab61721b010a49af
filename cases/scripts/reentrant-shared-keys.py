# transformers 5.23.0, gradient_checkpointing_kwargs={"use_reentrant": True} (TRL forces it for LoRA under ZeRO-3): Gemma 3n and Gemma 4, whose last layers share keys and values of earlier ones, get wrong gradients behind a right loss
# transformers/models/gemma4/modeling_gemma4.py:Gemma4TextAttention.forward takes them from shared_kv_states, a dict that is handed over by name: torch's reentrant checkpoint knows gradients of positional tensors alone
import warnings

import peft
import torch
import transformers
from setup_processes import step
from setup_tiny import options

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ROWS = [dict(input_ids=torch.arange(2, 12) + i, labels=torch.arange(2, 12) + i) for i in range(4)]
SIZE = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
SIZE |= dict(num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=4)
SIZE |= dict(
    hidden_size_per_layer_input=4, vocab_size_per_layer_input=32, pad_token_id=0, eos_token_id=1, bos_token_id=2
)
OWN = {
    "gemma4_text": dict(intermediate_size=32, global_head_dim=8),
    "gemma3n_text": dict(
        altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4, intermediate_size=[32] * 4
    ),
}


def run(name, lora, reentrant):
    """Loss and the gradient's norm of a step; reentrant None: without checkpointing."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **SIZE | OWN[name]))
    if lora:
        config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    wanted = dict(per_device_train_batch_size=4, max_steps=1)
    if reentrant is not None:
        model.enable_input_require_grads()
        wanted |= dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    args = transformers.TrainingArguments(**options(**wanted))
    return step(transformers.Trainer(model, args, train_dataset=ROWS))


print("| model, trained | loss | gradient norm | checkpointed | use_reentrant | its loss |\n|---|---|---|---|---|---|")
wrong = False
for name in OWN:
    for lora in (False, True):
        (loss, norm), (_, same), (other, off) = (run(name, lora, reentrant) for reentrant in (None, False, True))
        told = "LoRA on keys and values" if lora else "all weights"
        print(f"| {name}, {told} | {loss:.5f} | {norm:.5f} | {same:.5f} | {off:.5f} | {other:.5f} |")
        wrong |= abs(off / norm - 1) > 1e-3
raise SystemExit(int(wrong))
