# TRL 1.16 (from 1.15 on): every trainer leaves ModernBERT-decoder's prediction head out of log-probs
# add_fused_lm_head multiplies the backbone's states by the output embeddings and skips what the model does between.
import torch
import transformers
from setup_head import compared

torch.manual_seed(0)
config = transformers.ModernBertDecoderConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    local_attention=64,
    cls_token_id=1,
    sep_token_id=2,
    pad_token_id=0,
    layer_types=["sliding_attention", "full_attention"],
)
model = transformers.ModernBertDecoderForCausalLM(config)
model.decoder.weight.data *= 30
raise SystemExit(compared(model))
