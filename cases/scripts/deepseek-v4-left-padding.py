# transformers 5.23: DeepSeek-V4's log-probs depend on how far a prompt is padded on the left
# DeepseekV4CSACompressor and DeepseekV4HCACompressor compress blocks of 4 and 128 tokens from the row's first column on, padding among them.
import torch
import transformers
from setup_padded import log_probs, trained

torch.manual_seed(0)
SIZE = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
SIZE |= dict(q_lora_rank=8, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, qk_rope_head_dim=8)
KINDS = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 128}
ids = torch.randint(3, 32, (1, 24), generator=torch.Generator().manual_seed(0))

print("| layers | padding tokens on the left | log-probs off by at most | with position_ids |\n|---|---:|---:|---:|")
worst = 0.0
for kind, furthest in KINDS.items():
    config = transformers.DeepseekV4Config(**SIZE, layer_types=[kind] * 2)
    model = trained(transformers.DeepseekV4ForCausalLM(config).eval())
    for left in (0, 1, 2, 3, 4, furthest):
        right = log_probs(model, ids, 0)
        found = [float((log_probs(model, ids, left, told) - right).abs().max()) for told in (False, True)]
        worst = max(worst, *found)
        print(f"| {kind} | {left} | {found[0]:.3g} | {found[1]:.3g} |")
raise SystemExit(int(worst > 1e-4))
