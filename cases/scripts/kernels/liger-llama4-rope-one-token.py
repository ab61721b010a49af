# liger-kernel 0.8.5: Llama 4's rotary embedding of one token a sequence rotates the wrong memory where batches are more than one
# rows are found by stride(1) of (B, T, heads, D), which any value of a dimension of size 1 may be: contiguous() leaves it as it is.
import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.transformers.llama4_rope import liger_llama4_text_rotary_pos_emb

B, D = 3, 8
angles = torch.rand(1, 1, D // 2, device=device)
turn = torch.polar(torch.ones_like(angles), angles).expand(B, -1, -1)
print("| memory of q | largest error |\n|---|---|")
wrong = []
for memory in ("(B, T, heads, D)", "(B, heads, T, D)"):
    q = torch.randn(B, 1, 4, D, device=device)
    if memory == "(B, heads, T, D)":  # transposed for an attention, and back
        q = q.transpose(1, 2).contiguous().view(B, 4, 1, D).transpose(1, 2)
        q = q.as_strided(q.shape, (4 * D, D, D, 1))
    exact = torch.view_as_complex(q.double().unflatten(-1, (-1, 2))) * turn.to(torch.complex128)[:, :, None]
    found, _ = liger_llama4_text_rotary_pos_emb(q.clone(), torch.randn(B, 1, 1, D, device=device), turn)
    wrong.append(float((found - torch.view_as_real(exact).flatten(-2)).abs().max()))
    print(f"| {memory} | {wrong[-1]:.3g} |")
raise SystemExit(int(max(wrong) > 1e-4))
