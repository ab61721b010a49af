# liger-kernel 0.8.5: GroupNorm adds and squares float16 values in float16, and from 256 on its outputs are 0
# the kernel loads x in its own dtype; its square overflows at 256, and the sums are rounded to 11 bits. LayerNorm beside it casts.
import torch
from setup_kernels import device, functional

weight, bias = torch.ones(8, device=device).half(), torch.zeros(8, device=device).half()
print(
    "| values around | relative error of the output, Liger | of float16 inputs normalised in float32 |\n|---|---|---|"
)
errors = []
for around, scale in ((0.0, 1.0), (4.0, 1.0), (30.0, 1.0), (0.0, 300.0)):
    x = (torch.randn(2, 8, 64, device=device) * scale + around).half()
    exact = torch.nn.functional.group_norm(x.double(), 2)
    wide = torch.nn.functional.group_norm(x.float(), 2).half()
    found = functional.liger_group_norm(x, weight, bias, 8, 2, 1e-5)
    errors.append([float(((y - exact).norm() / exact.norm()).nan_to_num(float("inf"))) for y in (found, wide)])
    print(f"| {around:g} ± {scale:g} | {errors[-1][0]:.3g} | {errors[-1][1]:.3g} |")
raise SystemExit(int(any(mine > 10 * theirs for mine, theirs in errors)))
