# TRL 1.16: disable_dropout=True, the default of DPO and KTO, leaves attention_dropout on
# disable_dropout_in_model looks for nn.Dropout; most models of today hand the share in their config to the attention function.
import peft
import transformers
from setup_lora import logged, model
from trl import DPOConfig, DPOTrainer


def gpt2():
    size = dict(n_embd=16, n_layer=2, n_head=2, vocab_size=32)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(resid_pdrop=0.3, attn_pdrop=0.3, **size))


def llama():
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, attention_dropout=0.3, **size))


print(
    "| model, learning rate 0 | log-prob of the chosen completions in step 1 | step 2, right: as step 1 |\n|---|---|---|"
)
bad = False
for name, made in (("GPT-2, attn_pdrop=0.3", gpt2), ("Llama, attention_dropout=0.3", llama)):
    rows = logged(DPOTrainer, DPOConfig, model(made), peft.LoraConfig(), max_steps=2)
    first, second = (row["logps/chosen"] for row in rows)
    bad |= abs(first - second) > 1e-3
    print(f"| {name} | {first:.4f} | {second:.4f} |")
raise SystemExit(int(bad))
