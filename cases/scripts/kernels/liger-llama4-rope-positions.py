# liger-kernel 0.8.5: Llama 4's rotary embedding gives every sequence of a batch the positions of the first
# freqs_cis (B, T, D/2), which transformers computes of each row's position_ids, is flattened to (B·T, D/2) and cut to T rows.
import torch
from setup_kernels import device  # before triton

# isort: split
from liger_kernel.transformers.llama4_rope import liger_llama4_text_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

B, T, D = 2, 4, 16
q, k = torch.randn(B, T, 3, D, device=device), torch.randn(B, T, 1, D, device=device)
frequencies = 10.0 ** -torch.linspace(0, 4, D // 2, device=device)
print("| position_ids | largest error of q, Liger | transformers |\n|---|---|---|")
wrong = []
for padding in (0, 2):  # the second sequence is padded on the left by so many
    positions = torch.stack([torch.arange(T), (torch.arange(T) - padding).clamp(min=0)]).to(device)
    angles = positions[..., None] * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)
    exact = torch.view_as_complex(q.double().unflatten(-1, (-1, 2))) * turn.to(torch.complex128)[:, :, None]
    exact = torch.view_as_real(exact).flatten(-2)
    rotated = (f(q.clone(), k.clone(), turn)[0] for f in (liger_llama4_text_rotary_pos_emb, apply_rotary_emb))
    mine, theirs = (float((found - exact).abs().max()) for found in rotated)
    print(f"| {positions.tolist()} | {mine:.3g} | {theirs:.3g} |")
    wrong.append(mine > 1e-4)
raise SystemExit(int(any(wrong)))
