# liger-kernel 0.8.5, Gemma 3 and EXAONE 4, as `use_liger_kernel` patches it, GRPO, RLOO, online DPO without vLLM: with two prompts or more every token behind the first is drawn from another distribution than the model's; training and evaluation are right
# liger_kernel/ops/rope.py takes stride(1) of a dimension of size 1 (kernels/liger-rope-one-token.py) where q is laid out as (B, heads, 1, D); these two norm q behind its transposition, and Liger's norm lays it out so
import copy

import torch
import transformers
from setup_patched import device, monkey_patch

transformers.logging.set_verbosity_error()
SIZE = dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=2)
KINDS = {
    "Llama": ("llama", "LlamaForCausalLM", {}),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "EXAONE 4": ("exaone4", "Exaone4ForCausalLM", dict(sliding_window=64, layer_types=["sliding_attention"] * 2)),
    "Gemma 3": ("gemma3_text", "Gemma3ForCausalLM", dict(query_pre_attn_scalar=8)),
}
IDS = torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)


def off(model, rows):
    """Of each token's distribution, as generate draws from it, from that of a forward pass over the whole text."""
    ids = IDS[:rows]
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    out = model.generate(ids, **given, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        logits = model(input_ids=out.sequences, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
    one, two = (x.double().log_softmax(-1) for x in (torch.stack(out.logits, 1), logits))
    return float((one - two).abs().max())


print(
    "| model | one prompt: log-probs off by | two | two, rope=False | two, as transformers has it |\n|---|---|---|---|---|"
)
wrong = False
for name, (key, kind, more) in KINDS.items():
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**SIZE | more)).to(device).eval()
    for weight in model.parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    plain, found = off(copy.deepcopy(model), 2), []
    for rope in (False, True):
        # Triton's interpreter has not all of GEGLU; Trainer hands over model alone
        gate = {"geglu": False} if "gemma" in key and device == "cpu" else {}
        patched = copy.deepcopy(model)
        getattr(monkey_patch, f"apply_liger_kernel_to_{key}")(model=patched, rope=rope, **gate)
        found += [off(patched, rows) for rows in ((1, 2) if rope else (2,))]
    print(f"| {name} | {found[1]:.2g} | {found[2]:.2g} | {found[0]:.2g} | {plain:.2g} |", flush=True)
    wrong |= found[2] > 1e-3
raise SystemExit(int(wrong))
