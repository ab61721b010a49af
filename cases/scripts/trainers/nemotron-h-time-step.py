# transformers 5.23.0, Nemotron-H (Nemotron Nano 2, Nemotron 3), Zamba2: a forward pass holds each Mamba step at time_step_min (0.001) or above, generation with a cache does not: completions are drawn from another distribution than the one that is trained, and steps that are held there get no gradient
# transformers/models/nemotron_h/modeling_nemotron_h.py:NemotronHMamba2Mixer sets time_step_limit to (config.time_step_min, inf), not to config.time_step_limit, (0, inf), which Bamba and Mamba2 take, and vLLM; time_step_min is that of the initialisation. mamba2_selective_state_update has no limit
from unittest import mock

import torch
import transformers

transformers.logging.set_verbosity_error()
SIZE = dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
SIZE |= dict(num_hidden_layers=4, pad_token_id=0, eos_token_id=1, bos_token_id=2)
HEADS = dict(mamba_num_heads=32, mamba_head_dim=4, ssm_state_size=8, n_groups=1, chunk_size=8)
OTHER = dict(mamba_n_heads=16, mamba_d_head=4, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
ZAMBA = dict(n_mamba_heads=16, mamba_headdim=4, mamba_d_state=8, mamba_ngroups=1, chunk_size=8, mamba_expand=2)
KINDS = {
    "Bamba": SIZE | OTHER | dict(attn_layer_indices=[1, 3]),
    "NemotronH": SIZE | HEADS | dict(head_dim=8, layers_block_type=["mamba", "attention"] * 2),
    "Zamba2": SIZE | ZAMBA | dict(layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1, adapter_rank=4),
}
IDS = torch.randint(3, 32, (4, 8), generator=torch.Generator().manual_seed(0))


def made(name):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(kind.config_class(**KINDS[name])).double().eval()
    for weight in model.parameters():
        if weight.dim() >= 2:  # as large as a trained model's; dt_bias stays as it was initialised
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model


def drawn(model):
    """Greatest and mean distance of a drawn token's log-prob from that of a forward pass over the whole text."""
    torch.manual_seed(0)
    given = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=56, min_new_tokens=56, do_sample=True, top_k=0)
    out = model.generate(IDS, **given, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        logits = model(input_ids=out.sequences, use_cache=False).logits[:, IDS.shape[1] - 1 : -1]
    said = out.sequences[:, IDS.shape[1] :, None]
    one, two = (x.log_softmax(-1).gather(-1, said) for x in (torch.stack(out.logits, 1), logits))
    return float((one - two).abs().max()), float((one - two).abs().mean())


def held(model):
    """The part of the heads' steps that a forward pass raises to the least one: they give dt_bias no gradient."""
    raised, clamp = [], torch.clamp

    def watched(value, *given, min=None, **more):
        if min == getattr(model.config, "time_step_min", None):
            raised.append((value < min).double().mean())
        return clamp(value, *given, min=min, **more)

    with mock.patch("torch.clamp", watched), torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return float(sum(raised) / len(raised)) if raised else 0.0


print("| float64, 56 tokens drawn | a drawn token's log-prob is off by: largest | mean | steps that are raised |")
print("|---|---|---|---|")
wrong = False
for name, mended in (("Bamba", False), ("NemotronH", False), ("NemotronH", True), ("Zamba2", False), ("Zamba2", True)):
    model = made(name)
    for part in model.modules() if mended else ():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = (0.0, float("inf"))
    largest, mean = drawn(model)
    told = f"{name}{', time_step_limit (0, inf)' if mended else ''}"
    print(f"| {told} | {largest:.2g} | {mean:.2g} | {held(model):.0%} |", flush=True)
    wrong |= largest > 1e-3
raise SystemExit(int(wrong))
