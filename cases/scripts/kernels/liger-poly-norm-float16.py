# liger-kernel 0.8.5: PolyNorm takes cubes and their squares in float16, and from 6.4 on its term of x³ is 0
# the kernel loads x in its own dtype: x⁶ overflows at 6.35, the mean square is inf, and norm(x³) = x³/inf. RMSNorm beside it casts.
import torch
from setup_kernels import device, functional

weight, bias = torch.tensor([1.0, 0.0, 0.0], device=device).half(), torch.tensor(0.0, device=device).half()


def norm_of_cubes(x):
    return x**3 * torch.rsqrt(x.pow(6).mean(-1, keepdim=True) + 1e-6)


print("| values, standard deviation | relative error of the output, Liger | in float32 |\n|---|---|---|")
errors = []
for scale in (0.1, 1.0, 3.0, 10.0):
    x = (torch.randn(4, 64, device=device) * scale).half()
    exact = norm_of_cubes(x.double())
    found = functional.liger_poly_norm(x.clone(), weight, bias, 1e-6, False)
    wide = norm_of_cubes(x.float()).half()
    errors.append([float(((y - exact).norm() / exact.norm()).nan_to_num(float("inf"))) for y in (found, wide)])
    print(f"| {scale:g} | {errors[-1][0]:.3g} | {errors[-1][1]:.3g} |")
raise SystemExit(int(any(mine > 10 * theirs for mine, theirs in errors)))
