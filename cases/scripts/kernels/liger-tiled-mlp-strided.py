# liger-kernel 0.8.5: a tiled MLP gives an input that is not contiguous the gradient 0, in silence
# `ensure_contiguous` copies x inside `forward`: the copy that is saved asks for no gradient, and backward returns the zeros it began with.
import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP
from transformers import LlamaConfig

config = LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=1)
mlp = LigerTiledSwiGLUMLP(config, num_shards=2).to(device)
x = torch.randn(6, 2, 8, device=device, requires_grad=True).transpose(0, 1)
print("| memory of the input (2, 6, 8) | norm of its gradient |\n|---|---|")
norms = []
for memory, same in (("(2, 6, 8)", x.contiguous()), ("(6, 2, 8)", x)):
    norms.append(float(torch.autograd.grad(mlp(same).sum(), same)[0].norm()))
    print(f"| {memory} | {norms[-1]:.6g} |")
raise SystemExit(int(abs(norms[0] - norms[1]) > 1e-4 * norms[0]))
