# transformers 5.23.0, TRL 1.16.0: GRPO, RLOO, online DPO, prompts of unequal lengths, GPT-BigCode, BioGPT, XGLM: log-probs depend on the padding to the left; RWKV: also where position_ids are given, as generate() gives them, so that a prompt's answers depend on its neighbours
# trl/trainer/grpo_trainer.py:_get_per_token_logps_and_entropies gives input_ids and attention_mask alone; rwkv has no mask
import torch
import transformers
from setup_padded import log_probs, trained

transformers.logging.set_verbosity_error()
SIZE = dict(vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=2)
COMMON = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
STILL = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "layerdrop"), 0.0)
MODELS = {
    "llama": COMMON,
    "qwen3": COMMON | dict(head_dim=8, num_key_value_heads=2),
    "gpt_bigcode": dict(n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "biogpt": COMMON | STILL,
    "xglm": dict(d_model=16, ffn_dim=32, num_layers=2, attention_heads=2, dropout=0.0, attention_dropout=0.0),
    "rwkv": dict(hidden_size=16, num_hidden_layers=2, context_length=64),
}
IDS = torch.randint(3, 32, (1, 24), generator=torch.Generator().manual_seed(0))


def run(name, positions):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZE | MODELS[name])
    model = trained(transformers.AutoModelForCausalLM.from_config(config).eval())
    right = log_probs(model, IDS, 0, positions)
    return max(float((log_probs(model, IDS, left, positions) - right).abs().max()) for left in (1, 2, 3, 4, 8))


print("| model | padded on the left: log-probs off by, attention_mask alone | and position_ids |\n|---|---|---|")
wrong = False
for name in MODELS:
    alone, told = run(name, False), run(name, True)
    print(f"| {name} | {alone:.2g} | {told:.2g} |", flush=True)
    wrong |= alone > 1e-3
raise SystemExit(int(wrong))
