# liger-kernel 0.8.5: patching a model that is loaded (Trainer(use_liger_kernel=True)) computes SiLU whatever config.hidden_act says
# the classes' __init__ refuses another activation; the instance patch binds the forward alone, in training and evaluation.
import copy

import torch
from setup_patched import device, ids, monkey_patch, small
from transformers import LlamaConfig, LlamaForCausalLM

wrong = False
print("| hidden_act | unpatched: loss, gradient norm of down_proj | patched |\n|---|---|---|")
models = {}
for act in (
    "silu",
    "relu",
    "gelu",
):  # relu: as SparseLLM/ReluLLaMA; all before the patch, which exchanges the classes as well
    torch.manual_seed(0)
    config = LlamaConfig(
        **small,
        hidden_act=act,
        initializer_range=0.3,
    )
    models[act] = LlamaForCausalLM(config).to(device)
for act, model in models.items():
    found = []
    for one in (model, copy.deepcopy(model)):
        if one is not model:
            monkey_patch.apply_liger_kernel_to_llama(
                rope=False, rms_norm=False, fused_linear_cross_entropy=False, model=one
            )
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.item(), float(one.model.layers[0].mlp.down_proj.weight.grad.norm())))
    print(f"| {act} | {found[0][0]:.5f}, {found[0][1]:.5f} | {found[1][0]:.5f}, {found[1][1]:.5f} |")
    wrong |= abs(found[1][0] - found[0][0]) > 1e-4
raise SystemExit(int(wrong))
