# TRL 1.16 (from 1.15 on): every trainer leaves RecurrentGemma's softcap out of log-probs
# add_fused_lm_head reads the softcap under the name final_logit_softcapping alone; this model calls it logits_soft_cap.
import torch
import transformers
from setup_head import compared

torch.manual_seed(0)
config = transformers.RecurrentGemmaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=16,
    lru_width=32,
    conv1d_width=4,
    attention_window_size=64,
    block_types=["recurrent", "attention"],
    logits_soft_cap=3.0,
)
model = transformers.RecurrentGemmaForCausalLM(config)
model.lm_head.weight.data *= 50  # logits that reach the cap, as a trained model's do
raise SystemExit(compared(model))
