# torch 2.13.0 on a CPU: a query that is NaN gives an attention output of zeros, where its definition gives NaN
# a row whose maximum is not above -inf is taken for one that is masked everywhere (flash kernel); the math backend shows the NaN.
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 4, 16) for _ in range(3))
q[0, 0, 2] = torch.nan
print("| backend | output of the NaN query | others finite |\n|---|---|---|")
hidden = False
for name, backend in (("definition", SDPBackend.MATH), ("flash", SDPBackend.FLASH_ATTENTION)):
    with sdpa_kernel([backend]):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    row = out[0, 0, 2]
    hidden |= bool(torch.isfinite(row).all())
    print(f"| {name} | {float(row[0]):.3g} | {bool(torch.isfinite(out[0, 0, [0, 1, 3]]).all())} |")
raise SystemExit(int(hidden))
