# liger-kernel 0.8.5: apply_liger_kernel_to_glm4v(model=…), which Trainer(use_liger_kernel=True) calls, gives wrong gradients; the loss is right
# the norms behind attention and MLP are patched with in_place=True: their backward overwrites the gradient that the residual shares.
import copy

import torch
from setup_patched import device, ids, monkey_patch
from transformers import Glm4vConfig, Glm4vForConditionalGeneration

torch.manual_seed(0)
text = dict(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]),
)
vision = dict(
    hidden_size=16, depth=1, num_heads=2, intermediate_size=16, out_hidden_size=32, patch_size=4, image_size=8
)
model = (
    Glm4vForConditionalGeneration(
        Glm4vConfig(text_config=text, vision_config=vision, image_token_id=35, video_token_id=36)
    )
    .to(device)
    .train()
)
print("| | loss | gradient norm | of layer 0's o_proj |\n|---|---|---|---|")
norms = []
for name, on in (("unpatched", None), ("patched, rms_norm=False", False), ("patched", True)):
    one = copy.deepcopy(model)
    if on is not None:
        monkey_patch.apply_liger_kernel_to_glm4v(rms_norm=on, swiglu=False, fused_linear_cross_entropy=False, model=one)
    loss = one(input_ids=ids, labels=ids).loss
    loss.backward()
    norms.append(float(torch.stack([p.grad.norm() for p in one.parameters() if p.grad is not None]).norm()))
    inner = one.model.language_model.layers[0].self_attn.o_proj.weight.grad.norm()
    print(f"| {name} | {loss.item():.6f} | {norms[-1]:.5g} | {inner:.5g} |")
raise SystemExit(int(abs(norms[2] / norms[0] - 1) > 1e-2))
