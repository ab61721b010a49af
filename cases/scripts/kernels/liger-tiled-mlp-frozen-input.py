# liger-kernel 0.8.5: the weights of a tiled MLP get no gradient where its input needs none, as behind a frozen embedding
# the parameters are no inputs of the autograd function: its output has a gradient only where x has one.
import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP
from transformers import LlamaConfig

config = LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=1)
mlp = LigerTiledSwiGLUMLP(config, num_shards=2).to(device)
bias = torch.zeros(8, device=device, requires_grad=True)
print("| input needs a gradient | weight of the gate has one |\n|---|---|")
missing = False
for needs in (True, False):
    mlp.zero_grad()
    (mlp(torch.randn(1, 6, 8, device=device, requires_grad=needs)) + bias).sum().backward()
    missing |= mlp.gate_proj.weight.grad is None
    print(f"| {'yes' if needs else 'no'} | {'no' if mlp.gate_proj.weight.grad is None else 'yes'} |")
raise SystemExit(int(missing))
