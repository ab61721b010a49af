# liger-kernel 0.8.5: patching a model that is loaded (Trainer(use_liger_kernel=True)) computes SiLU whatever config.hidden_act says
# the classes' __init__ refuses another activation; the instance patch binds the forward alone, in training and evaluation.
import copy
import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # its interpreter hands float arguments over as Python floats
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda x: (
        tl.tensor(interpreter.TensorHandle(np.array([x], np.float32), tl.float32), tl.float32)
        if isinstance(x, float)
        else convert(x)
    )
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.arange(3, 19, device=device).view(2, 8)
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
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_act=act,
        initializer_range=0.3,
    )
    models[act] = LlamaForCausalLM(config).to(device)
for act, model in models.items():
    found = []
    for one in (model, copy.deepcopy(model)):
        if one is not model:
            apply_liger_kernel_to_llama(rope=False, rms_norm=False, fused_linear_cross_entropy=False, model=one)
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.item(), float(one.model.layers[0].mlp.down_proj.weight.grad.norm())))
    print(f"| {act} | {found[0][0]:.5f}, {found[0][1]:.5f} | {found[1][0]:.5f}, {found[1][1]:.5f} |")
    wrong |= abs(found[1][0] - found[0][0]) > 1e-4
raise SystemExit(int(wrong))
