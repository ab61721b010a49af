# liger-kernel 0.8.5: gradients of the chunked log-probs are off under autocast
# forward multiplies in bfloat16, backward again in float32 outside autocast, with the forward's normaliser: the
# probabilities of the backward do not sum to 1, so the gradients of the logits do not sum to 0.
import torch
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

torch.manual_seed(0)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
hidden, weight = 4 * torch.randn(1, 64, 256, device=device), torch.randn(512, 256, device=device)
ids = torch.randint(0, 512, (1, 64), device=device)
bias = torch.zeros(512, device=device, requires_grad=True)
with torch.autocast(device, torch.bfloat16):
    log_probs = LigerFusedLinearPPOBase.chunk_forward(hidden, weight, ids, bias=bias)
    plain = (hidden @ weight.T).float()
log_probs.sum().backward()
free = torch.zeros(512, device=device, requires_grad=True)
(plain + free).log_softmax(-1).gather(-1, ids[..., None]).sum().backward()
off = float((bias.grad - free.grad).norm() / free.grad.norm())
total, right = float(bias.grad.sum()), float(free.grad.sum())
print("| gradient of the bias, 64 tokens | sum | norm |\n|---|---|---|")
print(f"| Liger | {total:.4g} | {float(bias.grad.norm()):.6g} |")
print(f"| the same bfloat16 logits | {right:.4g} | {float(free.grad.norm()):.6g} |")
print(f"relative distance {off:.3g}")
raise SystemExit(int(off > 1e-3))
