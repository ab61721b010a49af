# liger-kernel 0.8.5: float32 experts (apply_liger_kernel_to_qwen3_moe and its kin) are multiplied in tf32, whatever torch says; needs a GPU
# the kernels call tl.dot without input_precision, which is tf32 for float32, and truncates; torch.backends and float32_matmul_precision are not asked.
import os
import sys

import torch

os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"  # 32 configurations of each kernel take minutes to compile

if not torch.cuda.is_available():
    print("needs a CUDA device: on a CPU Liger's experts do not run")
    sys.exit(2)
from liger_kernel.transformers.swiglu import LigerExperts
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

torch.set_float32_matmul_precision("highest")  # torch's default
torch.manual_seed(0)
config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
config._experts_implementation = "eager"
plain, fused = Qwen3MoeExperts(config).cuda(), LigerExperts(config).cuda()
for p in plain.parameters():
    torch.nn.init.normal_(p, std=0.1)
fused.load_state_dict(plain.state_dict())
exact = Qwen3MoeExperts(config).cuda().double()
exact.load_state_dict(plain.state_dict())
x = torch.randn(512, 256, device="cuda")
weights, chosen = torch.randn(512, 8, device="cuda").softmax(-1).topk(2)


def results(experts):
    dtype = next(experts.parameters()).dtype
    given = x.to(dtype).requires_grad_()
    out = experts(given, chosen, weights.to(dtype))
    out.square().sum().backward()
    return out.detach(), given.grad, experts.gate_up_proj.grad, experts.down_proj.grad


print("| float32, relative error | output | gradient of x | of gate_up_proj | of down_proj |\n|---|---|---|---|---|")
right = results(exact)
worst = 0.0
for name, experts in (("transformers", plain), ("Liger", fused)):
    far = [float((a.double() - b).norm() / b.norm()) for a, b in zip(results(experts), right, strict=True)]
    print(f"| {name} | {' | '.join(f'{f:.2g}' for f in far)} |")
    worst = max(far)
raise SystemExit(int(worst > 1e-5))
