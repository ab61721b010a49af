# liger-kernel 0.8.5: sparsemax loses as much as its input's own rounding, and from 1e7 on everything, since it does not subtract the largest
# the threshold is (Σ x - 1) / k of the inputs as they are: the 1 is rounded away. Of x - max(x), which is the same function, nothing is lost.
import torch
from setup_kernels import device, functional


def sparsemax(x):
    z = x.sort(-1, descending=True).values
    total = z.cumsum(-1) - 1
    size = (z * torch.arange(1, x.shape[-1] + 1, device=device) > total).sum(-1, keepdim=True)
    return (x - total.gather(-1, size - 1) / size).clamp(min=0)


print(
    "| values around | largest error, Liger | of a sum, which is 1 | largest error, float32 of x - max |\n|---|---|---|---|"
)
wrong = False
for mean in (0.0, 1e3, 1e5, 1e7, 1e8):
    x = torch.randn(64, 256, device=device) + mean
    exact, found = sparsemax(x.double()), functional.liger_sparsemax(x, -1)
    shifted = sparsemax(x - x.amax(-1, keepdim=True))
    errors = [float((y - exact).abs().max()) for y in (found, shifted)]
    print(f"| {mean:g} | {errors[0]:.2g} | {float((found.double().sum(-1) - 1).abs().max()):.2g} | {errors[1]:.2g} |")
    wrong |= errors[0] > 1e-5 > errors[1]
raise SystemExit(int(wrong))
